"""Flags, percentiles, progress bars and reports of all benchmarks; a report is JSON, then a sentence in English."""

import argparse
import json
import platform
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import track

from serve_app.config.engine import ENGINES, Capability

PACKAGES = ("warmpath-serve", "ray", "torch", "transformers", "tokenizers", "xxhash", "pyzmq", "openai", "numpy")

T = TypeVar("T")


class BenchmarkError(ValueError):
    """A benchmark cannot run; only the message is shown, without a traceback."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the ``percent``-th percentile (0 to 100), linearly interpolated."""
    return float(np.percentile(values, percent))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the minimum, median, p90, p99 and maximum."""
    percentiles = {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
    return {"min": min(values), **percentiles, "max": max(values)}


def versions() -> dict[str, str]:
    """Return the processor's name and the versions of Python and of ``PACKAGES``."""
    here = {"python": platform.python_version(), "machine": platform.machine(), "processor": _processor()}
    return here | {name: version(name) for name in PACKAGES if any(distributions(name=name))}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    return named[1] if named else platform.processor()


def write(path: Path | None, settings: Mapping[str, Any], results: Any, summary: str) -> None:
    """Write the report as JSON to ``path`` and standard output, and the sentence ``summary`` to standard error."""
    document = {"settings": dict(settings), "versions": versions(), "results": results, "summary": summary}
    text = json.dumps(document, indent=2, default=str)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    print(text, flush=True)
    print(f"\n{summary}", file=sys.stderr)


def progress(items: Iterable[T], description: str) -> Iterable[T]:
    """Yield ``items`` with a progress bar on standard error."""
    return track(items, description, console=Console(stderr=True))


def parser_of(description: str | None, model: str = "") -> argparse.ArgumentParser:
    """Return a parser with ``--json``, and with ``--model`` if that has a default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path)
    if model:
        parser.add_argument("--model", default=model)
    return parser


def metric_sum(metrics: str, name: str, label: str = "") -> float:
    """Return the sum of a metric's samples with ``label`` in Prometheus' text."""
    lines = (line for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} ")) and label in line)
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argparse ``type`` for comma-separated names from ``known``."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


def add_engine_flag(parser: argparse.ArgumentParser, default: str, *needs: Capability, simulated: bool = True) -> None:
    """Add ``--engine`` for the engines that have what it ``needs``; one that is not installed is refused."""
    engines = [
        name for name, traits in ENGINES.items() if traits.can >= {*needs} and (simulated or not traits.simulated)
    ]

    def installed(engine: str) -> str:
        missing = next((traits.missing() for name, traits in ENGINES.items() if name == engine), "")
        if missing:
            raise argparse.ArgumentTypeError(missing)
        return engine

    parser.add_argument("--engine", type=installed, choices=engines, default=default)
