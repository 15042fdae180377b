"""Two instances for all modules of this folder: Ray is started twice, not once a module."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.common.server import instance
from tests.integration.conftest import START, alone
from tests.serve_app.tracing.spans import Collector, collecting

ROOT = Path(__file__).parents[3]
EXPORTER = importlib.util.find_spec("opentelemetry.exporter.otlp") is not None

_BENCHMARK = """
import sys, time
from benchmarks.common.server import instance
settings = ["dtype=float32", "policy=round_robin", "served_model_name=second", "strict=true", *sys.argv[1:]]
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
    """An instance that a benchmark of its own process started, and that process; ``collector`` gets its traces."""

    url: str
    collector: Collector
    benchmark: subprocess.Popen[str]


@pytest.fixture(scope="package")
def second() -> Iterator[Second]:
    """Two strict replicas beside the other instance's, to which requests go in turn, whatever they hold."""
    with collecting() as collector:
        traces = [f"otlp_endpoint={collector.url}"] if EXPORTER else []
        command, env = [sys.executable, "-c", _BENCHMARK, *traces], {**os.environ, "NO_PROXY": "127.0.0.1"}
        with START:
            benchmark = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env)
            assert benchmark.stdout is not None
            url = benchmark.stdout.readline().strip()
        try:
            yield Second(url, collector, benchmark)
        finally:
            benchmark.terminate()
            benchmark.wait(240)
