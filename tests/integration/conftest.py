"""What tests of real instances (`warmpath serve` in processes of its own, on loopback) share.

Whatever travels beside an answer (feeds, counters) is waited for: a loaded machine takes its time, and no test relies
on how fast anything is.
"""

import os
import ssl
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import psutil
import pytest
from filelock import FileLock

from benchmarks.common.report import metric_sum

Started = TypeVar("Started")
PATIENCE_S = 120.0
"""Longer than anything takes on a machine that does much else; nothing waits so long unless it is going to fail."""
_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Else httpx loads certificates for every client that it makes, also of plain HTTP."""
HTTP = httpx.Client(
    timeout=PATIENCE_S, verify=NO_CERTIFICATES, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
)
"""A connection of its own for each request, which any ingress may get."""
START = FileLock(Path(tempfile.gettempdir()) / f"warmpath-tests-{_RUN}.lock")
"""Held by whichever of a run's workers is starting an instance."""


def clients(url: str = "", **options: Any) -> httpx.AsyncClient:
    """Clients of an instance, who wait as long as a test does."""
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=NO_CERTIFICATES, **options)


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
        time.sleep(0.1)


def wait_until_cached(
    url: str, body: Mapping[str, Any], tokens: int = 100, headers: Mapping[str, str] | None = None, ingresses: int = 1
) -> None:
    """Wait until routers have heard that a replica holds so many tokens of a request's prompt.

    What a replica stored travels beside its answer, not in it. ``headers``: the operator's key where there are tenants.
    """
    asked = range(ingresses * ingresses)
    eventually(lambda: all(explained(url, body, headers)["best_cached_tokens"] >= tokens for _ in asked))


def explained(url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a router knows, and would decide, of a request's first prompt."""
    answer = HTTP.post(f"{url}/v1/cache/explain", json=body, headers=headers).raise_for_status()
    prompt: dict[str, Any] = answer.json()["prompts"][0]
    return prompt


def cache_state(url: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the operator's state endpoint says."""
    state: dict[str, Any] = HTTP.get(f"{url}/v1/cache/state", headers=headers).raise_for_status().json()
    return state


def metric(url: str, name: str, label: str = "", headers: Mapping[str, str] | None = None) -> float:
    """The sum of a metric's samples, of those only whose labels hold ``label``."""
    return metric_sum(HTTP.get(f"{url}/metrics", headers=headers).raise_for_status().text, name, label)


def replicas_of(url: str, headers: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """The state endpoint's replicas, by id."""
    return {replica["replica_id"]: replica for replica in cache_state(url, headers)["replicas"]}


def workers_of(url: str, name: str) -> list[int]:
    """The processes of an instance's Ray workers that are called so: they have the replicas' parent."""
    parent = psutil.Process(next(int(replica["pid"]) for replica in replicas_of(url).values())).parent()
    assert parent is not None
    pids = []
    for worker in parent.children():
        with suppress(psutil.Error):  # it has just ended
            if name in " ".join(worker.cmdline()):
                pids.append(worker.pid)
    return pids


def wait_for_replicas(
    url: str, count: int, without: Collection[str] = (), headers: Mapping[str, str] | None = None
) -> None:
    """Wait until the router knows so many replicas, has heard of each, and of none ``without``.

    Those that were just killed: until their death is noticed they are known too, and so there are enough.
    """

    def known() -> bool:
        replicas = replicas_of(url, headers)
        heard = all("pid" in replica for replica in replicas.values())
        return heard and len(replicas) == count and not replicas.keys() & set(without)

    eventually(known)
