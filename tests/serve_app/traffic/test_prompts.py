"""Traces of ids made from recorded traffic share what its lines share, for `plan` and `benchmarks simulate`."""

import argparse
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.common.trace import DEFAULT_TRACE, add_trace_flags, chosen_trace
from serve_app.checkpoints.reuse import TraceRequest, read_trace, reuse_curve
from serve_app.cli.main import app
from serve_app.traffic.prompts import traced_prompts
from serve_app.traffic.reader import read_traffic
from tests.serve_app.traffic.test_reader import HEADER, line, prompts, written


def common(one: TraceRequest, other: TraceRequest) -> int:
    """Return the number of ids that two prompts share at their beginnings."""
    pairs = zip(one.hash_ids, other.hash_ids, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one.hash_ids), len(other.hash_ids)))


@given(chains=prompts(), rest=st.integers(0, 15))
def test_prompts_share_the_whole_blocks_that_their_ids_share(
    tmp_path_factory: pytest.TempPathFactory, chains: list[list[int]], rest: int
) -> None:
    """A partial block is shared by no two prompts, and every token has an id."""
    lines = [line(n, 16 * len(chain) + rest, chain) for n, chain in enumerate(chains)]
    path = written(tmp_path_factory.mktemp("law") / "a.jsonl", HEADER, *lines)
    traced = list(traced_prompts(read_traffic([path])))
    assert [len(each.hash_ids) for each in traced] == [len(chain) + bool(rest) for chain in chains]
    raw = [TraceRequest(0.0, 16 * len(chain), 1, tuple(chain)) for chain in chains]
    for one in range(len(chains)):
        for other in range(one):
            assert common(traced[one], traced[other]) == common(raw[one], raw[other])


def test_the_published_trace_hits_less_by_its_partial_blocks_alone() -> None:
    """Mooncake gives partial blocks ids, too; no cache of ours reuses one."""
    whole = [
        TraceRequest(each.arrival_s, each.prompt_tokens // 512 * 512, 1, each.hash_ids[: each.prompt_tokens // 512])
        for each in read_trace(DEFAULT_TRACE)
    ]
    expected = reuse_curve(whole)
    curve = reuse_curve(traced_prompts(read_traffic([DEFAULT_TRACE])))
    assert int(curve.hit_tokens[-1]) == int(expected.hit_tokens[-1])


def test_a_benchmark_takes_recorded_traffic_in_blocks_of_a_trace(tmp_path: Path) -> None:
    ids = list(range(64))
    path = written(tmp_path / "a.jsonl", HEADER, line(0, 1030, ids), line(9, 600, [*ids[:36], 99]))
    parser = argparse.ArgumentParser()
    add_trace_flags(parser, requests=2)
    one, other = chosen_trace(parser.parse_args(["--trace", str(path)]))
    assert (len(one.hash_ids), len(other.hash_ids), common(one, other)) == (3, 2, 1)


def test_plan_reads_recorded_traffic_of_its_block_size(tmp_path: Path) -> None:
    """The hit rate is by the file's blocks, and what is wrong with it is told beside the figures."""
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "vocab_size": 512,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                "intermediate_size": 128, "max_position_embeddings": 4096,
            }
        )
    )  # fmt: skip
    path = written(tmp_path / "a.jsonl", HEADER, line(9, 40, [1, 2]), line(0, 40, [1, 3]))
    told = CliRunner().invoke(app, ["plan", "--memory", "1GB", "--model", str(config), "--trace", str(path), "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["highest_hit_rate"] == pytest.approx(16 / 80)
    assert "1 requests stand behind later ones" in told.stderr
