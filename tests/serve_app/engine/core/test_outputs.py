"""With any caching, chunking or batching, the tokens are those of plain generation (fp32, greedy)."""

import numpy as np
import pytest

from router.protocol.events import Event
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.tiny import prompt, request, run_all


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_hit_at_every_block_boundary_changes_no_token(
    kind: str, make_engine: MakeEngine, reference: Reference
) -> None:
    """Each prefix of ten blocks in turn is cached, then the whole prompt is sent. (docs: caching)"""
    ids = prompt(165)
    expected = reference(kind, ids, 12)
    for cached in range(11):
        engine = make_engine(kind)
        if cached:
            run_all(engine, [request("warm", ids[: cached * 16], 1)])
        got = run_all(engine, [request("hit", ids, 12)])
        assert got.cached["hit"] == cached * 16
        assert got.tokens["hit"] == expected
        engine.stop()


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize(("budget", "caching"), [(17, True), (64, True), (256, True), (256, False)])
def test_mixed_batches_and_chunks_equal_solo_generation(
    kind: str, budget: int, caching: bool, make_engine: MakeEngine, reference: Reference
) -> None:
    """Prompts of every awkward length run at once, in chunks; the second time with hits. (docs: caching)"""
    prompts = {f"p{n}": prompt(n, seed=n) for n in (1, 2, 15, 16, 17, 31, 48, 100, 300)}
    events: list[Event] = []
    engine = make_engine(kind, events=events, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    for turn in ("cold", "warm"):
        got = run_all(engine, [request(name, ids, 10) for name, ids in prompts.items()])
        for name, ids in prompts.items():
            assert got.tokens[name] == reference(kind, ids, 10), (turn, name)
            assert got.cached[name] == (0 if turn == "cold" or not caching else (len(ids) - 1) // 16 * 16)
    assert bool(events) == caching


def test_long_contexts_shared_and_not_decode_as_if_alone(make_engine: MakeEngine, reference: Reference) -> None:
    """Runs long enough to be read in place, shared by several sequences, are beside short ones and forks."""
    base = prompt(560, seed=5)
    prompts = {
        "a": np.concatenate([base, prompt(9, 1)]),
        "b": np.concatenate([base, prompt(40, 2)]),
        "c": np.concatenate([base, prompt(1, 3)]),
        "d": np.concatenate([base[:400], prompt(30, 4)]),
        "e": prompt(620, seed=6),
        "f": prompt(20, seed=7),
    }
    engine = make_engine("qwen3")
    run_all(engine, [request("warm", base, 1)])
    got = run_all(engine, [request(name, ids, 40) for name, ids in prompts.items()])
    for name, ids in prompts.items():
        assert got.tokens[name] == reference("qwen3", ids, 40), name


def test_stop_token_ends_and_is_not_delivered(make_engine: MakeEngine, reference: Reference) -> None:
    expected = reference("qwen3", prompt(20), 10)
    stop = expected[4]
    got = run_all(make_engine(), [request("s", prompt(20), 10, stop_token_ids=(stop,))])
    assert got.tokens["s"] == expected[: expected.index(stop)]
    assert got.finish["s"] == "stop"
