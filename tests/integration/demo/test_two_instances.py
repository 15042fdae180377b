"""Two instances on one machine: each answers its own requests, and only those, and ends with who started it."""

from __future__ import annotations

import httpx
import pytest

from tests.integration.conftest import PATIENCE_S
from tests.integration.demo.conftest import Second

pytestmark = pytest.mark.integration


def test_instances_do_not_share_requests(url: str, second: Second) -> None:
    """Ingress ports allow sharing (SO_REUSEPORT), so instances with equal ones would get each other's requests.

    docs/security.md
    """
    for _ in range(25):
        for base, name in ((url, "demo"), (second.url, "second")):
            # A connection of its own for each request: the kernel shares out connections.
            assert httpx.get(base + "/v1/models", timeout=PATIENCE_S).json()["data"][0]["id"] == name


def test_a_benchmark_that_is_terminated_stops_its_instance(url: str, second: Second) -> None:
    """However a benchmark ends, its instance ends with it, and no other does."""
    assert httpx.get(f"{second.url}/health", timeout=PATIENCE_S).status_code == 200
    second.benchmark.terminate()
    assert second.benchmark.wait(240) == 128 + 15
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{second.url}/health", timeout=PATIENCE_S)
    assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
