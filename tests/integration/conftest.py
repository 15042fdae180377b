"""Helpers for tests of real instances (`warmpath serve` in its own processes, on loopback).

Tests wait for everything that travels beside an answer (feeds, counters): a loaded machine is slow, and no test relies
on speed.
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
from serve_app.replica.reporter import STATS_INTERVAL_S
from tests.harness.eventually import eventually as until_true

Started = TypeVar("Started")
PATIENCE_S = 120.0
"""Longer than any operation takes on a busy machine; only a failing test waits this long."""
_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Without it, httpx loads certificates for every client, even for plain HTTP."""
HTTP = httpx.Client(
    timeout=PATIENCE_S, verify=NO_CERTIFICATES, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
)
"""Opens a new connection for each request, so that any ingress may get it."""
START = FileLock(Path(tempfile.gettempdir()) / f"warmpath-tests-{_RUN}.lock")
"""Held by the worker of a run that is starting an instance."""


def clients(url: str = "", **options: Any) -> httpx.AsyncClient:
    """Return a client of an instance, with the same patience as a test."""
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=NO_CERTIFICATES, **options)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Allow for slow starts: an instance needs half a minute on an idle machine, and minutes on a busy one."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))


@contextmanager
def alone(start: AbstractContextManager[Started]) -> Iterator[Started]:
    """Enter a context that starts an instance, while no other worker does.

    A start keeps every core busy; if several share two cores, Ray's nodes miss their start timeout of 30 s.
    """
    with ExitStack() as stack:
        with START:
            started = stack.enter_context(start)
        yield started


def eventually(holds: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds, also of an instance that cannot answer yet."""
    not_yet = (httpx.HTTPError, openai.APIError, KeyError)  # an error's body has no such keys
    until_true(holds, within_s, failures=not_yet, every_s=0.1)


def wait_until_cached(
    url: str, body: Mapping[str, Any], tokens: int = 100, headers: Mapping[str, str] | None = None, ingresses: int = 1
) -> None:
    """Wait until routers know that a replica holds this many tokens of a request's prompt.

    Reports of stored blocks travel beside the answer, not in it. ``headers``: the operator's key if there are tenants.
    """
    asked = range(ingresses * ingresses)
    eventually(lambda: all(explained(url, body, headers)["best_cached_tokens"] >= tokens for _ in asked))


def explained(url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a router's knowledge and decision about a request's first prompt."""
    answer = HTTP.post(f"{url}/v1/cache/explain", json=body, headers=headers).raise_for_status()
    prompt: dict[str, Any] = answer.json()["prompts"][0]
    return prompt


def cache_state(url: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the operator's state document."""
    state: dict[str, Any] = HTTP.get(f"{url}/v1/cache/state", headers=headers).raise_for_status().json()
    return state


def metric(url: str, name: str, label: str = "", headers: Mapping[str, str] | None = None) -> float:
    """Return the sum of a metric's samples, of those only with labels that contain ``label``."""
    return metric_sum(HTTP.get(f"{url}/metrics", headers=headers).raise_for_status().text, name, label)


def await_reports(url: str, headers: Mapping[str, str] | None = None) -> None:
    """Wait until each replica has reported figures that are newer than this call."""
    begun_s = time.monotonic()

    def newer() -> bool:
        ages_s = [replica["report_age_s"] for replica in replicas_of(url, headers).values()]
        return all(time.monotonic() - age_s > begun_s + 2 * STATS_INTERVAL_S for age_s in ages_s)

    eventually(newer)


def replicas_of(url: str, headers: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Return the state document's replicas, by id."""
    return {replica["replica_id"]: replica for replica in cache_state(url, headers)["replicas"]}


def workers_of(url: str, name: str) -> list[int]:
    """Return the pids of an instance's Ray workers with this name: they have the replicas' parent."""
    for replica in replicas_of(url).values():
        with suppress(psutil.Error, KeyError):  # it was just killed, or has not reported
            parent = psutil.Process(int(replica["pid"])).parent()
            assert parent is not None
            workers = parent.children()
            break
    else:
        return []
    pids = []
    for worker in workers:
        with suppress(psutil.Error):  # it has just ended
            if name in " ".join(worker.cmdline()):
                pids.append(worker.pid)
    return pids


def wait_for_replicas(
    url: str, count: int, without: Collection[str] = (), headers: Mapping[str, str] | None = None
) -> None:
    """Wait until the router knows this many replicas, has a report from each, and knows none of ``without``.

    ``without``: replicas that were just killed, which count as known until their death is noticed.
    """

    def known() -> bool:
        replicas = replicas_of(url, headers)
        heard = all("pid" in replica for replica in replicas.values())
        return heard and len(replicas) == count and not replicas.keys() & set(without)

    eventually(known)
