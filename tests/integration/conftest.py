"""Real instances for the tests of a module: `warmpath serve` in processes of its own, on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from benchmarks.server import instance


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


def cache_state(url: str) -> dict[str, Any]:
    """What the operator's state endpoint says."""
    response = httpx.get(f"{url}/v1/cache/state", timeout=30)
    response.raise_for_status()
    state: dict[str, Any] = response.json()
    return state


def replicas_of(url: str) -> dict[str, dict[str, Any]]:
    """The state endpoint's replicas, by id."""
    return {replica["replica_id"]: replica for replica in cache_state(url)["replicas"]}


def replica_pids(app: str = "warmpath", deployment: str = "Replica") -> list[int]:
    """Process ids of the running engine replicas, from /proc: Ray names a worker after its actor."""
    wanted = f"ray::ServeReplica:{app}:{deployment}"
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            except OSError:
                continue
            if command.startswith(wanted):
                found.append(int(entry.name))
    return sorted(found)
