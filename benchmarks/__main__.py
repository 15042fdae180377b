"""`python -m benchmarks NAME [flags]` runs a benchmark by its name, wherever its file lies."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

from benchmarks.common.report import BenchmarkError
from serve_app.checkpoints.checkpoint import CheckpointError

MODULES = {
    "ttft": "end_to_end.ttft",
    "estimates": "end_to_end.estimates",
    "affinity": "end_to_end.affinity",
    "cutover": "end_to_end.cutover",
    "pull": "end_to_end.pull",
    "replay": "end_to_end.replay.run",
    "autoscale": "end_to_end.autoscale.run",
    "failures": "end_to_end.failures.run",
    "overhead": "end_to_end.overhead",
    "vllm_serve": "end_to_end.vllm_serve",
    "tenancy": "end_to_end.tenancy",
    "tracing": "end_to_end.tracing",
    "watcher": "end_to_end.watcher",
    "page_shots": "end_to_end.page_shots",
    "engine": "engine.compare",
    "determinism": "engine.determinism",
    "lora": "engine.lora",
    "speculation": "engine.speculation",
    "eagle_head": "engine.eagle_training",
    "structured": "engine.structured",
    "kv_events": "engine.kv_events",
    "predictions": "engine.predictions",
    "vllm_pull": "engine.vllm_pull",
    "routing": "routing.decision_latency",
    "simulate": "simulation.run",
    "simulate_day": "simulation.day.run",
    "flooding": "isolation.flooding",
    "timing_attack": "isolation.timing_attack",
    "admission": "isolation.admission",
    "hostile": "isolation.hostile.run",
    "raw_fuzz": "isolation.raw_fuzz",
    "misses": "misses.run",
    "soak": "soak.run",
    "crashes": "crashes.run",
}
"""A benchmark's name and its module below ``benchmarks``."""


def main() -> None:
    """Run the benchmark that the first argument names; the rest are its own flags.

    What keeps it from running, such as a file, trace or model that is not there, is a sentence and exit status 1.
    """
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in MODULES:
        wrong = name and name not in ("-h", "--help")
        print(f"there is no benchmark {name!r}; there are:" if wrong else __doc__, file=sys.stderr)
        for known, module in MODULES.items():
            print(f"  {known:14} {_purpose(module)}", file=sys.stderr)
        sys.exit(2 if wrong else 0)
    sys.argv[:2] = [f"benchmarks {name}"]
    try:
        runpy.run_module(f"benchmarks.{MODULES[name]}", run_name="__main__", alter_sys=False)
    except (BenchmarkError, CheckpointError) as error:
        sys.exit(f"error: {error}")
    except FileNotFoundError as error:
        sys.exit(f"error: {error.filename}: no such file" if error.filename else f"error: {error}")


def _purpose(module: str) -> str:
    """Return the first line of a module's docstring, without importing what the module needs."""
    path = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]


if __name__ == "__main__":
    main()
