"""What tests of real instances (`warmpath serve` in processes of its own, on loopback) share.

Whatever travels beside an answer (feeds, counters) is waited for: a loaded machine takes its time, and no test relies
on how fast anything is.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest
from filelock import FileLock
from openai import OpenAI

Started = TypeVar("Started")
PATIENCE_S = 120.0
"""Longer than anything takes on a machine that does much else; nothing waits so long unless it is going to fail."""
_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
START = FileLock(Path(tempfile.gettempdir()) / f"warmpath-tests-{_RUN}.lock")
"""Held by whichever of a run's workers is starting an instance."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Instances start in half a minute on an idle machine, and in minutes on a busy one."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))


@contextmanager
def alone(start: AbstractContextManager[Started]) -> Iterator[Started]:
    """Enter what starts an instance while no other worker does.

    A start keeps every core at work; where several share two of them, Ray's nodes are not up in the 30 s they have.
    """
    with ExitStack() as stack:
        with START:
            started = stack.enter_context(start)
        yield started


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    """The real OpenAI client, without retries of its own."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def eventually(holds: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    """Wait until something holds. What cannot be asked just now does not hold."""
    deadline_s = time.monotonic() + within_s
    while True:
        refused: Exception | None = None
        try:
            if holds():
                return
        except (httpx.HTTPError, openai.APIError, KeyError) as error:  # an error's body has no such keys
            refused = error
        assert time.monotonic() < deadline_s, f"it did not happen in time: {refused!r}"
        time.sleep(0.05)


def wait_until_cached(
    url: str, body: Mapping[str, Any], tokens: int = 100, headers: Mapping[str, str] | None = None
) -> None:
    """Wait until the router has heard that a replica holds so many tokens of a request's prompt.

    What a replica stored travels beside its answer, not in it. ``headers``: the operator's key where there are tenants.
    """

    def held() -> bool:
        answer = httpx.post(f"{url}/v1/cache/explain", json=body, headers=headers, timeout=PATIENCE_S)
        answer.raise_for_status()
        return int(answer.json()["prompts"][0]["best_cached_tokens"]) >= tokens

    eventually(held)


def cache_state(url: str) -> dict[str, Any]:
    """What the operator's state endpoint says."""
    response = httpx.get(f"{url}/v1/cache/state", timeout=PATIENCE_S)
    response.raise_for_status()
    state: dict[str, Any] = response.json()
    return state


def replicas_of(url: str) -> dict[str, dict[str, Any]]:
    """The state endpoint's replicas, by id."""
    return {replica["replica_id"]: replica for replica in cache_state(url)["replicas"]}


def workers_of(url: str, name: bytes) -> list[int]:
    """The processes of an instance's Ray workers that are called so: they have the replicas' parent."""
    parent = _parent_of(next(int(replica["pid"]) for replica in replicas_of(url).values()))
    found = []
    for entry in Path("/proc").iterdir():
        try:
            ours = entry.name.isdecimal() and _parent_of(int(entry.name)) == parent
            if ours and name in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it has just ended
    return found


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for_replicas(url: str, count: int, without: Collection[str] = ()) -> None:
    """Wait until the router knows so many replicas, has heard of each, and of none ``without``.

    Those that were just killed: until their death is noticed they are known too, and so there are enough.
    """

    def known() -> bool:
        replicas = replicas_of(url)
        told = all("pid" in replica for replica in replicas.values())
        return told and len(replicas) == count and not replicas.keys() & set(without)

    eventually(known)
