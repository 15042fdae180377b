"""Who has a place in an ingress: a tenant that must wait, or that many wait behind, gives its place back."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.batch import batch_run, turns, worker
from serve_app.batch.batch_run import Said
from serve_app.batch.batches import Batches, QueuedBatch, StoredBatch
from serve_app.errors import Overloaded
from tests.harness.virtual_time import passes
from tests.serve_app.batch.world import World, said

DAY_S = 86_400.0
NAMES = st.sampled_from(["a", "b", "c", "d"])


@given(st.lists(st.tuples(st.sampled_from(["come", "go", "end", "rest", "fail", "work", "refresh"]), NAMES,
                          st.sampled_from([1.0, 50.0, 1e6])), max_size=40))  # fmt: skip
def test_turns_are_those_of_a_plain_queue(events: list[tuple[str, str, float]]) -> None:
    """Who has waited longest is first, its oldest batch before its others; rests end in time, or with limits."""
    now_s = 0.0
    turns_ = turns.Turns(lambda: now_s)
    queue: list[QueuedBatch] = []
    waiting: list[str] = []
    until_s, failures = dict[str, float](), Counter[str]()
    for number, (what, tenant, seconds) in enumerate(events):
        now_s += seconds % 7
        own = [one for one in queue if one.tenant == tenant]
        if what == "come":
            queue.insert(number % (len(queue) + 1), QueuedBatch(tenant, f"{tenant}{number}", now_s))
            waiting += [tenant] * (tenant not in waiting)
        elif what == "go" and own:
            queue.remove(own[0])
            failures.pop(own[0].batch_id, None)
            until_s.pop(own[0].batch_id, None)
            if len(own) == 1:
                waiting.remove(tenant)
                until_s.pop(tenant, None)
        elif what == "end" and own:
            turns_.ended(tenant)
            waiting.remove(tenant)
            waiting.append(tenant)
        elif what == "rest" and own:
            turns_.rest(tenant, seconds)
            until_s[tenant] = max(until_s.get(tenant, 0.0), now_s + min(seconds, turns.MOST_REST_S))
        elif what == "fail" and own:
            name = own[0].batch_id
            turns_.failed(name)
            rest_s = min(turns.MOST_REST_S, turns.LEAST_REST_S * 2 ** failures[name])
            until_s[name] = max(until_s.get(name, 0.0), now_s + rest_s)
            failures[name] += 1
        elif what == "work" and own:
            turns_.worked(own[0].batch_id)
            failures.pop(own[0].batch_id, None)
        elif what == "refresh":
            turns_.refresh()
            until_s.clear()
        assert turns_.order(queue) == sorted(queue, key=lambda one: (waiting.index(one.tenant), one.created_at))
        for name in {name for one in queue for name in (one.tenant, one.batch_id)}:
            assert turns_.rests(name) == (until_s.get(name, -1.0) > now_s), name


def test_tenants_have_as_many_turns_as_each_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there are places, with one batch or several, whose lines all wait; and for each its time."""
    monkeypatch.setattr(worker, "MAX_RUNNING", 2)

    async def run() -> None:
        one, had = world.ingress(), Counter[str]()
        ended = turns.Turns.ended

        def counted(of: turns.Turns, tenant: str) -> None:
            had[tenant] += 1
            ended(of, tenant)

        monkeypatch.setattr(turns.Turns, "ended", counted)
        world.quiet = False
        names = [f"tenant-{at}" for at in range(5)]
        for name in names:
            for _ in range(1 + 3 * (name == "tenant-0")):
                await one.submit(name, 3, window_s=80_000.0)
        one.start()
        rounds = 6
        await passes(rounds * turns.TURN_S * len(names) / 2)
        assert set(had) == {*names} and max(had.values()) - min(had.values()) <= 1, had
        assert rounds - 2 <= min(had.values()) <= rounds
        await one.worker.stop()

    world.run(run())


def test_tenants_with_spent_budgets_take_no_places(world: World) -> None:
    """They are told to come back tomorrow; one who can go on does, and they do once they are let."""

    async def run() -> None:
        one, spent = world.ingress(), True

        async def answer(tenant: str, prompt: str) -> Said:
            await passes(0.1)
            return (
                said(prompt, 429, retry_after_s=DAY_S, own_limit=True) if spent and tenant != "rich" else said(prompt)
            )

        world.answer = answer  # type: ignore[method-assign]
        poor = [
            (f"poor-{at}", await one.submit(f"poor-{at}", 20, window_s=3e6)) for at in range(worker.MAX_RUNNING + 4)
        ]
        rich = await one.submit("rich")
        one.start()
        await world.until_ended(one, ("rich", rich), most_s=60)
        assert (await one.batches.get("rich", rich.id)).completed == 3
        await world.until(lambda: not one.worker.running, 60)
        begun, asked = world.loop.time(), sum(world.asked.values())
        await passes(3600)
        looks = (world.loop.time() - begun) // turns.MOST_REST_S + 1
        assert sum(world.asked.values()) - asked <= looks * len(poor) * 8, "only now and then, whether it goes on"
        spent = False
        one.worker.limits_changed()
        await world.until_ended(one, *poor, most_s=120)
        for tenant, batch in poor:
            ended = await one.batches.get(tenant, batch.id)
            assert (ended.status, ended.completed, ended.failed) == ("completed", 20, 0)
        await one.worker.stop()

    world.run(run())


def test_what_rests_is_cancelled_and_expires_as_ever(world: World) -> None:
    async def run() -> None:
        one = world.ingress()

        async def answer(tenant: str, prompt: str) -> Said:
            return said(prompt, 429, retry_after_s=30 * DAY_S, own_limit=True)

        world.answer = answer  # type: ignore[method-assign]
        first, second = await one.submit("acme", window_s=100.0), await one.submit("acme", window_s=3e6)
        one.start()
        await passes(20)
        await one.batches.cancel("acme", second.id)
        await world.until_ended(one, ("acme", second), most_s=10)
        await world.until_ended(one, ("acme", first), most_s=100)
        assert [(await one.batches.get("acme", batch.id)).status for batch in (first, second)] == [
            "expired",
            "cancelled",
        ]
        await one.worker.stop()

    world.run(run())


@pytest.mark.parametrize("blocked", ["quiet", "busy", "slow"])
def test_a_tenant_behind_more_than_there_are_places_has_its_turn(
    blocked: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the others' lines may not start, are refused for some seconds, or take long; nothing is lost of them."""
    monkeypatch.setattr(worker, "MAX_RUNNING", 2)

    async def run() -> None:
        one = world.ingress()
        done = Counter[tuple[str, str]]()
        free = False

        async def answer(tenant: str, prompt: str) -> Said:
            if tenant != "late" and not free and blocked == "busy":
                return said(prompt, 429, retry_after_s=20.0)
            await passes(25.0 if blocked == "slow" and tenant != "late" and not free else 0.1)
            done[tenant, prompt] += 1
            return said(prompt)

        world.answer = answer  # type: ignore[method-assign]
        one.worker.quiet = lambda tenant, model: free or blocked != "quiet" or tenant == "late"
        early = [(f"early-{at}", await one.submit(f"early-{at}", 100, window_s=80_000.0)) for at in range(4)]
        one.start()
        await passes(5)
        assert len(one.worker.running) == 2
        late = await one.submit("late")
        await world.until_ended(one, ("late", late), most_s=3 * turns.TURN_S + 10)
        free = True
        one.worker.limits_changed()
        await world.until_ended(one, *early, ("late", late), most_s=1000)
        assert set(done) == {(tenant, str(at)) for tenant, _ in early for at in range(100)} | {
            ("late", str(at)) for at in range(3)
        }
        assert set(done.values()) == {1}, "lines in progress end before their batch makes room"
        await one.worker.stop()

    world.run(run())


def test_without_others_a_batch_keeps_its_place(world: World) -> None:
    async def run() -> None:
        one = world.ingress()
        await one.submit("acme", 3, window_s=80_000.0)
        world.quiet = False
        one.start()
        await passes(5)
        (task,) = one.worker.running.values()
        await passes(10 * turns.TURN_S)
        assert [*one.worker.running.values()] == [task]
        await one.worker.stop()

    world.run(run())


def test_a_tenant_that_is_removed_gives_its_place_back(world: World) -> None:
    async def run() -> None:
        one = world.ingress()

        async def answer(tenant: str, prompt: str) -> Said:
            return Said(503, b"", retry_after_s=5.0) if tenant in world.unknown else said(prompt)

        world.answer = answer  # type: ignore[method-assign]
        world.quiet = False
        batch = await one.submit("acme", window_s=80_000.0)
        one.start()
        await passes(3)
        world.unknown.add("acme")
        await passes(3)
        await world.until(lambda: not one.worker.running, 60)
        world.unknown.clear()
        world.quiet = True
        await world.until_ended(one, ("acme", batch), most_s=10)
        await one.worker.stop()

    world.run(run())


def test_a_batch_that_fails_each_time_costs_nobody_else(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Neither its tenant's other batches, nor the log; once it works, it goes on."""
    broken = set[str]()

    class Broken(Batches):
        async def done(self, tenant: str, batch: StoredBatch) -> set[int]:
            if batch.id in broken:
                raise RuntimeError("a bug")
            return await super().done(tenant, batch)

    async def run() -> None:
        one = world.ingress()
        one.worker.batches = Broken(one.objects, one.files)
        bad, good, other = await one.submit("acme"), await one.submit("acme"), await one.submit("globex")
        broken.add(bad.id)
        one.start()
        await world.until_ended(one, ("acme", good), ("globex", other), most_s=30)
        await passes(1200)
        told = [record for record in caplog.records if bad.id in record.getMessage()]
        assert 3 <= len(told) <= 12, "later and later"
        broken.clear()
        await world.until_ended(one, ("acme", bad), most_s=turns.MOST_REST_S + 10)
        assert (await one.batches.get("acme", bad.id)).completed == 3
        await one.worker.stop()

    world.run(run())


def test_an_ingress_outlives_any_error_of_its_queue(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        one, left = world.ingress(), 3
        batch = await one.submit("acme")
        read = one.objects.read_all

        async def failing(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left >= 0:
                raise (RuntimeError("a bug"), ValueError("another"), Overloaded("locked"))[left]
            return await read(*arguments)

        monkeypatch.setattr(one.objects, "read_all", failing)
        one.start()
        await world.until_ended(one, ("acme", batch), most_s=30)
        await one.worker.stop()

    world.run(run())


def test_a_line_whose_application_fails_costs_itself(world: World) -> None:
    """What raises has its error in the file, after as many attempts as any line that the server fails at."""

    async def run() -> None:
        one = world.ingress()

        async def answer(tenant: str, prompt: str) -> Said:
            if prompt == "1":
                raise RuntimeError("a bug")
            return said(prompt)

        world.answer = answer  # type: ignore[method-assign]
        batch = await one.submit("acme", 3)
        one.start()
        await world.until_ended(one, ("acme", batch), most_s=60)
        batch = await one.batches.get("acme", batch.id)
        assert (batch.status, batch.completed, batch.failed) == ("completed", 2, 1)
        (line,) = (await one.results("acme", batch))["error"]
        assert (line["custom_id"], line["response"]["status_code"]) == ("c1", 500)
        assert line["response"]["body"]["error"]["message"]
        assert world.asked["acme", "1"] == batch_run.MAX_FAULTS
        await one.worker.stop()

    world.run(run())


def test_a_rest_is_never_shortened_by_another_one() -> None:
    """Two lines of a tenant are told different times."""
    now_s = [0.0]
    turns_ = turns.Turns(lambda: now_s[0])
    for seconds in (100.0, 1.0):
        turns_.rest("acme", seconds)
    for now_s[0], rests in ((99.0, True), (101.0, False)):
        assert turns_.rests("acme") is rests
    turns_.rest("acme", 1e9)
    now_s[0] += turns.MOST_REST_S - 1
    assert turns_.rests("acme")
    now_s[0] += 2
    assert not turns_.rests("acme"), "its limits may have been raised"
