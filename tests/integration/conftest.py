"""Real instances for the tests of a module: `warmpath serve` in processes of its own, on loopback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from benchmarks.common.server import instance


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Two replicas of the demo model in float32, no tenants."""
    with instance("--set", "dtype=float32", "--set", "kv_cache_bytes=67108864") as base:
        yield base


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    """The real OpenAI client, without retries of its own."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def let_the_feed_arrive() -> None:
    """What a replica stored travels beside its answer, not in it: a repeat within milliseconds may find nothing."""
    time.sleep(1.0)


def eventually(holds: Callable[[], bool], within_s: float = 20.0) -> None:
    """Wait until something holds: replicas publish counters twice a second, and a loaded machine takes longer."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.05)


def cache_state(url: str) -> dict[str, Any]:
    """What the operator's state endpoint says."""
    response = httpx.get(f"{url}/v1/cache/state", timeout=30)
    response.raise_for_status()
    state: dict[str, Any] = response.json()
    return state


def replicas_of(url: str) -> dict[str, dict[str, Any]]:
    """The state endpoint's replicas, by id."""
    return {replica["replica_id"]: replica for replica in cache_state(url)["replicas"]}
