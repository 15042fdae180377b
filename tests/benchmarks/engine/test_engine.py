"""Benchmarks of the engine alone: figures come from real runs, pairs for speculation are what is said of them."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.engine.compare import ROOT
from benchmarks.engine.draft_pairs import LOWER_LAYERS, build_pairs, eagle_pair
from benchmarks.engine.speculation import Workload, compare, run
from benchmarks.peers.warmpath_engine import config_of


def test_pairs_share_a_vocabulary_and_an_agreeing_one_reaches_the_bar(demo_model_path: Path, tmp_path: Path) -> None:
    pairs = build_pairs(demo_model_path, tmp_path)
    assert pairs["same"] == (demo_model_path, demo_model_path)
    for model, drafter in (pairs["agreeing"], pairs["lower_layers"]):
        configs = [json.loads((path / "config.json").read_text()) for path in (model, drafter)]
        assert [config["num_hidden_layers"] for config in configs] == [4, LOWER_LAYERS]
        assert configs[0]["vocab_size"] == configs[1]["vocab_size"]
    # The model drafting for itself: the prompt's step gives a token, then 24 come in five steps.
    figures = compare(*pairs["same"], Workload(2, 30, 25), 4, threads=1)
    assert figures["outputs_equal"]
    assert figures["base_steps_per_token"] <= 0.35
    assert figures["acceptance_rate"] > 0.75
    assert figures["speed_up"] > 0
    never = compare(*pairs["lower_layers"], Workload(1, 30, 12), 4, threads=1)
    assert never["outputs_equal"]
    assert never["base_steps_per_token"] > 0.8


def test_a_head_made_to_agree_reaches_the_bar(demo_model_path: Path, tmp_path: Path) -> None:
    base, head = eagle_pair(demo_model_path, tmp_path)
    workload = Workload(2, 40, 30)
    plain, drafted = (run(base, drafter, workload, 4, dtype="float32", threads=1) for drafter in (None, head))
    assert drafted.tokens == plain.tokens
    assert drafted.base_steps_per_token <= 0.35


def test_on_a_gpu_the_engine_reserves_it() -> None:
    sizes = {"block_size": 32, "cache_tokens": 3200, "max_model_len": 2048, "threads": 1}
    config = config_of({"system": "warmpath", "device": "cuda", "dtype": "bfloat16", **sizes})
    assert (config.replica_num_gpus, config.num_blocks) == (1, 100)


def test_the_benchmark_runs_and_writes_figures(tmp_path: Path) -> None:
    """The command as a user gives it, on the demo model and our engine alone."""
    out = tmp_path / "engine.json"
    flags = "--systems warmpath --model demo --device cpu --dtype float32 --runs 1 --threads 1"
    sizes = "--prefix-tokens 64 --question-tokens 8 --batch-new-tokens 1"
    command = [sys.executable, "-m", "benchmarks", "engine", *flags.split(), *sizes.split(), "--json", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=240)
    results = json.loads(out.read_text())["results"]
    assert results["systems"]["warmpath"]["decode_tok_s"] > 0
    assert results["ratios"] == {}
