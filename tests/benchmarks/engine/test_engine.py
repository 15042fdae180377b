"""The benchmark of the engine alone takes its figures from real runs."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.common.harness import ROOT
from benchmarks.peers.warmpath_engine import config_of


def test_on_a_gpu_the_engine_reserves_it() -> None:
    sizes = {"block_size": 32, "cache_tokens": 3200, "max_model_len": 2048, "threads": 1}
    config = config_of({"system": "warmpath", "device": "cuda", "dtype": "bfloat16", **sizes})
    assert (config.replica_num_gpus, config.num_blocks) == (1, 100)


def test_the_benchmark_runs_and_writes_figures(tmp_path: Path) -> None:
    """Run the user's command, on the demo model and our engine alone."""
    out = tmp_path / "engine.json"
    flags = "--systems warmpath --model demo --device cpu --dtype float32 --runs 1 --threads 1"
    sizes = "--prefix-tokens 64 --question-tokens 8 --batch-new-tokens 1"
    command = [sys.executable, "-m", "benchmarks", "engine", *flags.split(), *sizes.split(), "--json", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=240)
    results = json.loads(out.read_text())["results"]
    assert results["systems"]["warmpath"]["decode_tok_s"] > 0
    assert results["ratios"] == {}
