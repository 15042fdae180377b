"""The harness of all benchmarks: flags, rows, runs in turns, progress and reports.

A benchmark is a function from its flags to `Findings`, called ``run`` in its module. Its report is JSON, then a
sentence in English.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.progress import track

from benchmarks.common.report import BenchmarkError, spread
from serve_app.config.engine import ENGINES, Capability

PACKAGES = ("warmpath-serve", "ray", "torch", "transformers", "tokenizers", "xxhash", "pyzmq", "openai", "numpy")
ROOT = Path(__file__).parents[2]

Options = argparse.Namespace
Flag = Callable[[argparse.ArgumentParser], object]
"""Adds a flag to a benchmark's parser."""
T = TypeVar("T")


class FlagError(BenchmarkError):
    """The flags ask for nothing that can be measured; the usage is shown."""


class Findings(NamedTuple):
    """What a benchmark found. ``summary``: the same in a sentence or two.

    ``settings``: of the report, if not the flags. ``more``: other parts of the report. ``passed``: false ends the
    command with status 1.
    """

    results: Any
    summary: str
    settings: Mapping[str, Any] | None = None
    more: Mapping[str, Any] = {}
    passed: bool = True


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark with its flags. ``model``: the default of ``--model``, "" for none. ``simulated``: never measured."""

    measure: Callable[[Options], Findings]
    about: str
    flags: Sequence[Flag]
    model: str
    simulated: bool

    def parser(self, name: str = "") -> argparse.ArgumentParser:
        """Return the parser of its flags."""
        parser = argparse.ArgumentParser(prog=f"benchmarks {name}".rstrip(), description=self.about)
        parser.add_argument("--json", type=Path)
        if self.model:
            parser.add_argument("--model", default=self.model)
        for add in self.flags:
            add(parser)
        return parser

    def parse(self, arguments: Sequence[str] = ()) -> Options:
        """Return the flags, with their defaults."""
        return self.parser().parse_args(arguments)

    def __call__(self, arguments: Sequence[str], name: str = "") -> None:
        """Measure, and write the report."""
        parser = self.parser(name)
        options = parser.parse_args(arguments)
        load = os.getloadavg()[0]
        try:
            findings = self.measure(options)
        except FlagError as error:
            parser.error(str(error))
        simulated = {name for name, traits in ENGINES.items() if traits.simulated}
        settings = dict(vars(options) if findings.settings is None else findings.settings)
        host = {"cores": os.cpu_count(), "load_before": round(load, 2)}
        write(
            options.json,
            {
                "settings": settings,
                "versions": versions(),
                "host": host,
                "simulated": self.simulated or {**vars(options), **settings}.get("engine") in simulated,
                **findings.more,
                "results": findings.results,
                "summary": "Simulated: " * self.simulated + findings.summary,
            },
        )
        if not findings.passed:
            raise SystemExit(1)


def benchmark(
    about: str | None, *flags: Flag, model: str = "", simulated: bool = False
) -> Callable[[Callable[[Options], Findings]], Benchmark]:
    """Make a benchmark of a function. ``about``: its module's docstring; ``simulated``: marked so in the summary."""
    return lambda measure: Benchmark(measure, about or "", flags, model, simulated)


def flag(name: str, default: Any = None, help_: str | None = None, **more: Any) -> Flag:
    """Return a flag with its default's type. ``more``: as of argparse."""
    if default is False:
        more.setdefault("action", "store_true")
    elif default is not None and not {"type", "action", "choices"} & more.keys():
        more["type"] = type(default)
    return lambda parser: parser.add_argument(f"--{name}", default=default, help=help_, **more)


def names_flag(name: str, names: Collection[str], default: str = "", help_: str | None = None) -> Flag:
    """Return a flag of comma-separated ``names``; without a default, of all."""
    return flag(name, default or ",".join(names), help_, type=names_of(names))


def engine_flag(default: str, *needs: Capability, simulated: bool = True) -> Flag:
    """Return ``--engine`` for the engines that have what it ``needs``; one that is not installed is refused."""
    engines = [
        name for name, traits in ENGINES.items() if traits.can >= {*needs} and (simulated or not traits.simulated)
    ]

    def installed(engine: str) -> str:
        missing = next((traits.missing() for name, traits in ENGINES.items() if name == engine), "")
        if missing:
            raise argparse.ArgumentTypeError(missing)
        return engine

    return flag("engine", default, type=installed, choices=engines)


def names_of(names: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argparse ``type`` for comma-separated ones of these names."""

    def parse(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",") if name.strip()]
        for name in chosen:
            if name not in names:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(names)}")
        return chosen

    return parse


def note(text: str) -> None:
    """Print to standard error: standard output has only the report."""
    print(text, file=sys.stderr, flush=True)


def progress(items: Iterable[T], description: str) -> Iterable[T]:
    """Yield ``items`` with a progress bar on standard error."""
    return track(items, description, console=Console(stderr=True))


def rows_of(
    names: Iterable[str],
    measure: Callable[[str], dict[str, Any]],
    failures: tuple[type[Exception], ...] = (BenchmarkError, OSError),
) -> dict[str, dict[str, Any]]:
    """Return each system's row; a system that fails loses its own only. OSError: its command is missing."""
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            rows[name] = measure(name)
        except failures as error:
            rows[name] = {"not_measured": str(error) or type(error).__name__}
        note(f"{name}: {json.dumps(rows[name])}")  # in case a later one fails
    return rows


def in_turns(
    names: Iterable[str], runs: int, measure: Callable[[str, int], dict[str, T]], *, alternate: bool = False
) -> dict[str, list[dict[str, T]]]:
    """Return each system's row of each run; they take turns. ``alternate``: each second run goes backwards."""
    rows: dict[str, list[dict[str, T]]] = {name: [] for name in names}
    for run in range(runs):
        for name in list(rows)[:: -1 if alternate and run % 2 else 1]:
            rows[name].append(measure(name, run))
            note(f"{name}, run {run + 1} of {runs}: {json.dumps(rows[name][-1])}")  # in case a later one fails
    return rows


def spreads(runs: Sequence[Any]) -> Any:
    """Return the spread over the runs of each figure in their nested rows; a missing figure counts as 0."""
    if isinstance(runs[0], dict):
        return {
            name: spreads([run.get(name, 0.0) for run in runs])
            for name in sorted({name for run in runs for name in run})
        }
    return spread(runs)


def apart(
    module: str,
    workload: Mapping[str, Any],
    *,
    python: str = sys.executable,
    timeout_s: float = 1800,
    quiet: bool = False,
) -> dict[str, Any]:
    """Measure in a process of its own: JSON on standard input and output. A failure becomes a row with the reason.

    ``quiet``: standard error is not shown; its last line is the reason.
    """
    try:
        done = subprocess.run(
            [python, "-m", module], input=json.dumps(workload), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if quiet else None, text=True, cwd=ROOT, timeout=timeout_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"not_measured": str(error) or type(error).__name__}
    if done.returncode:
        lines = (done.stderr or "").strip().splitlines()
        return {"not_measured": lines[-1] if lines else f"its process ended with status {done.returncode}"}
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def versions() -> dict[str, str]:
    """Return the processor's name and the versions of Python and of ``PACKAGES``."""
    here = {"python": platform.python_version(), "machine": platform.machine(), "processor": _processor()}
    return here | {name: version(name) for name in PACKAGES if any(distributions(name=name))}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    return named[1] if named else platform.processor()


def write(path: Path | None, document: Mapping[str, Any]) -> None:
    """Write a report as JSON to ``path`` and standard output, and its summary to standard error."""
    text = json.dumps(document, indent=2, default=str)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    print(text, flush=True)
    note(f"\n{document['summary']}")
