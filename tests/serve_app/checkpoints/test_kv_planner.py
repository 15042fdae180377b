"""The planner's arithmetic, against figures that are known."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from serve_app.checkpoints.kv_planner import plan_kv
from serve_app.cli.main import app

LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def test_the_worked_example() -> None:
    """10,000 tokens of Llama-3.1-8B in bf16, and the model's 8,030,261,248 parameters."""
    found = plan_kv(LLAMA, "bfloat16", memory_bytes=80 * 10**9, prefixes=100, prefix_tokens=10_000)
    assert found.prefix_bytes == 1_310_720_000 and found.weights_bytes == 2 * 8_030_261_248
    assert found.prefixes_per_replica == 48 and found.replicas_needed == 3 and found.hit_rate == 0.48


@given(st.integers(0, 10**12), st.integers(1, 5000), st.integers(1, 50_000), st.integers(1, 16))
def test_what_is_planned_fits_and_one_more_would_not(memory: int, prefixes: int, tokens: int, replicas: int) -> None:
    """Prefixes of whole blocks are held within what the weights leave."""
    found = plan_kv(LLAMA, "bfloat16", memory_bytes=memory, prefixes=prefixes, prefix_tokens=tokens, replicas=replicas)
    whole = -(-tokens // 16) * 16 * found.bytes_per_token
    assert found.prefixes_per_replica * whole <= found.kv_bytes < (found.prefixes_per_replica + 1) * whole
    assert (found.hit_rate == 1.0) == (0 < found.replicas_needed <= replicas)


def test_the_command_needs_a_config_only(tmp_path: Path) -> None:
    """Figures for machines, sentences for people, and an error for a size that is none."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    base = ["plan", "--model", str(tmp_path), "--prefixes", "100", "--prefix-tokens", "10000", "--memory"]
    told = CliRunner().invoke(app, [*base, "80GB", "--json"])
    assert json.loads(told.output)["prefix_bytes"] == 1_310_720_000
    assert "need 3 replicas" in CliRunner().invoke(app, [*base, "80GB"]).output
    assert CliRunner().invoke(app, [*base, "much"]).exit_code == 2
