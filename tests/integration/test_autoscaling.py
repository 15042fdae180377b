"""Autoscaling on real Ray Serve: grows under load, shrinks after it, and a killed controller changes nothing."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from benchmarks.common.server import instance
from tests.integration.conftest import (
    HTTP,
    alone,
    cache_state,
    eventually,
    metric,
    replicas_of,
    wait_for_replicas,
    workers_of,
)

pytestmark = [pytest.mark.integration, pytest.mark.long]

SETTINGS = "{min_replicas: 1, max_replicas: 3, target_ttft_s: 0.5, upscale_delay_s: 1, downscale_delay_s: 10}"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """One slow replica (a cost model of 2,000 tokens/s) that may become three."""
    flags = ["--set", f"autoscaling={SETTINGS}", "--set", "simulated_prefill_tokens_per_s=2000"]
    with alone(instance("--model", "demo", "--engine", "simulated", *flags)) as base:
        yield base


@contextmanager
def load(url: str) -> Iterator[list[int]]:
    """Eight clients each send cold prompts of 3,000 words in sequence; yield the answers' statuses."""
    stop, numbers, statuses = threading.Event(), count(), list[int]()

    def client() -> None:
        while not stop.is_set():
            body = {"model": "demo", "prompt": f"{next(numbers)} " + "word " * 3000, "max_tokens": 2}
            statuses.append(HTTP.post(f"{url}/v1/completions", json=body).status_code)

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def decisions(url: str) -> list[dict[str, Any]]:
    """Return the controller's notices, newest first."""
    found: list[dict[str, Any]] = cache_state(url)["notices"]["autoscaling"]
    return found


def test_it_grows_survives_its_controller_and_shrinks(url: str) -> None:
    """Load makes three replicas, which survive a SIGKILL of the controller; without load there is one.

    docs: autoscaling
    """
    wait_for_replicas(url, 1)
    with load(url) as statuses:
        wait_for_replicas(url, 3)
        grown = [decision for decision in decisions(url) if decision["target"] > decision["from"]]
        assert grown
        assert grown[0]["reason"] in ("work", "backlog", "ttft")
        assert "replicas" in grown[0]["why"]

        before = set(replicas_of(url))
        (killed,) = workers_of(url, "ServeController")
        killed_s = time.time()
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: workers_of(url, "ServeController") not in ([], [killed]))

        def held() -> list[dict[str, Any]]:
            return [notice for notice in decisions(url) if notice["reason"] == "hold" and notice["at_s"] > killed_s]

        eventually(lambda: bool(held()))  # it looks again, first without any data, and holds
        assert held()[-1]["target"] == 3
        answered = len(statuses)
        eventually(lambda: len(statuses) > answered + 16)
        assert set(replicas_of(url)) == before
    assert set(statuses) == {200}

    wait_for_replicas(url, 1)

    def last_change() -> dict[str, Any]:
        return next(decision for decision in decisions(url) if decision["target"] != decision["from"])

    # It may have shrunk earlier, if a busy machine delayed the clients themselves.
    eventually(lambda: last_change()["target"] == 1)
    assert last_change()["reason"] == "load_fell"
    eventually(lambda: metric(url, "warmpath_autoscaling_target_replicas") == 1)
