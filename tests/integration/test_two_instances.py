"""Two instances on one machine: each answers its own requests, and only those."""

from __future__ import annotations

import httpx
import pytest

from benchmarks.common.server import instance

pytestmark = pytest.mark.integration


def test_instances_do_not_share_requests() -> None:
    """Ingress ports allow sharing (SO_REUSEPORT), so instances with equal ones would get each other's requests."""
    flags = ["--engine", "simulated", "--replicas", "1"]
    with (
        instance(*flags, "--set", "served_model_name=first") as first,
        instance(*flags, "--set", "served_model_name=second") as second,
    ):
        for _ in range(25):
            for url, name in ((first, "first"), (second, "second")):
                # A connection of its own for each request: the kernel shares out connections.
                assert httpx.get(url + "/v1/models", timeout=30).json()["data"][0]["id"] == name
