"""Requests that find every replica full wait in order; replicas that are away; decisions kept for a while."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from router.protocol.events import BlocksStored
from router.protocol.request import Decision, NoReplicaLeft, RoutedRequest
from router.protocol.version import UNTOLD, WIRE_VERSION
from router.serve import request_router
from router.serve.core_registry import RecentDecisions, core_for, decisions_for
from router.serve.request_router import FEED_METADATA, CacheAwareRouter, WaitQueue, deployment_key
from router.settings import RouterSettings
from tests.harness.eventually import let_others_run, until
from tests.router.cores import load

pytestmark = pytest.mark.anyio


class Room:
    """Slots that free up, ``freed`` per pause; counts the attempts to get one."""

    def __init__(self, free: int = 0, freed: int = 1, last_pause: int = 10_000) -> None:
        self.free, self.freed = free, freed
        self.asked = 0
        self.pauses: list[int] = []
        self.last_pause = last_pause
        self.served: list[object] = []
        self.waits_s: list[float] = []
        self.queue = WaitQueue(self.pause, self.waits_s.append)

    async def pause(self, attempt: int) -> None:
        self.pauses.append(attempt)
        await let_others_run()
        self.free += self.freed

    def choose(self, name: object) -> Callable[[], object | None]:
        def chosen() -> object | None:
            self.asked += 1
            if len(self.pauses) >= self.last_pause:
                raise NoReplicaLeft
            if not self.free:
                return None
            self.free -= 1
            self.served.append(name)
            return name

        return chosen

    async def take(self, name: object, ahead: bool = False) -> object:
        return await self.queue.take(self.choose(name), ahead=ahead)


@settings(max_examples=50)
@given(free=st.integers(0, 5), requests=st.integers(0, 30), cancelled=st.sets(st.integers(0, 29)))
async def test_first_come_first_served(free: int, requests: int, cancelled: set[int]) -> None:
    """After any departures, the others are served in order of arrival, and only the first one asks."""
    room = Room(free)
    tasks = [asyncio.create_task(room.take(number)) for number in range(requests)]
    await let_others_run()
    for number in cancelled & set(range(free, requests)):
        tasks[number].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert room.served == [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert set(range(requests)) - set(room.served) <= cancelled
    assert len(room.waits_s) == len([number for number in room.served if int(str(number)) >= free])
    assert not room.queue._lines
    assert room.asked <= 2 * requests + len(room.pauses)


async def test_nobody_spins() -> None:
    """With a hundred queued and no capacity, each pause is followed by one question, and pauses grow from the first."""
    room = Room(freed=0, last_pause=50)
    tasks = [asyncio.create_task(room.take(number)) for number in range(100)]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, NoReplicaLeft) for outcome in outcomes)
    assert room.pauses == list(range(50))
    assert room.asked == 1 + 51 + 99  # the first at once and after each pause, the others once each


async def test_a_newcomer_does_not_overtake_and_a_rejected_one_goes_first() -> None:
    """Freed capacity goes to those that wait already, and a returned request keeps its turn. (docs: routing)"""
    gate = asyncio.Event()

    async def pause(attempt: int) -> None:
        await gate.wait()
        gate.clear()

    room = Room()
    room.queue = WaitQueue(pause)
    first = asyncio.create_task(room.take("first"))
    await let_others_run()
    room.free = 1
    second = asyncio.create_task(room.take("second"))
    await let_others_run()
    assert room.served == []
    room.free = 0
    again = asyncio.create_task(room.take("again", ahead=True))
    await let_others_run()
    while len(room.served) < 3:
        room.free += 1
        gate.set()
        await let_others_run(5)
    assert room.served == ["again", "first", "second"]
    await asyncio.gather(first, second, again)


async def test_tenants_take_turns() -> None:
    """One request of a tenant waits for one of each other, regardless of their number before it. (docs: routing)"""
    room = Room()
    flood = [asyncio.create_task(room.queue.take(room.choose(f"a{number}"), "a")) for number in range(20)]
    other = [asyncio.create_task(room.queue.take(room.choose(f"b{number}"), "b")) for number in range(3)]
    await asyncio.gather(*flood, *other)
    assert room.served[:6] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert room.served[6:] == [f"a{number}" for number in range(3, 20)]
    assert not room.queue._lines


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2)), max_size=20), st.integers(1, 3))
async def test_an_order_is_within_a_tenant(coming: list[tuple[str, int]], freed: int) -> None:
    """Tenants keep their turns; each sends its lowest order first; a returned request goes before all of them."""

    async def served(orders: list[int]) -> list[object]:
        room, all_here = Room(freed=freed), asyncio.Event()

        async def pause(attempt: int) -> None:
            await all_here.wait()
            await room.pause(attempt)

        room.queue = WaitQueue(pause)
        tasks = [
            asyncio.create_task(room.queue.take(room.choose(number), tenant, order))
            for number, ((tenant, _), order) in enumerate(zip(coming, orders, strict=True))
        ]
        await let_others_run()
        tasks.append(asyncio.create_task(room.queue.take(room.choose("again"), "b", 9, ahead=True)))
        await let_others_run()
        all_here.set()
        await asyncio.gather(*tasks)
        assert not room.queue._lines
        return room.served

    found, plain = await served([order for _, order in coming]), await served([0] * len(coming))
    assert found[0] == plain[0] == "again"
    assert [coming[number][0] for number in found[1:]] == [coming[number][0] for number in plain[1:]]  # type: ignore[call-overload]
    for tenant in "abc":
        mine = [number for number in found[1:] if coming[number][0] == tenant]  # type: ignore[call-overload]
        assert mine == sorted(mine, key=lambda number: (coming[number][1], number))  # type: ignore[call-overload]


async def test_a_lower_order_asks_in_the_place_of_its_tenants_first() -> None:
    """It arrives while the first one pauses, which then waits its turn; another tenant's pause continues."""
    gate = asyncio.Event()

    async def pause(attempt: int) -> None:
        await gate.wait()

    room = Room()
    room.queue = WaitQueue(pause)
    tasks = []
    for name, tenant, order in (("a0", "a", 0), ("b0", "b", 0), ("a-1", "a", -1), ("b-1", "b", -1)):
        tasks.append(asyncio.create_task(room.queue.take(room.choose(name), tenant, order)))
        await let_others_run()
    assert (room.asked, room.served) == (3, [])  # a0 twice: on arrival, and as the first in the queue
    room.free = 4
    gate.set()
    await asyncio.gather(*tasks)
    assert room.served == ["a-1", "b-1", "a0", "b0"]


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
        self.core = core_for(deployment_key("app", name), RouterSettings(block_size=16))
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


async def test_a_replica_with_other_messages_is_not_used_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """A rolling update may hold both: what a release cannot read, it does not ask. (docs: upgrade)"""
    case = Case("versions")
    endpoint = {"pub_address": "", "snapshot_address": "", "public_key": ""}
    told: dict[str, dict[str, Any]] = {
        "a": {"version": WIRE_VERSION + 1},
        "b": {},
        "c": {"version": "2"},
        "d": {"version": WIRE_VERSION},
    }
    replicas: Any = [FakeRunningReplica(ReplicaID(name, DeploymentID("versions", "app"))) for name in told]
    for replica in replicas:
        replica.replica_metadata = {FEED_METADATA: endpoint | told[replica.replica_id.unique_id]}
    case.router._among_peers = True  # no sockets
    case.router.update_replicas(replicas)
    assert {one.unique_id for one in case.router._replicas} == {"d"}
    assert case.core.state()["other_versions"] == {"a": WIRE_VERSION + 1, "b": UNTOLD, "c": UNTOLD}
    assert [await case.target(name) for name in "abcd"] == ["d"] * 4
    assert sum("is not used" in line for line in caplog.messages) == 3
    case.router.update_replicas(replicas[3:])
    assert case.core.other_versions == {}


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
    await let_others_run()
    decisions.leave("r.0")
    case.set("ab")
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert case.core.state()["open_reservations"] == 0


def test_taken_once_and_bounded() -> None:
    decisions = RecentDecisions()
    decision = Decision("a", "router", 1, 0, 0, "cold")
    decisions.add("q5", decision)
    assert decisions.take("q5") == decision
    assert decisions.take("q5") is None
    for number in range(9000):
        decisions.add(f"q{number}", decision)
    assert decisions.take("q807") is None
    assert decisions.take("q808") is not None
    assert decisions.take("q8999") is not None


def test_an_early_leaver_has_nothing_sent_and_a_late_one_learns_the_decision() -> None:
    """The second of departure and decision learns of the first, for this caller only."""
    decisions = RecentDecisions()
    decision = Decision("a", "router", 1, 0, 0, "cold")
    assert decisions.leave("early") is None
    assert decisions.add("other", decision)
    assert not decisions.add("early", decision)
    assert decisions.take("early") is None
    assert decisions.add("late", decision)
    assert decisions.leave("late") == decision
    assert decisions.take("late") is None
    for number in range(9000):
        decisions.leave(f"q{number}")
    assert decisions.add("q807", decision)
    assert not decisions.add("q808", decision)
