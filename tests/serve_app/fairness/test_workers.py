"""Threads in turns of tenants: one tenant's long work leaves a thread to the others."""

import asyncio
import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.fairness.queue import FairWorkers, LoopTurns
from serve_app.fairness.shares import Shares
from serve_app.fairness.work import StepBudget, TenantsLru, TooMuchWorkError, check_wanted
from tests.harness.eventually import let_others_run


@pytest.mark.anyio
async def test_a_tenant_with_much_to_do_leaves_a_thread() -> None:
    """All jobs of one tenant hang; another's job ends at once. (docs: routing)"""
    release = threading.Event()
    workers = FairWorkers(Shares({"a": 1.0, "b": 1.0}), threads=2)
    jobs = [asyncio.create_task(workers.run("a", 1000, release.wait, 30)) for _ in range(6)]
    await let_others_run()
    assert await asyncio.wait_for(workers.run("b", 10, lambda: 42), 20) == 42
    release.set()
    assert await asyncio.gather(*jobs) == [True] * 6


@pytest.mark.anyio
async def test_a_begun_job_keeps_its_thread_when_its_caller_leaves() -> None:
    """A job cancelled while it runs counts until it ends; a waiting one is never run; errors are passed on."""
    release, ran = threading.Event(), threading.Event()

    def fail() -> None:
        raise KeyError("x")

    workers = FairWorkers(Shares({}), threads=1)
    running = asyncio.create_task(workers.run("a", 1, release.wait, 30))
    waiting = asyncio.create_task(workers.run("a", 1, ran.set))
    last = asyncio.create_task(workers.run("a", 1, fail))
    await let_others_run()
    running.cancel()
    waiting.cancel()
    await asyncio.wait([running, waiting])
    assert not last.done()
    release.set()
    with pytest.raises(KeyError):
        await last
    assert not ran.is_set()


@pytest.mark.anyio
async def test_a_client_that_leaves_frees_its_thread() -> None:
    """Work that asks whether it is wanted ends then, also by each counted step; the next job has the thread."""
    workers = FairWorkers(Shares({}), threads=1)

    def endless(begun: threading.Event, count: bool) -> None:
        while True:
            if count:
                StepBudget(10).take()
            else:
                check_wanted()
            begun.set()

    for count in (False, True):
        begun = threading.Event()
        job = asyncio.create_task(workers.run("a", 1, endless, begun, count))
        await asyncio.to_thread(begun.wait, 20)
        job.cancel()
        assert await asyncio.wait_for(workers.run("b", 1, lambda: 42), 20) == 42
    check_wanted()  # no job of this thread
    with pytest.raises(TooMuchWorkError):
        StepBudget(10).take(11)


@pytest.mark.anyio
async def test_work_that_took_longer_than_its_bytes_is_charged() -> None:
    """A tenant whose small bodies take two seconds each waits until the others had as much."""
    now_s, order, release = 0.0, list[str](), threading.Event()
    workers = FairWorkers(Shares({}), threads=1, clock=lambda: now_s)

    def slow() -> None:
        nonlocal now_s
        now_s += 2.0

    await workers.run("a", 10, slow)
    await let_others_run()
    gate = asyncio.create_task(workers.run("c", 10, release.wait, 20))
    await let_others_run()
    jobs = [asyncio.create_task(workers.run(tenant, 16 << 10, order.append, tenant)) for tenant in "a" + 50 * "b"]
    await let_others_run()
    release.set()
    await asyncio.gather(gate, *jobs)
    assert order == [*50 * "b", "a"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=60), st.integers(1, 8))
def test_a_tenant_cannot_push_out_what_another_keeps(puts: list[tuple[str, int]], most: int) -> None:
    """Who has no more than its part of the places loses nothing; all together have no more than there are."""
    kept: TenantsLru[int, int] = TenantsLru(most)
    latest: dict[str, list[int]] = {tenant: [] for tenant in "abc"}
    for tenant, key in puts:
        kept.put(tenant, key, key)
        latest[tenant] = [*(one for one in latest[tenant] if one != key), key]
        found = {one: [key for key in latest[one] if kept.get(one, key) is not None] for one in latest}
        assert sum(map(len, found.values())) == len(kept) <= most
        for one, keys in found.items():
            assert keys == latest[one][len(latest[one]) - len(keys) :]
            assert len(keys) >= min(len(latest[one]), most // 3)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40).map(lambda one: [("a", False), *one]))
def test_one_begins_in_a_round_of_the_loop_in_turns_of_tenants(asked: list[tuple[str, bool]]) -> None:
    """Who leaves takes no turn; of those who stay, a tenant has at most one turn more than another that still waits."""

    async def run() -> tuple[list[tuple[int, str]], int]:
        loop, turns, rounds, begun = asyncio.get_running_loop(), LoopTurns(), 0, list[tuple[int, str]]()

        def count() -> None:
            nonlocal rounds
            rounds += 1
            loop.call_soon(count)

        async def begin(tenant: str) -> None:
            await turns.turn(tenant)
            begun.append((rounds, tenant))

        count()
        await turns.turn("first")
        tasks = [asyncio.create_task(begin(tenant)) for tenant, _ in asked]
        await let_others_run()
        for task, (_, leaves) in zip(tasks, asked, strict=True):
            if leaves:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        before = rounds
        await asyncio.gather(*(turns.turn("last") for _ in range(3)))
        return begun, rounds - before

    begun, last = asyncio.run(run())
    rounds = [number for number, _ in begun]
    assert len(set(rounds)) == len(rounds), "two in one round"
    assert last <= 10, "a turn was lost"
    tenants, stay = [tenant for _, tenant in begun], Counter(tenant for tenant, leaves in asked if not leaves)
    assert Counter(tenants) == stay
    stay["a"] -= 1  # the first began while nobody else waited
    for at in range(1, len(tenants)):
        taken = Counter(tenants[1:at])
        for tenant in stay:
            if taken[tenant] < stay[tenant]:
                assert max(taken.values(), default=0) <= taken[tenant] + 1
