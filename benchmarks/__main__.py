"""`python -m benchmarks NAME [flags]` runs a benchmark by its name."""

import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.common.harness import Benchmark, note
from benchmarks.common.report import BenchmarkError
from serve_app.checkpoints.checkpoint import CheckpointError
from serve_app.request_files import TraceError

BENCHMARKS = {
    "ttft": ("end_to_end.ttft", "5 minutes"),
    "affinity": ("end_to_end.affinity", "15 minutes: two to three for each policy, with pulls and without"),
    "ray_llm": ("end_to_end.ray_llm", "20 minutes: five for the start, one for each router in each run"),
    "remote": ("end_to_end.remote", "20 minutes: five for the servers, a minute for each system in each run"),
    "autoscale": ("end_to_end.autoscale.run", "18 minutes: three to four for each arm"),
    "zero": ("end_to_end.zero", "8 minutes"),
    "models": ("end_to_end.models", "14 minutes"),
    "recording": ("end_to_end.recording", "7 minutes"),
    "front_door": ("end_to_end.front_door", "6 minutes a system"),
    "most_tokens": ("end_to_end.most_tokens", "6 minutes"),
    "agents": ("end_to_end.agents", "35 minutes: three for the reference, three for each of ten runs"),
    "agentx": ("end_to_end.agentx", "70 minutes: 17 for each system"),
    "engine": ("engine.compare", "15 minutes a system"),
    "gpu": ("gpu.run", "9 minutes on a GPU, and with --shape tiny 3 minutes"),
    "predictions": ("engine.predictions", "4 minutes"),
    "host_memory": ("engine.host_memory", "3 minutes"),
    "load_tools": ("end_to_end.load_tools", "3 minutes a tool"),
    "routing": ("routing.decision_latency", "6 minutes"),
    "simulate": ("simulation.run", "5 minutes"),
    "day": ("simulation.day", "an hour and a half: 15 to 20 minutes a seed"),
    "large_file": ("simulation.large_file", "12 minutes"),
    "hostile": ("isolation.hostile.run", "10 minutes"),
    "flooding": ("isolation.flooding", "20 seconds"),
    "batches": ("isolation.batches", "2 minutes"),
    "figures": ("figures", "25 minutes; each row prints its own time"),
}
"""By name, a module below ``benchmarks``, and its approximate duration with its defaults on two CPU cores."""


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark that the first argument names, with the rest as its flags."""
    name = arguments[0] if arguments else ""
    if name not in BENCHMARKS:
        wrong = name and name not in ("-h", "--help")
        note(f"there is no benchmark {name!r}; there are:" if wrong else str(__doc__))
        for each, (module, _) in BENCHMARKS.items():
            note(f"  {each:16} {_purpose(module)}")
        sys.exit(2 if wrong else 0)
    module, duration = BENCHMARKS[name]
    if not {"-h", "--help"} & {*arguments}:
        note(f"{name}: with its defaults about {duration} on two CPU cores")
    run: Benchmark = import_module(f"benchmarks.{module}").run
    try:
        run(arguments[1:], name)
    except (BenchmarkError, CheckpointError, TraceError) as error:
        sys.exit(f"error: {error}")
    except FileNotFoundError as error:
        sys.exit(f"error: {error.filename}: no such file" if error.filename else f"error: {error}")


def _purpose(module: str) -> str:
    # Importing a benchmark takes seconds.
    path = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]


if __name__ == "__main__":
    main(sys.argv[1:])
