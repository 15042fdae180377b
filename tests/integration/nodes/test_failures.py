"""Three nodes, real clients, and parts of the cluster killed under them: every answer is what it would have been.

One instance; from the least that dies to the most. Streams that go through what dies (HAProxy, their ingress) break
with it: nothing can hold a client's connection but the process that has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from cluster.local import LocalCluster
from tests.harness.failures import strikes
from tests.harness.failures.clients import Clients, Seen
from tests.integration.conftest import alone, eventually

pytestmark = pytest.mark.integration

REQUESTS = 4
ALL_WHOLE = {"whole": REQUESTS, "lost": 0, "cut short": 0, "altered": 0}


@pytest.fixture(scope="module")
def running() -> Iterator[LocalCluster]:
    with alone(LocalCluster(3)) as made:
        made.deploy(strikes.deployed())
        yield made


@pytest.fixture
def cluster(running: LocalCluster) -> LocalCluster:
    """The cluster, whole again after whatever was killed before."""
    strikes.wait_until_whole(running)
    return running


def disturbed(
    cluster: LocalCluster,
    asked: Sequence[dict[str, Any]],
    ready: Callable[[Sequence[Seen]], Awaitable[bool]],
    strike: Callable[[LocalCluster], float],
) -> dict[str, int]:
    """Ask undisturbed, then with the strike; return how the second answers compare with the first."""

    async def run() -> dict[str, int]:
        clients = Clients(cluster.url)
        await clients.undisturbed(asked)
        seen, _ = await clients.disturbed(asked, ready, lambda: strike(cluster))
        return clients.outcomes(seen)

    return asyncio.run(run())


def names(cluster: LocalCluster, kind: str) -> set[str]:
    return {one["name"] for one in cluster.processes(kind)}


def test_controller_killed(cluster: LocalCluster) -> None:
    """Streams go on, and Serve finds the same replicas again."""
    before = names(cluster, "Replica"), names(cluster, "Ingress")
    old = cluster.processes("controller")[0]["pid"]
    asked = strikes.bodies(REQUESTS, 100, tokens=100, max_tokens=150)
    assert disturbed(cluster, asked, strikes.streaming(cluster), strikes.kill_controller) == ALL_WHOLE
    eventually(lambda: [one["pid"] for one in cluster.processes("controller")] not in ([], [old]))
    strikes.wait_until_whole(cluster)
    assert (names(cluster, "Replica"), names(cluster, "Ingress")) == before


def test_replica_killed_before_the_first_byte(cluster: LocalCluster) -> None:
    before = names(cluster, "Replica")
    asked = strikes.bodies(REQUESTS, 200, tokens=strikes.LATE_TOKENS, max_tokens=10)
    assert disturbed(cluster, asked, strikes.computing(cluster), strikes.kill_busiest_replica) == ALL_WHOLE
    eventually(lambda: len(before - names(cluster, "Replica")) == 1)


def test_replica_killed_in_the_middle_of_streams(cluster: LocalCluster) -> None:
    before = names(cluster, "Replica")
    asked = strikes.bodies(REQUESTS, 300, tokens=500, max_tokens=150)
    assert disturbed(cluster, asked, strikes.streaming(cluster), strikes.kill_busiest_replica) == ALL_WHOLE
    eventually(lambda: len(before - names(cluster, "Replica")) == 1)


def test_one_of_two_ingresses_killed_before_the_first_byte(cluster: LocalCluster) -> None:
    """Requests that it had taken go to the other one: nobody has had a byte of their answers."""
    before = names(cluster, "Ingress")
    asked = strikes.bodies(REQUESTS, 400, tokens=strikes.LATE_TOKENS, max_tokens=10)
    assert disturbed(cluster, asked, strikes.computing(cluster), strikes.kill_ingress) == ALL_WHOLE
    eventually(lambda: len(before - names(cluster, "Ingress")) == 1)


def test_rolling_update_under_load(cluster: LocalCluster) -> None:
    """A setting that restarts everything: new replicas and ingresses take over without a client noticing."""
    asked = strikes.bodies(REQUESTS, 500, tokens=100, max_tokens=40)

    async def run() -> dict[str, int]:
        clients = Clients(cluster.url)
        await clients.undisturbed(asked)
        seen = await clients.under_load(asked, REQUESTS, lambda: strikes.rolling_update(cluster, 1))
        return clients.outcomes(seen)

    outcomes = asyncio.run(run())
    assert outcomes.pop("whole") >= REQUESTS
    assert not any(outcomes.values()), outcomes


def test_node_killed_with_its_replicas(cluster: LocalCluster) -> None:
    """Other nodes take its replicas; as many run as before."""
    replicas = cluster.processes("Replica")
    on_it = {one["name"] for one in replicas if one["node"] == max(each["node"] for each in replicas)}
    asked = strikes.bodies(REQUESTS, 600, tokens=500, max_tokens=150)
    assert disturbed(cluster, asked, strikes.streaming(cluster), strikes.kill_node) == ALL_WHOLE
    eventually(lambda: not on_it & names(cluster, "Replica"))


def test_haproxy_killed(cluster: LocalCluster) -> None:
    """Nothing listens until Serve has noticed; then everything is as before."""
    before = names(cluster, "Replica")
    assert strikes.seconds_until_http_answers(cluster) < strikes.UP_TIMEOUT_S
    asked = strikes.bodies(REQUESTS, 700, tokens=100, max_tokens=10)
    asyncio.run(Clients(cluster.url).undisturbed(asked))
    assert names(cluster, "Replica") == before
