"""A benchmark's instance ends with the benchmark, however that ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[3]
HOLD = """
import time
from benchmarks.common.server import instance
with instance("--engine", "simulated", "--replicas", "1") as url:
    print(url, flush=True)
    time.sleep(300)
"""


@pytest.mark.timeout(300)
def test_a_benchmark_that_is_terminated_stops_its_instance() -> None:
    benchmark = subprocess.Popen([sys.executable, "-c", HOLD], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert benchmark.stdout is not None
    url = benchmark.stdout.readline().strip()
    assert httpx.get(f"{url}/health", timeout=30).status_code == 200
    benchmark.terminate()
    assert benchmark.wait(180) == 128 + 15
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", timeout=5)
