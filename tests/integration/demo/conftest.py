"""Two instances for all modules of this folder: Ray is started twice, not once a module."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.common.server import instance
from tests.integration.conftest import START, alone

ROOT = Path(__file__).parents[3]

_BENCHMARK = """
import time
from benchmarks.common.server import instance
settings = ("dtype=float32", "policy=round_robin", "served_model_name=second", "strict=true")
with instance("--model", "demo", *(f"--set={setting}" for setting in settings)) as url:
    print(url, flush=True)
    time.sleep(3600)
"""


@pytest.fixture(scope="package")
def url() -> Iterator[str]:
    """Two replicas of the demo model in float32, no tenants."""
    with alone(instance("--model", "demo", "--set", "dtype=float32", "--set", "kv_cache_bytes=268435456")) as base:
        yield base


@dataclass(frozen=True, slots=True)
class Second:
    """An instance that a benchmark of its own process started, and that process."""

    url: str
    benchmark: subprocess.Popen[str]


@pytest.fixture(scope="package")
def second() -> Iterator[Second]:
    """Two strict replicas beside the other instance's, to which requests go in turn, whatever they hold."""
    with START:
        benchmark = subprocess.Popen([sys.executable, "-c", _BENCHMARK], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert benchmark.stdout is not None
        url = benchmark.stdout.readline().strip()
    try:
        yield Second(url, benchmark)
    finally:
        benchmark.terminate()
        benchmark.wait(240)
