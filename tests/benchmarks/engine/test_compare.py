"""The engine benchmark, on our engine alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.engine.compare import ROOT


def test_the_benchmark_runs_and_writes_figures(tmp_path: Path) -> None:
    """The command as a user gives it, on the demo model."""
    out = tmp_path / "engine.json"
    flags = (
        "--device cpu --dtype float32 --runs 1 --prefix-tokens 64 --question-tokens 8 --batch-new-tokens 1 --threads 1"
    )
    systems = ["--systems", "warmpath", "--model", "demo", "--json", str(out)]
    command = [sys.executable, "-m", "benchmarks.engine.compare", *flags.split(), *systems]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=240)
    results = json.loads(out.read_text())["results"]
    ours = results["systems"]["warmpath"]
    assert ours["decode_tok_s"] > 0
    assert results["ratios"] == {}
