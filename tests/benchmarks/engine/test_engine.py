"""The benchmark of the engine alone takes its figures from real runs."""

import json
from pathlib import Path

from benchmarks.__main__ import main
from benchmarks.peers.warmpath_engine import config_of


def test_on_a_gpu_the_engine_reserves_it() -> None:
    sizes = {"block_size": 32, "cache_tokens": 3200, "max_model_len": 2048, "threads": 1}
    config = config_of({"system": "warmpath", "device": "cuda", "dtype": "bfloat16", **sizes})
    assert (config.replica_num_gpus, config.num_blocks) == (1, 100)


def test_the_benchmark_runs_and_writes_figures(tmp_path: Path, tiny_model_path: Path) -> None:
    """Run the user's command, on a tiny model and our engine alone, which has a process of its own."""
    out = tmp_path / "engine.json"
    flags = f"--systems warmpath --model {tiny_model_path} --device cpu --dtype float32 --runs 1 --threads 1"
    sizes = "--prefix-tokens 64 --question-tokens 8 --batch-new-tokens 1"
    main(["engine", *flags.split(), *sizes.split(), "--json", str(out)])
    results = json.loads(out.read_text())["results"]
    assert results["systems"]["warmpath"]["decode_tok_s"] > 0
    assert results["ratios"] == {}
