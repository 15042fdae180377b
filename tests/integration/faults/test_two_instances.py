"""Two instances on one machine: each answers its own requests, and only those, and ends with who started it."""

from __future__ import annotations

import httpx
import pytest

from tests.integration.conftest import HTTP, cache_state
from tests.integration.faults.conftest import Second

pytestmark = pytest.mark.integration


def test_instances_share_nothing_and_a_benchmark_ends_with_its_own(url: str, second: Second) -> None:
    """Ingress ports allow sharing (SO_REUSEPORT), so instances with equal ones would get each other's requests.

    docs/security.md
    """
    routers = {base: {cache_state(base)["router_id"] for _ in range(25)} for base in (url, second.url)}
    assert [len(names) for names in routers.values()] == [1, 1]
    assert routers[url] != routers[second.url]
    second.benchmark.terminate()
    assert second.benchmark.wait(240) == 128 + 15
    with pytest.raises(httpx.ConnectError):
        HTTP.get(f"{second.url}/health")
    assert HTTP.get(f"{url}/health").status_code == 200
