"""The benchmark of the engine alone: its figures come from real runs."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.engine.compare import ROOT


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
