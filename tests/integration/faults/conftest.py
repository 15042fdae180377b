"""Two instances for all modules of this folder, with slow simulated replicas of small capacity, easy to kill at work.

A benchmark in its own process started the second instance, which uses Ray Serve's other mode.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.common.server import instance
from serve_app.checkpoints.demo_model import ensure_demo_model
from tests.integration.conftest import START, alone
from tests.serve_app.tracing.spans import Collector, collecting

EXPORTER = importlib.util.find_spec("opentelemetry.exporter.otlp") is not None

_BENCHMARK = """
import sys, time
from benchmarks.common.server import instance
with instance(*sys.argv[1:], env={"RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"}) as url:
    print(url, flush=True)
    time.sleep(3600)
"""


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in its own directory; no replica can start while the directory is moved away."""
    return shutil.copytree(ensure_demo_model("demo"), tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture(scope="package")
def flags(model: Path) -> Sequence[str]:
    """Two replicas of 2,000 tokens/s; bursts meet running sequences, a queue, and refusals."""
    settings = {
        "simulated_prefill_tokens_per_s": 2000,
        "simulated_decode_step_s": 0.02,
        "max_model_len": 32768,
        "max_num_seqs": 8,
        "max_waiting_requests": 8,
        "max_queued_requests": 8,
        "no_replica_wait_s": 0.2,
    }
    pairs = (f"--set={name}={value}" for name, value in settings.items())
    return ["--model", str(model), "--engine", "simulated", *pairs]


@pytest.fixture(scope="package")
def url(flags: Sequence[str]) -> Iterator[str]:
    with alone(instance(*flags)) as base:
        yield base


@dataclass(frozen=True, slots=True)
class Second:
    """An instance started by a benchmark in its own process, and that process; ``collector`` gets its traces."""

    url: str
    collector: Collector
    benchmark: subprocess.Popen[str]


@pytest.fixture(scope="package")
def second(flags: Sequence[str]) -> Iterator[Second]:
    """Replicas beside the first instance's, which get requests in turn, regardless of their caches."""
    with collecting() as collector:
        more = ["--set=policy=round_robin", "--set=max_queued_requests=16"]
        more += [f"--set=otlp_endpoint={collector.url}"] if EXPORTER else []
        command, env = [sys.executable, "-c", _BENCHMARK, *flags, *more], {**os.environ, "NO_PROXY": "127.0.0.1"}
        root = Path(__file__).parents[3]
        with START:
            benchmark = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True, env=env)
            assert benchmark.stdout is not None
            url = benchmark.stdout.readline().strip()
        try:
            yield Second(url, collector, benchmark)
        finally:
            benchmark.terminate()
            benchmark.wait(240)
