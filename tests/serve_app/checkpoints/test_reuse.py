"""The reuse curve of a trace, against a simulated cache of each size."""

import json
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.trace import DEFAULT_TRACE
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, TraceRequest, read_trace, reuse_curve


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Prompts that are paths from the root of a tree, as chains of hashes are."""
    parents = draw(st.lists(st.integers(0, 30), min_size=1, max_size=30))
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        before = paths[parent % node] if node and parent % 5 else ()
        paths.append((*before, node))
    chosen = draw(st.lists(st.sampled_from(paths), min_size=1, max_size=40))
    return [TraceRequest(0.0, len(ids) * TRACE_BLOCK_TOKENS - draw(st.integers(0, 511)), 1, ids) for ids in chosen]


def simulated(trace: list[TraceRequest], blocks: int) -> tuple[int, int]:
    """Return (tokens hit, blocks evicted) of an LRU cache that frees a prompt's end first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hit_tokens = evicted = 0
    for prompt in trace:
        known = 0
        while known < len(prompt.hash_ids) and prompt.hash_ids[known] in cache:
            known += 1
        hit_tokens += min(prompt.prompt_tokens, known * TRACE_BLOCK_TOKENS)
        for one in reversed(prompt.hash_ids):
            cache[one] = None
            cache.move_to_end(one)
        while len(cache) > blocks:
            cache.popitem(last=False)
            evicted += 1
    return hit_tokens, evicted


@given(traces(), st.integers(0, 40))
def test_a_simulated_cache_hits_and_evicts_the_same(trace: list[TraceRequest], blocks: int) -> None:
    curve = reuse_curve(trace)
    hit_tokens, evicted = simulated(trace, blocks)
    assert curve.hit_rate(blocks) * curve.prompt_tokens == pytest.approx(hit_tokens)
    assert curve.evictions(blocks) == evicted


@given(traces(), st.floats(0, 1))
def test_the_fewest_blocks_for_a_hit_rate_are_the_fewest(trace: list[TraceRequest], part: float) -> None:
    curve = reuse_curve(trace)
    wanted = part * curve.hit_rate()
    blocks = curve.blocks_for(wanted)
    assert curve.hit_rate(blocks) >= wanted - 1e-9
    assert blocks == 0 or curve.hit_rate(blocks - 1) < wanted


def test_the_reuse_of_the_published_trace_is_known() -> None:
    """An unlimited cache hits every block that occurred before."""
    prompts = read_trace(DEFAULT_TRACE)
    curve = reuse_curve(prompts)
    assert curve.hit_rate() * curve.prompt_tokens == pytest.approx(simulated(prompts, curve.distinct_blocks)[0])
    assert 0 < curve.hit_rate(1000) < curve.hit_rate(4000) < curve.hit_rate()


@pytest.mark.parametrize("line", ["no json", '{"timestamp": 0}', '{"timestamp": 0, "input_length": 9, "hash_ids": []}'])
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 600, "hash_ids": [0, 1]}) + f"\n{line}\n")
    with pytest.raises(ValueError, match="line 2"):
        read_trace(trace)
