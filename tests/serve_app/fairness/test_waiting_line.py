"""The queue of an ingress: places are conserved, turns are fair, and no borrower delays a tenant within its share."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.fairness.queue import QUANTUM, Place, WaitingLine
from serve_app.fairness.shares import Budget, Shares
from tests.harness.eventually import let_others_run

pytestmark = pytest.mark.anyio

TENANTS = {"a": 1.0, "b": 1.0, "c": 1.0}


def line_of(total: int, weights: dict[str, float] | None = None) -> tuple[WaitingLine, Budget]:
    budget = Budget(Shares(TENANTS if weights is None else weights), lambda: total)
    return WaitingLine(budget), budget


async def settle() -> None:
    await let_others_run(5)


async def test_a_flood_keeps_nobody_out() -> None:
    """One tenant has hundreds queued; another's request starts at once, because an eighth was not lent.

    docs: routing
    """
    line, budget = line_of(64)
    flood = [asyncio.create_task(line.enter("a", 4, 100)) for _ in range(200)]
    await settle()
    assert budget.held("a") == 56
    place = await asyncio.wait_for(line.enter("b", 1, 100), 1)
    assert (place.tenant, place.units) == ("b", 1)
    started = [task.result() for task in flood if task.done()]
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    assert (budget.used, line.waiting().total()) == (57, 0)
    for place in started:
        place.give_back()
    assert budget.used == 1


async def test_turns_go_by_cost_and_not_by_length_of_line() -> None:
    """With one place for all, tenants of large and of small requests start equal tokens, not equal requests.

    docs: routing
    """
    line, _ = line_of(1)
    started: Counter[str] = Counter()

    async def work(tenant: str, cost: int) -> None:
        place = await line.enter(tenant, 1, cost)
        started[tenant] += cost
        if started["a"] < 60_000 and started["b"] < 60_000:
            assert abs(started["a"] - started["b"]) <= 4000 + QUANTUM
        await let_others_run()
        place.give_back()

    hold = await line.enter("c", 1, 1)
    tasks = [asyncio.create_task(work("a", 4000)) for _ in range(20)]
    tasks += [asyncio.create_task(work("b", 100)) for _ in range(800)]
    await settle()
    hold.give_back()
    await asyncio.gather(*tasks)
    assert started == {"a": 80_000, "b": 80_000}


@settings(max_examples=40)
@given(
    at_once=st.integers(1, 3),
    cost=st.sampled_from([50, 600, 4000, 20_000]),
    others=st.sampled_from([100, 700, 5000]),
    pause=st.integers(0, 3),
)
async def test_a_tenant_that_comes_and_goes_gets_no_more_than_one_with_a_queue(
    at_once: int, cost: int, others: int, pause: int
) -> None:
    """It asks as soon as its last request is answered, or later: leaving the queue pays no debt.

    There is one place: of two, each would have its own, and nobody waits for the other.
    """
    line, _ = line_of(1, {"comes": 1.0, "queues": 1.0})
    started: Counter[str] = Counter()
    over = asyncio.Event()

    async def ask(tenant: str, cost: int, pause: int) -> None:
        while not over.is_set():
            place = await line.enter(tenant, 1, cost)
            started[tenant] += cost
            await let_others_run()
            place.give_back()
            await let_others_run(pause)

    tasks = [asyncio.create_task(ask("queues", others, 0)) for _ in range(4)]
    await settle()
    started.clear()
    tasks += [asyncio.create_task(ask("comes", cost, pause)) for _ in range(at_once)]
    ahead = 0.0
    for _ in range(400):
        await let_others_run()
        ahead = max(ahead, started["comes"] - 1.15 * started["queues"])
    over.set()
    await asyncio.gather(*tasks)
    assert ahead <= cost + others + 2 * QUANTUM


async def test_a_large_request_within_its_share_is_not_starved_by_small_borrowers() -> None:
    """While it waits, nobody takes more than its share, so that enough places become free. (docs: routing)"""
    line, budget = line_of(32, {"a": 1.0, "b": 1.0})
    running = [await line.enter("a", 1, 1) for _ in range(28)]
    large = asyncio.create_task(line.enter("b", 16, 1))
    more = [asyncio.create_task(line.enter("a", 1, 1)) for _ in range(100)]
    await settle()
    assert not large.done()
    for place in running[:12]:
        place.give_back()
        await settle()
    assert large.done()
    assert large.result().units == 16
    assert budget.held("a") == 16
    for task in more:
        task.cancel()
    await asyncio.gather(*more, return_exceptions=True)


async def test_a_request_larger_than_a_share_gets_the_share() -> None:
    """128 choices among two tenants of 64 places start with 32."""
    line, budget = line_of(64, {"a": 1.0, "b": 1.0})
    place = await line.enter("a", 128, 1)
    assert place.units == 32
    place.give_back(1)
    assert (place.units, budget.used) == (31, 31)
    place.give_back()
    place.give_back()
    assert (place.units, budget.used) == (0, 0)


async def test_the_time_to_come_back_is_that_of_the_tenants_own_line() -> None:
    """A tenant's requests start one per second, ten are queued: eleven seconds. Idle time does not count."""
    now_s = 0.0
    line = WaitingLine(Budget(Shares(TENANTS), lambda: 1), clock=lambda: now_s)
    held = await line.enter("a", 1, 1)
    waiting = [asyncio.create_task(line.enter("a", 1, 1)) for _ in range(18)]
    await settle()
    for task in waiting[:8]:
        now_s += 1.0
        held.give_back()
        held = await task
    assert line.retry_after_s("a") == pytest.approx(11.0)
    assert line.retry_after_s("b") == 1.0
    now_s += 3.0
    assert line.retry_after_s("a") == pytest.approx(33.0), "the next start is overdue"
    for task in waiting[8:]:
        held.give_back()
        held = await task
    held.give_back()
    before_s = line.retry_after_s("a")
    now_s += 3600.0
    assert line.retry_after_s("a") == before_s < 3.0
    held = await line.enter("a", 1, 1)
    assert line.retry_after_s("a") == before_s
    held.give_back()


STEP = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from("abc"), st.integers(1, 9), st.integers(0, 3000)),
    st.tuples(st.just("end"), st.integers(0, 50)),
    st.tuples(st.just("cancel"), st.integers(0, 50)),
    st.tuples(st.just("tick")),
)


@given(total=st.integers(1, 16), steps=st.lists(STEP, max_size=60))
async def test_places_are_conserved_and_everybody_gets_one(total: int, steps: list[tuple[object, ...]]) -> None:
    """This holds for any order of arrivals, ends and departures; after all have ended, nothing is held or waits."""
    line, budget = line_of(total)
    tasks: list[asyncio.Task[Place]] = []
    ended: set[int] = set()

    def held() -> int:
        return sum(task.result().units for task in tasks if task.done() and not task.cancelled())

    for step in steps:
        if step[0] == "enter":
            _, tenant, units, cost = step
            tasks.append(asyncio.create_task(line.enter(str(tenant), int(str(units)), int(str(cost)))))
        elif step[0] == "tick":
            await settle()
            assert budget.used == held()
            # If nothing is taken, nobody waits.
            assert budget.used or not line.waiting()
        elif tasks:
            index = int(str(step[1])) % len(tasks)
            if step[0] == "cancel":
                tasks[index].cancel()
            elif tasks[index].done() and not tasks[index].cancelled():
                tasks[index].result().give_back()
                ended.add(index)
    for _ in range(len(tasks) + 1):
        await settle()
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result().give_back()
    assert all(task.done() for task in tasks)
    assert (budget.used, line.waiting().total()) == (0, 0)


COMING = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2)), min_size=2, max_size=24)
"""(tenant, order)"""


async def starts(coming: list[tuple[str, int]], total: int) -> list[int]:
    """Let requests of equal cost arrive one after another, and end as they started; return their numbers in turn."""
    line, _ = line_of(total)
    hold = [await line.enter(f"before {number}") for number in range(total)]
    started: list[int] = []

    async def work(number: int) -> None:
        tenant, order = coming[number]
        place = await line.enter(tenant, 1, 300, order)
        started.append(number)
        await settle()
        place.give_back()

    tasks = [asyncio.create_task(work(number)) for number in range(len(coming))]
    await let_others_run()
    for place in hold:
        place.give_back()
    await asyncio.gather(*tasks)
    return started


@given(COMING, st.integers(1, 4))
async def test_an_order_is_within_a_tenant(coming: list[tuple[str, int]], total: int) -> None:
    """Tenants start as without orders; each starts its lowest order first, and equal orders by arrival.

    docs: routing
    """
    started = await starts(coming, total)
    plain = await starts([(tenant, 0) for tenant, _ in coming], total)
    assert [coming[number][0] for number in started] == [coming[number][0] for number in plain]
    for tenant in "abc":
        mine = [number for number in started if coming[number][0] == tenant]
        assert mine == sorted(mine, key=lambda number: (coming[number][1], number))
