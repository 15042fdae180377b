"""Percentiles, versions, progress, and the one way every benchmark ends: JSON, then a sentence in plain English.

Knows nothing of what is measured. A figure that is a ratio is quoted; an absolute time belongs to its machine.
"""

from __future__ import annotations

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

from serve_app.config.engine import ENGINES

PACKAGES = ("warmpath-serve", "ray", "torch", "transformers", "tokenizers", "xxhash", "pyzmq", "openai", "numpy")

T = TypeVar("T")


class BenchmarkError(ValueError):
    """What keeps a benchmark from being run; str() is all that whoever runs it needs to know."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the ``percent``-th percentile (0 to 100), linearly interpolated. Raises ValueError when empty."""
    if not values:
        raise ValueError("no values")
    return float(np.percentile(values, percent))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return minimum, median, p90, p99 and maximum."""
    percentiles = {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
    return {"min": min(values), **percentiles, "max": max(values)}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter, with the processor's name."""
    here = {"python": platform.python_version(), "machine": platform.machine(), "processor": _processor()}
    return here | {name: version(name) for name in PACKAGES if any(distributions(name=name))}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    return named[1] if named else platform.processor()


def write(path: Path | None, settings: Mapping[str, Any], results: Any, summary: str) -> None:
    """Write ``{"settings", "versions", "results", "summary"}`` to ``path`` (made with its folders) and standard output.

    ``summary``: what was found, in a sentence or two of plain English; it comes last on standard error too.
    """
    document = {"settings": dict(settings), "versions": versions(), "results": results, "summary": summary}
    text = json.dumps(document, indent=2, default=str)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    print(text, flush=True)
    print(f"\n{summary}", file=sys.stderr)


def progress(items: Iterable[T], description: str, total: float | None = None) -> Iterable[T]:
    """Yield ``items`` with a progress bar on standard error: standard output is for the JSON."""
    return track(items, description, total, console=Console(stderr=True))


def parser_of(description: str | None, model: str = "") -> argparse.ArgumentParser:
    """Return a benchmark's parser with the flags that most have: ``--json``, and ``--model`` where it has a default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path)
    if model:
        parser.add_argument("--model", default=model)
    return parser


def metric_sum(metrics: str, name: str, label: str = "") -> float:
    """Return the sum of a metric's samples in Prometheus' text, of those only whose labels hold ``label``."""
    lines = (line for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} ")) and label in line)
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argparse ``type`` for names from ``known``, separated by commas; "" is none of them.

    It raises ArgumentTypeError for any other name, so that a wrong one is told before anything runs.
    """

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


def add_engine_flag(parser: argparse.ArgumentParser, engines: Sequence[str], default: str) -> None:
    """Add ``--engine`` with these choices; one that is not installed is an error that says what to do."""

    def installed(engine: str) -> str:
        missing = next((traits.missing() for name, traits in ENGINES.items() if name == engine), "")
        if missing:
            raise argparse.ArgumentTypeError(missing)
        return engine

    parser.add_argument("--engine", type=installed, choices=engines, default=default)
