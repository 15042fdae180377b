"""Serve's router: replicas that leave its set for seconds, and callers that leave while it chooses."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from router.protocol.events import BlocksStored
from router.protocol.request import RoutedRequest
from router.serve import request_router
from router.serve.core_registry import core_for, decisions_for
from router.serve.request_router import CacheAwareRouter, deployment_key
from tests.router.cores import load
from tests.router.feed.sockets import until

pytestmark = pytest.mark.anyio

HELD = bytes(16)


class FakeRunningReplica:
    """The attributes of Serve's replica that the router uses."""

    max_ongoing_requests = 8
    node_id = availability_zone = ""
    multiplexed_model_ids: tuple[str, ...] = ()
    replica_metadata: dict[str, Any] = {}  # noqa: RUF012 (never written)

    def __init__(self, replica_id: ReplicaID) -> None:
        self.replica_id = replica_id

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


class Case:
    def __init__(self, name: str) -> None:
        deployment = DeploymentID(name, "app")
        self.router = CacheAwareRouter(deployment, DeploymentHandleSource.REPLICA)
        self.router.initialize_state()
        self.core = core_for(deployment_key("app", name))
        self.ids = {letter: ReplicaID(letter, deployment) for letter in "ab"}

    def set(self, letters: str) -> None:
        """Make Serve name a new set of replicas; each that joins is a new object."""
        known = self.router._replicas
        ids = [self.ids[letter] for letter in letters]
        self.router.update_replicas([known.get(each) or FakeRunningReplica(each) for each in ids])

    async def target(self, letter: str, *, is_retry: bool = False) -> str:
        """Ask for one replica by name; return the chosen one."""
        request: Any = SimpleNamespace(args=[], kwargs={"target": letter})
        chosen = await self.router._choose_replica_for_request(request, is_retry=is_retry)
        return str(chosen.replica_id.unique_id)


async def test_away_kept_revived_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A returning replica's blocks are known again at once; a replica that stays away is forgotten after some time."""
    monkeypatch.setattr(request_router, "AWAY_S", 30.0)
    case = Case("kept")
    case.set("ab")
    case.core.apply("a", [load(), BlocksStored(HELD)])
    case.set("b")
    assert case.core.replica_ids == ("b",)
    assert await case.target("a") == "a"
    assert await case.target("a", is_retry=True) == "b"
    case.set("ab")
    assert set(case.core.replica_ids) == {"a", "b"}
    assert case.core.directory.match(HELD) == {"a": 16}
    monkeypatch.setattr(request_router, "AWAY_S", 0.01)
    case.set("b")
    await until(lambda: "a" not in case.core.loads.replicas)
    assert case.core.directory.match(HELD) == {}
    assert await case.target("a") == "b"


async def test_a_timer_of_an_earlier_absence_forgets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that returned and left again counts as away only since then."""
    case = Case("again")
    case.set("ab")
    monkeypatch.setattr(request_router, "AWAY_S", 0.01)
    case.set("b")
    first_is_over = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, first_is_over.set)  # after the first timer
    case.set("ab")
    monkeypatch.setattr(request_router, "AWAY_S", 30.0)
    case.set("b")
    await first_is_over.wait()
    assert "a" in case.core.loads.replicas
    assert await case.target("a") == "a"


async def test_a_replica_that_died_is_forgotten_at_once() -> None:
    case = Case("died")
    case.set("ab")
    case.set("a")
    for letter in "ab":
        case.router.on_replica_actor_died(case.ids[letter])
    assert case.core.loads.replica_ids == []


async def test_nothing_is_sent_for_a_caller_that_has_left() -> None:
    """The wait for a replica ends, and nothing stays reserved."""
    case = Case("leaves")
    decisions = decisions_for(deployment_key("app", "leaves"))
    route = RoutedRequest("r.0", bytes(16), 20, bytes(16))
    pending: Any = SimpleNamespace(args=[route], kwargs={})
    waiting = asyncio.create_task(case.router._choose_replica_for_request(pending))
    await asyncio.sleep(0)
    decisions.leave("r.0")
    case.set("ab")
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert case.core.state()["open_reservations"] == 0
