"""The engine benchmark on a shape with random weights, and the bandwidth limit it is held against."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.common.random_models import SHAPES, write_config
from benchmarks.engine.compare import ROOT, described, figures
from benchmarks.peers.bandwidth import copy_bytes_per_s, decode_limit_tok_s, weight_bytes_read
from benchmarks.peers.warmpath_engine import bandwidth_limit
from serve_app.engine.runner.memory_budget import weight_bytes
from serve_app.engine.runner.model_runner import ModelRunner
from serve_app.engine.settings import EngineSettings


def test_the_limit_is_bytes_over_bandwidth() -> None:
    """16 GB of weights and 16 x 64 tokens of 128 KiB at 4 TB/s: 248 steps a second, 16 tokens each."""
    found = decode_limit_tok_s(
        copy_bytes_per_s=4e12, weight_bytes=16 * 10**9, kv_bytes_per_token=131072, rows=16, context_tokens=64
    )
    assert found == pytest.approx(16 * 4e12 / (16e9 + 1024 * 131072))
    assert copy_bytes_per_s(torch.device("cpu"), 1 << 22, repeats=2) > 0


def test_a_shapes_weights_are_drawn_and_counted(tmp_path: Path) -> None:
    """The embedding is looked up, not read; tied to the output it is read once."""
    config = write_config("llama-tiny", tmp_path)
    runner = ModelRunner(tmp_path, EngineSettings(num_blocks=8, dtype="float32", device="cpu", load_format="dummy"))
    table = 4 * config["vocab_size"] * config["hidden_size"]
    assert weight_bytes_read(runner.model) == weight_bytes(runner.config, torch.float32) - table
    limit = bandwidth_limit(runner, 1 << 20)
    assert limit["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert limit["decode_limit_tok_s"] > 0
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tied = ModelRunner(tmp_path, EngineSettings(num_blocks=8, dtype="float32", device="cpu", load_format="dummy"))
    assert weight_bytes_read(tied.model) == weight_bytes_read(runner.model)


def test_the_8b_shape_is_the_published_one(tmp_path: Path) -> None:
    """8,030,261,248 weights; an unknown name is an error that lists the known ones."""
    from transformers import AutoConfig

    write_config("llama-3.1-8b", tmp_path)
    assert weight_bytes(AutoConfig.from_pretrained(tmp_path), torch.bfloat16) == 2 * 8_030_261_248
    assert described("random:llama-3.1-8b", tmp_path) == {
        "model": str(tmp_path),
        "load_format": "dummy",
        "vocab_size": 128256,
        "max_model_len": 16384,
    }
    with pytest.raises(ValueError, match=", ".join(SHAPES)):
        described("random:gpt-9", tmp_path)


def test_what_was_reached_of_a_limit_is_said_where_there_is_one() -> None:
    seconds = {"cold_s": [1.0], "warm_s": [0.1], "decode_s": [2.0], "batch_s": [4.0]}
    workload = {"prefix_tokens": 90, "question_tokens": 10, "batch_new_tokens": 8}
    assert figures(seconds, workload, {"decode_limit_tok_s": 1024.0})["decode_of_limit"] == 0.5
    assert "decode_of_limit" not in figures(seconds, workload, {})


def test_the_benchmark_runs_on_random_weights(tmp_path: Path) -> None:
    """The command as a user gives it, on the smallest shape."""
    out = tmp_path / "engine.json"
    flags = (
        "--device cpu --dtype float32 --runs 1 --prefix-tokens 64 --question-tokens 8 --batch-new-tokens 1 --threads 1"
    )
    systems = ["--systems", "warmpath", "--model", "random:llama-tiny", "--json", str(out)]
    command = [sys.executable, "-m", "benchmarks.engine.compare", *flags.split(), *systems]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=240)
    results = json.loads(out.read_text())["results"]
    ours = results["systems"]["warmpath"]
    assert ours["decode_tok_s"] > 0
    refused = {"amx": "NoAmx: it computes bfloat16, not float32"}
    facts = {"attention_backend": "runs", "refused_backends": refused, "decode_graphs": 0.0}
    assert ours["facts"] == facts
    assert results["ratios"] == {}
