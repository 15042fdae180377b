"""Requests that find every replica full are served in order, one at a time, and never in a busy loop."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.protocol.request import NoReplicaLeft
from router.serve.wait_queue import WaitQueue

pytestmark = pytest.mark.anyio


class Room:
    """Slots that free up, ``freed`` per pause; counts the attempts to get one."""

    def __init__(self, free: int = 0, freed: int = 1, last_pause: int = 10_000) -> None:
        self.free, self.freed = free, freed
        self.asked = 0
        self.pauses: list[int] = []
        self.last_pause = last_pause
        self.served: list[object] = []
        self.queue = WaitQueue(self.pause)

    async def pause(self, attempt: int) -> None:
        self.pauses.append(attempt)
        await asyncio.sleep(0)
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
    await asyncio.sleep(0)
    for number in cancelled & set(range(free, requests)):
        tasks[number].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert room.served == [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert set(range(requests)) - set(room.served) <= cancelled
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
    await asyncio.sleep(0)
    room.free = 1
    second = asyncio.create_task(room.take("second"))
    await asyncio.sleep(0)
    assert room.served == []
    room.free = 0
    again = asyncio.create_task(room.take("again", ahead=True))
    await asyncio.sleep(0)
    while len(room.served) < 3:
        room.free += 1
        gate.set()
        for _ in range(5):
            await asyncio.sleep(0)
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
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(room.queue.take(room.choose("again"), "b", 9, ahead=True)))
        await asyncio.sleep(0)
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
        await asyncio.sleep(0)
    assert (room.asked, room.served) == (3, [])  # a0 twice: on arrival, and as the first in the queue
    room.free = 4
    gate.set()
    await asyncio.gather(*tasks)
    assert room.served == ["a-1", "b-1", "a0", "b0"]
