"""Three nodes, real clients, and killed parts of the cluster: every answer equals the undisturbed one.

All tests share one instance and go from the smallest failure to the largest. A stream breaks if a process on its
path to the client dies (HAProxy, its ingress), because only that process holds the client's connection.
"""

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.common.prompts import text_of
from cluster.local import LocalCluster, application
from serve_app.checkpoints.sources import resolve_model
from serve_app.replay.client import RequestFailed, stream_events
from tests.integration.conftest import HTTP, alone, clients, eventually, replicas_of

pytestmark = [pytest.mark.integration, pytest.mark.long]

REPLICAS, INGRESSES, REQUESTS = 3, 2, 4
SETTINGS: dict[str, Any] = {
    "model": "demo",
    "engine": "simulated",
    "replicas": REPLICAS,
    "ingress_replicas": INGRESSES,
    "simulated_prefill_tokens_per_s": 4000,
    "simulated_decode_step_s": 0.02,
}
SURGE = {"max_surge_percent": 50}
"""A rolling update starts a new replica before it stops an old one: both have space, and the new one copies a cache."""
LATE_TOKENS = 8000
"""The prompt's length in the test that kills a replica before the first byte."""
MARK = f"warmpath-{secrets.token_hex(16)}"


def deployed(**settings: object) -> dict[str, Any]:
    return application({**SETTINGS, **settings}, {"Replica": SURGE, "Ingress": SURGE})


@pytest.fixture(scope="module")
def running() -> Iterator[LocalCluster]:
    with alone(LocalCluster(3, env={"WARMPATH_TEST_MARK": MARK})) as made:
        made.deploy(deployed())
        yield made


@pytest.fixture
def cluster(running: LocalCluster) -> LocalCluster:
    """The cluster, restored after the previous test's kills."""
    eventually(lambda: is_whole(running), 300)
    return running


def names(cluster: LocalCluster, *kinds: str) -> set[str]:
    return {process["name"] for process in cluster.processes() if process["kind"] in kinds}


def is_whole(cluster: LocalCluster) -> bool:
    """Return whether all replicas and ingresses run, HTTP answers, and the router has reports of all live replicas."""
    running = {name: deployment["replica_states"] for name, deployment in cluster.status()["deployments"].items()}
    if running != {"Replica": {"RUNNING": REPLICAS}, "Ingress": {"RUNNING": INGRESSES}}:
        return False
    # Serve's status counts a replica of a dead node as running until the controller notices.
    heard = {name for name, replica in here(cluster).items() if replica["report_age_s"] is not None}
    return len(heard) == REPLICAS and heard == names(cluster, "Replica")


def here(cluster: LocalCluster) -> dict[str, dict[str, Any]]:
    """Return the replicas that are not away: the router still reports the last load of one killed a moment ago."""
    replicas = replicas_of(cluster.url)
    return {name: replica for name, replica in replicas.items() if not replica["away"]}


def at_work(cluster: LocalCluster) -> list[str]:
    """Return the names of the replicas that report work."""
    replicas = here(cluster).items()
    return [name for name, replica in replicas if replica["running_sequences"] + replica["waiting_sequences"]]


def stopped(processes: Sequence[psutil.Process], for_s: float) -> None:
    """Suspend processes for a time, if they are alive: their sockets stay open, but silent."""
    for process in processes:
        process.suspend()
    time.sleep(for_s)
    for process in processes:
        process.resume()


@dataclass(slots=True)
class Answer:
    """A client's part of an answer so far; it is whole if it equals an undisturbed one."""

    text: str = ""
    tokens: int = 0
    ending: str = ""


class Clients:
    """Ask one server ``REQUESTS`` questions; every second one is greedy, the others are sampled with a seed.

    ``first``: the number of the first prompt, so that no two tests share one.
    """

    def __init__(self, cluster: LocalCluster, first: int, tokens: int, max_tokens: int) -> None:
        self._cluster = cluster
        texts = [text_of(tokens, resolve_model("demo"), first + number) for number in range(REQUESTS)]
        self._bodies = [
            {"model": "demo", "prompt": text, "max_tokens": max_tokens, "temperature": seed % 2, "seed": seed}
            for seed, text in enumerate(texts)
        ]
        # The salt leaves the caches of the others cold.
        self.undisturbed = asyncio.run(self._ask_all("undisturbed"))
        assert {answer.ending for answer in self.undisturbed} == {"length"}

    def disturbed(self, strike: Callable[[], object], begun_tokens: int) -> list[Answer]:
        """Ask, and strike once all streams have this many tokens; 0: while a replica works, before any byte arrives."""

        async def run() -> list[Answer]:
            for salt in "abcde":  # on a busy machine all may end before their start is noticed
                got = [Answer() for _ in self._bodies]
                asking = asyncio.create_task(self._ask_all(salt, got))
                while not asking.done():
                    working = await asyncio.to_thread(at_work, self._cluster)
                    tokens = [answer.tokens for answer in got]
                    if working and (min(tokens) >= begun_tokens if begun_tokens else not any(tokens)):
                        await asyncio.to_thread(strike)
                        return await asking
                    await asyncio.sleep(0.02)
            raise AssertionError("every request was done before anything could fail")

        return asyncio.run(run())

    def under_load(self, during: Callable[[], object]) -> list[list[Answer]]:
        """Ask again and again until ``during`` returns; return all rounds."""

        async def run() -> list[list[Answer]]:
            rounds = []
            happens = asyncio.create_task(asyncio.to_thread(during))
            while not happens.done():
                rounds.append(await self._ask_all("again"))
            await happens
            return rounds

        return asyncio.run(run())

    async def _ask_all(self, salt: str, got: Sequence[Answer] = ()) -> list[Answer]:
        # Each request has its own connection: requests that share one would break together.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        seen = list(got) or [Answer() for _ in self._bodies]
        async with clients(limits=limits) as client:
            await asyncio.gather(
                *(self._ask(client, body, salt, answer) for body, answer in zip(self._bodies, seen, strict=True))
            )
        return seen

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, Any], salt: str, answer: Answer) -> None:
        salted = {**body, "stream": True, "cache_salt": salt}
        try:
            async for event in stream_events(client, f"{self._cluster.url}/v1/completions", salted):
                for choice in event["choices"]:
                    answer.tokens += 1
                    answer.text += choice["text"]
                    answer.ending = choice["finish_reason"] or ""
        except (httpx.HTTPError, RequestFailed) as error:
            answer.ending = f"{type(error).__name__}: {error}"


def texts(answers: Sequence[Answer]) -> list[tuple[str, str]]:
    return [(answer.ending, answer.text) for answer in answers]


def test_controller_killed(cluster: LocalCluster) -> None:
    """Streams continue, and Serve finds the same replicas again. (docs: failures)"""
    before = names(cluster, "Replica", "Ingress")
    clients = Clients(cluster, 100, tokens=100, max_tokens=150)
    killed: list[int] = []
    got = clients.disturbed(lambda: killed.append(cluster.kill("controller")), 10)
    assert texts(got) == texts(clients.undisturbed)
    eventually(lambda: [process["pid"] for process in cluster.processes("controller")] not in ([], killed))
    eventually(lambda: is_whole(cluster))
    assert names(cluster, "Replica", "Ingress") == before


def test_a_replica_that_hangs(cluster: LocalCluster) -> None:
    """Serve kills it after a failed health check; its streams continue elsewhere, token for token."""
    clients = Clients(cluster, 200, tokens=100, max_tokens=150)
    hung: list[str] = []

    def hang() -> None:
        name = at_work(cluster)[0]
        hung.append(name)
        os.kill(next(each["pid"] for each in cluster.processes("Replica") if each["name"] == name), signal.SIGSTOP)

    got = clients.disturbed(hang, 10)
    assert texts(got) == texts(clients.undisturbed)
    eventually(lambda: hung[0] not in names(cluster, "Replica"))


def test_health_is_good_while_a_killed_replica_is_replaced(cluster: LocalCluster) -> None:
    """The others answer meanwhile: a load balancer takes no ingress away."""
    before = names(cluster, "Replica")
    cluster.kill("Replica")
    statuses: set[int] = set()

    def is_replaced() -> bool:
        statuses.add(HTTP.get(f"{cluster.url}/health").status_code)
        statuses.add(HTTP.post(f"{cluster.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 1}).status_code)
        return len(before - names(cluster, "Replica")) == 1 and is_whole(cluster)

    eventually(is_replaced, 300)
    assert statuses == {200}


def test_a_node_without_network_for_ten_seconds(cluster: LocalCluster) -> None:
    """It is not declared dead: its streams pause, then continue. (Suspending all its processes cuts it off.)"""
    before = names(cluster, "Replica", "Ingress")
    clients = Clients(cluster, 300, tokens=100, max_tokens=150)

    def away() -> None:
        working = at_work(cluster)
        node = max(each["node"] for each in cluster.processes("Replica") if each["name"] in working)  # the head is 0
        raylet = psutil.Process(next(each["pid"] for each in cluster.processes("raylet") if each["node"] == node))
        stopped([raylet, *raylet.children(recursive=True)], 10)

    got = clients.disturbed(away, 10)
    assert texts(got) == texts(clients.undisturbed)
    assert names(cluster, "Replica", "Ingress") == before


def test_one_of_two_ingresses_killed_before_the_first_byte(cluster: LocalCluster) -> None:
    """The other ingress takes over its requests, because nobody has a byte of their answers."""
    before = names(cluster, "Ingress")
    clients = Clients(cluster, 400, tokens=LATE_TOKENS, max_tokens=10)
    got = clients.disturbed(lambda: cluster.kill("Ingress"), 0)
    assert texts(got) == texts(clients.undisturbed)
    eventually(lambda: len(before - names(cluster, "Ingress")) == 1)


def test_rolling_update_under_load(cluster: LocalCluster) -> None:
    """A setting that restarts everything: new replicas and ingresses take over without a client noticing."""
    clients = Clients(cluster, 500, tokens=100, max_tokens=40)
    before = names(cluster, "Replica", "Ingress")

    def update() -> None:
        cluster.deploy(deployed(save_ttl_s=1000))
        eventually(lambda: not before & names(cluster, "Replica", "Ingress"), 300)

    rounds = clients.under_load(update)
    assert rounds
    for got in rounds:
        assert texts(got) == texts(clients.undisturbed)


def test_node_killed_with_its_replicas(cluster: LocalCluster) -> None:
    """Other nodes start its replicas; as many run as before."""
    replicas = cluster.processes("Replica")
    node = max(replica["node"] for replica in replicas)
    on_it = {replica["name"] for replica in replicas if replica["node"] == node}
    clients = Clients(cluster, 600, tokens=500, max_tokens=150)
    got = clients.disturbed(lambda: cluster.kill_node(node), 10)
    assert texts(got) == texts(clients.undisturbed)
    eventually(lambda: not on_it & names(cluster, "Replica"))


def test_haproxy_killed(cluster: LocalCluster) -> None:
    """Nothing listens until Serve notices; then everything is as before."""
    before = names(cluster, "Replica")
    cluster.kill("haproxy")
    eventually(lambda: HTTP.get(f"{cluster.url}/health").status_code == 200)
    Clients(cluster, 700, tokens=100, max_tokens=10)
    assert names(cluster, "Replica") == before


def test_a_stop_leaves_no_process(cluster: LocalCluster) -> None:
    """All processes that inherited a mark in their environment end; simulated replicas had no torch. (docs: cluster)"""

    def marked() -> set[int]:
        pids = set()
        for environment in Path("/proc").glob("[0-9]*/environ"):
            try:
                if MARK.encode() in environment.read_bytes():
                    pids.add(int(environment.parent.name))
            except OSError:  # it has ended
                continue
        return pids

    replica = cluster.processes("Replica")[0]["pid"]
    assert "libtorch" not in Path(f"/proc/{replica}/maps").read_text()
    assert marked()
    cluster.stop()
    eventually(lambda: not marked())
