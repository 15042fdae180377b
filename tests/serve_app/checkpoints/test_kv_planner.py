"""The planner's arithmetic, against known figures."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from serve_app.checkpoints.kv_planner import kv_room, plan_kv
from serve_app.checkpoints.sources.model_config import model_config
from serve_app.cli.main import app
from tests.serve_app.checkpoints.sources.tiny_gguf import HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, write_tiny_gguf

LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def test_the_worked_example() -> None:
    """10,000 tokens of Llama-3.1-8B in bf16, and the model's 8,030,261,248 parameters. (docs: sizing)"""
    found = plan_kv(kv_room(LLAMA, "bfloat16", 80 * 10**9), prefixes=100, prefix_tokens=10_000)
    assert found.prefix_bytes == 1_310_720_000 and found.weights_bytes == 2 * 8_030_261_248
    assert found.prefixes_per_replica == 48 and found.replicas_needed == 3 and found.hit_rate == 0.48


@given(st.integers(0, 10**12), st.integers(1, 5000), st.integers(1, 50_000), st.integers(1, 16))
def test_planned_prefixes_fit_and_one_more_would_not(memory: int, prefixes: int, tokens: int, replicas: int) -> None:
    """Prefixes of whole blocks fit into the memory that the weights leave."""
    found = plan_kv(kv_room(LLAMA, "bfloat16", memory), prefixes, tokens, replicas)
    whole = -(-tokens // 16) * 16 * found.bytes_per_token
    assert found.prefixes_per_replica * whole <= found.kv_bytes < (found.prefixes_per_replica + 1) * whole
    assert (found.hit_rate == 1.0) == (0 < found.replicas_needed <= replicas)


def test_the_command_needs_a_config_only(tmp_path: Path) -> None:
    """It prints figures for machines, sentences for people, and an error for an invalid size."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    base = ["plan", "--model", str(tmp_path), "--prefixes", "100", "--prefix-tokens", "10000", "--memory"]
    told = CliRunner().invoke(app, [*base, "80GB", "--json"])
    assert json.loads(told.output)["prefix_bytes"] == 1_310_720_000
    assert "need 3 replicas" in CliRunner().invoke(app, [*base, "80GB"]).output
    assert CliRunner().invoke(app, [*base, "much"]).exit_code == 2
    table = json.loads(told.output)["by_memory"]
    assert [row["prefixes"] for row in table] == sorted(row["prefixes"] for row in table)
    assert table[2] == {"memory_bytes": 80 * 10**9, "prefixes": 48, "hit_rate": 0.48}


@pytest.mark.parametrize(("ranks", "part"), [((8, 1), 1.0), ((16, 1), 2.0), ((1, 4), 1.0), ((2, 3), 33 / 32)])
def test_ranks_hold_a_head_and_as_many_layers_as_the_fullest(ranks: tuple[int, int], part: float) -> None:
    """Eight KV heads on sixteen ranks are held twice; of 32 layers one of three stages has eleven."""
    one, several = (kv_room(LLAMA, "bfloat16", 80 * 10**9, each) for each in ((1, 1), ranks))
    assert several.bytes_per_token == one.bytes_per_token * part
    assert several.tokens == pytest.approx(one.tokens / part, abs=16)


def test_a_trace_is_planned_by_memory(tmp_path: Path) -> None:
    """Two prompts alternate and share nothing: a cache for one never hits, a cache for both misses only twice."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    prompts = [list(range(10)), list(range(10, 20))] * 4
    rows = [{"timestamp": at, "input_length": 5120, "hash_ids": ids} for at, ids in enumerate(prompts)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    one_prompt = 2 * 8_030_261_248 + 5120 * 131_072
    base = ["plan", "--model", str(tmp_path / "config.json"), "--trace", str(tmp_path / "trace.jsonl"), "--json"]
    told = json.loads(CliRunner().invoke(app, [*base, "--memory", str(one_prompt)]).output)
    by_memory = {row["memory_bytes"]: row for row in told["by_memory"]}
    assert told["highest_hit_rate"] == 0.75 and told["good_kv_bytes"] == 19 * 512 * 131_072
    once, twice = by_memory[one_prompt], by_memory[2 * one_prompt]
    assert (once["kv_tokens"], once["hit_rate"], once["evicted_tokens_per_request"]) == (5120, 0.0, 7 * 5120 / 8)
    assert twice["kv_tokens"] > 2 * 5120 and (twice["hit_rate"], twice["evicted_tokens_per_request"]) == (0.75, 0.0)
    both = CliRunner().invoke(app, [*base, "--memory", "80GB", "--prefixes", "1", "--prefix-tokens", "1"])
    assert both.exit_code == 2


def test_a_gguf_file_is_planned_without_a_conversion(tmp_path: Path, demo_model_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", demo_model_path)
    found = model_config(str(tmp_path / "tiny.gguf"))
    assert (found["hidden_size"], found["intermediate_size"], found["num_hidden_layers"]) == (HIDDEN, INNER, LAYERS)
    assert (found["num_attention_heads"], found["num_key_value_heads"]) == (HEADS, KV_HEADS)
    vocabulary = json.loads((demo_model_path / "config.json").read_text())["vocab_size"]
    assert abs(found["vocab_size"] - vocabulary) < 8
    plan_kv(kv_room(found, "bfloat16", 10**9), prefixes=1, prefix_tokens=16)
    assert model_config("demo")["num_hidden_layers"] > 0
