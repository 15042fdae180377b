"""The flag ``--engine`` of benchmarks that can measure several. What is not installed is told before anything runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from serve_app.config.vllm import MISSING, vllm_missing


def add_engine_flag(parser: argparse.ArgumentParser, engines: Sequence[str], default: str) -> None:
    """Add ``--engine`` with these choices."""
    parser.add_argument("--engine", type=_installed, choices=engines, default=default)


def _installed(engine: str) -> str:
    if engine == "vllm" and vllm_missing():
        raise argparse.ArgumentTypeError(MISSING)
    return engine
