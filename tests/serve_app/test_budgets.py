"""Budgets over several ingresses and their lives: nothing is counted twice, and little is spent past the end."""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app import budgets as budgets_module
from serve_app.budgets import LOOK_S, LOOKS, RESERVED_S, Budgets
from serve_app.config.live import BadSettings, app_config
from serve_app.config.tenants import PriceConfig, TenantConfig
from serve_app.errors import BudgetSpent, Overloaded, RateLimited
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.rate_limits import Allowance, TenantLimits
from serve_app.fairness.shares import Shares
from serve_app.stored.database import StorageLimits
from serve_app.stored.objects import StoredObjects
from serve_app.stored.url import open_database
from serve_app.usage import Counts, UsageKey, cost_of, most_cost, usage_document
from tests.harness.eventually import let_others_run

KEY = UsageKey("2026-11-27", "acme", "m", "")
NOON_S = datetime(2026, 11, 27, 12, tzinfo=UTC).timestamp()


def tenant(**budget: Any) -> TenantConfig:
    return TenantConfig.model_validate({"name": "acme", "key_sha256": ["a" * 64], "budget": budget})


def asking(config: TenantConfig, prompt_tokens: int = 0, output_tokens: int = 0, model: str = "m") -> Allowance:
    """Return what a request of so many tokens may take of its tenant's limits."""
    allowance = TenantLimits([config]).begin(config.name)
    allowance.reserve(prompt_tokens, output_tokens, model)
    return allowance


class LeavingObjects(StoredObjects):
    """Those of a database that does not answer while it is ``away``."""

    away = False

    async def get(self, *place: Any) -> Any:
        self._reach()
        return await super().get(*place)

    async def change(self, *place: Any) -> bool:
        self._reach()
        return await super().change(*place)

    async def insert(self, *place: Any, **more: Any) -> bool:
        self._reach()
        return await super().insert(*place, **more)

    def _reach(self) -> None:
        if self.away:
            raise Overloaded("away")


def objects_of(
    file: Path, now_s: Callable[[], float] = lambda: NOON_S, kind: type[LeavingObjects] = LeavingObjects
) -> LeavingObjects:
    bounds = StorageLimits(3600, 1 << 30, now_s)
    return kind(open_database(None, file, bounds), b"s" * 32, FairWorkers(Shares({})), bounds)


def ingress(
    file: Path,
    config: TenantConfig,
    prices: dict[str, Any] | None = None,
    *,
    now_s: Callable[[], float] = lambda: NOON_S,
    of: int = 1,
    clock: Callable[[], float] = time.monotonic,
    objects: StoredObjects | None = None,
) -> Budgets:
    """Return the budgets of a new life of one of ``of`` ingresses. ``objects``: instead of those in the file."""
    objects = objects or objects_of(file, now_s)
    priced = {name: PriceConfig.model_validate(price) for name, price in (prices or {}).items()}
    return Budgets([config], priced, objects, of, clock=clock)


async def used(budgets: Budgets) -> Any:
    (told,) = await budgets.told("acme")
    return told["used"]


@pytest.mark.parametrize("of", [1, 4])
def test_requests_at_once_spend_at_most_one_more_than_the_budget(tmp_path: Path, of: int) -> None:
    """24 requests of up to 200 tokens each, on a budget of 1,000."""
    config = tenant(tokens=1000, period="day")

    async def run() -> int:
        ingresses = [ingress(tmp_path / "f", config, of=of) for _ in range(of)]
        spent = 0

        async def client(number: int) -> None:
            nonlocal spent
            mine, allowance = ingresses[number % of], asking(config, 100, 100)
            try:
                await mine.check(allowance, ())
            except RateLimited as error:
                assert (error.code, error.retry_after_s) == ("rate_limit_exceeded", 1.0)
                assert "under way may use what is left of your budget of 1,000 tokens a day" in str(error)
                allowance.end(refused=True)
                return
            for counts in (Counts(prompt_tokens=100), Counts(requests=1, output_tokens=100)):
                await let_others_run()
                mine.count(KEY, counts)
                spent += sum(counts[2:])
            running.append(allowance)

        running: list[Allowance] = []
        await asyncio.gather(*(client(number) for number in range(24)))
        assert 1000 <= spent <= 1200
        for allowance in running:
            allowance.end()
        for budgets in (*ingresses[1:], ingresses[0]):
            await budgets.flush()
        with pytest.raises(BudgetSpent):
            await ingresses[0].check(asking(config, 1, 1), ())
        return spent

    assert asyncio.run(run()) - 1000 <= 200


def test_what_a_request_did_not_use_is_free_again(tmp_path: Path) -> None:
    """Also what one held that was refused by a later limit, and what one held whose ingress died, a while later."""
    now = [NOON_S]
    config = tenant(tokens=1000, period="day")

    async def run() -> None:
        first, other = (ingress(tmp_path / "f", config, now_s=lambda: now[0], of=2) for _ in range(2))
        long = asking(config, 10, 990)
        await first.check(long, ())
        for budgets in (first, other):
            with pytest.raises(RateLimited, match="under way"):
                await budgets.check(asking(config, 1, 1), ())
        long.end(refused=True)
        await first.flush()
        again = asking(config, 10, 990)
        await other.check(again, ())
        for _ in range(4):  # it lives, so nothing of it lapses
            now[0] += RESERVED_S / 2 + 1
            await other.flush()
            with pytest.raises(RateLimited, match="under way"):
                await first.check(asking(config, 1, 1), ())
        now[0] += RESERVED_S + 1  # it does not any more
        await first.check(asking(config, 10, 990), ())
        assert await used(first) == 0

    asyncio.run(run())


def test_a_flush_writes_what_was_counted_while_a_look_was_under_way(tmp_path: Path) -> None:
    """The last one of an ingress that stops would else lose it."""
    config, begun, may_end = tenant(tokens=1000, period="day"), asyncio.Event(), asyncio.Event()

    class Slow(LeavingObjects):
        async def change(self, *place: Any) -> bool:
            begun.set()
            await may_end.wait()
            return await super().change(*place)

    async def run() -> int:
        budgets = ingress(tmp_path / "f", config, objects=objects_of(tmp_path / "f", kind=Slow))
        budgets.count(KEY, Counts(prompt_tokens=40))
        first = asyncio.create_task(budgets.flush())
        await begun.wait()
        budgets.count(KEY, Counts(output_tokens=10))
        last = asyncio.create_task(budgets.flush())
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(first, last)
        return int(await used(ingress(tmp_path / "f", config)))

    assert asyncio.run(run()) == 50


@pytest.mark.parametrize("changes", [False, True])
def test_four_ingresses_spend_one_budget_and_a_kill_loses_little(tmp_path: Path, changes: bool) -> None:
    """200 clients until none is let in; an ingress dies without a word, and begins again; periods change meanwhile."""
    config = tenant(tokens=100_000, period="day")
    monthly = tenant(tokens=100_000, period="month")
    spent = lost = answers = 0
    now = [NOON_S]

    async def run() -> int:
        nonlocal spent, lost, answers
        ingresses = [ingress(tmp_path / "f", config, now_s=lambda: now[0], of=4) for _ in range(4)]
        for budgets in ingresses:
            budgets.start()
        rng = random.Random(1)

        async def client(number: int) -> None:
            nonlocal spent, lost, answers
            while True:
                at = number % 4
                mine, allowance = ingresses[at], asking(config, 40, 10)
                try:
                    await mine.check(allowance, ())
                except BudgetSpent as error:
                    assert error.code == "budget_spent" and error.status == 429
                    return
                except RateLimited:  # until what the dead one held lapses
                    await asyncio.sleep(0.01)
                    continue
                mine.count(KEY, Counts(prompt_tokens=40))
                await asyncio.sleep(rng.random() * 0.05)
                mine.count(KEY, Counts(requests=1, output_tokens=10))
                allowance.end()
                spent += 50
                answers += 1
                if answers == 800:
                    mine._writing.cancel()
                    lost = int(sum(one.own - one.written for place, one in mine._spent.items() if "-27" in place[1]))
                    ingresses[at] = ingress(tmp_path / "f", config, now_s=lambda: now[0], of=4)
                    ingresses[at].start()
                if changes and answers % 100 == 0:
                    # The last quarter is of the day's row alone: the month's may have what that has lost.
                    last = answers >= 1500
                    for budgets in ingresses if last else [ingresses[rng.randrange(4)]]:
                        budgets.configure([config if last else rng.choice((config, monthly))], {})

        async def pass_time() -> None:
            while True:
                await asyncio.sleep(0.05)
                now[0] += RESERVED_S / 4
                for budgets in list(ingresses):
                    await budgets.flush()

        passing = asyncio.create_task(pass_time())
        await asyncio.gather(*(client(number) for number in range(200)))
        passing.cancel()
        for budgets in ingresses:
            budgets.configure([config], {})
            await budgets.flush()
        return int(await used(ingresses[0]))

    counted = asyncio.run(run())
    assert counted >= 100_000
    assert 0 <= spent - counted <= lost + 50 * 50  # what ran at the killed one was counted there
    # A request and a thousandth for each ingress; a day's budget, which nobody asked while the month's held, counts on.
    assert counted <= 100_000 + 50 + 4 * 100 + (50 * 200 if changes else 0)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["count", "look", "die", "flush"])), max_size=25))
def test_the_database_has_each_part_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, str]]
) -> None:
    """In any order of counts, looks, stops and crashes the total is what was written before each crash."""
    file, config = tmp_path_factory.mktemp("budgets") / "f", tenant(tokens=10**9)

    async def run() -> None:
        lives = [ingress(file, config) for _ in range(3)]
        unwritten, written = [0, 0, 0], 0
        for at, step in steps:
            if step == "count":
                lives[at].count(KEY, Counts(prompt_tokens=7))
                unwritten[at] += 7
            elif step == "die":
                lives[at], unwritten[at] = ingress(file, config), 0
            else:
                await lives[at].flush()
                written, unwritten[at] = written + unwritten[at], 0
        assert await used(ingress(file, config)) == written

    asyncio.run(run())


def test_a_new_day_begins_with_nothing_spent_and_the_last_one_is_kept(tmp_path: Path) -> None:
    now = [NOON_S]
    config = tenant(tokens=100, period="day")

    async def run() -> None:
        budgets = ingress(tmp_path / "f", config, now_s=lambda: now[0])
        budgets.count(KEY, Counts(prompt_tokens=100))
        with pytest.raises(BudgetSpent, match=r"Your budget of 100 tokens a day is spent .* at 2026-11-28T00:00:00Z"):
            await budgets.check(asking(config), ())
        budgets.count(KEY, Counts(output_tokens=5))
        now[0] += 13 * 3600
        await budgets.check(asking(config), ())
        assert await used(budgets) == 0
        await budgets.flush()
        now[0] = NOON_S
        assert await used(ingress(tmp_path / "f", config, now_s=lambda: now[0])) == 105

    asyncio.run(run())


def test_what_is_spent_stays_spent_whatever_period_and_time_it_is(tmp_path: Path) -> None:
    """A day's budget becomes a month's and again a day's; the clock goes back over midnight, by seconds and by days."""
    now = [datetime(2026, 11, 30, 23, 59, 59, tzinfo=UTC).timestamp()]
    daily, monthly = tenant(tokens=1000, period="day"), tenant(tokens=1000, period="month")

    async def run() -> None:
        budgets = ingress(tmp_path / "f", daily, now_s=lambda: now[0])
        budgets.count(KEY, Counts(prompt_tokens=1100))
        for config, forth_s in itertools.product((daily, monthly, daily), (2, 3 * 86400)):
            for written in (False, True):
                budgets.configure([config], {})
                with pytest.raises(BudgetSpent):
                    await budgets.check(asking(config, 1), ())
                now[0] += forth_s
                await budgets.check(asking(config, 1), ())  # another day of another month
                budgets.count(KEY, Counts(prompt_tokens=10))
                if written:
                    await budgets.flush()
                now[0] -= forth_s
        await budgets.flush()
        for config in (daily, monthly):
            assert await used(ingress(tmp_path / "f", config, now_s=lambda: now[0])) == 1100
        now[0] += 2
        for config in (daily, monthly):
            assert await used(ingress(tmp_path / "f", config, now_s=lambda: now[0])) == (60 if config is daily else 120)

    asyncio.run(run())


@pytest.mark.parametrize("away_s", [0.5 * 86400, 86400, 2 * 86400, 30 * 86400])
def test_the_last_spending_of_a_period_is_written_however_long_the_database_is_away(
    tmp_path: Path, away_s: float
) -> None:
    """Other ingresses and a clock that is set back see it, whether or not the period ended long ago meanwhile."""
    now = [NOON_S]
    config, objects = tenant(tokens=1000, period="day"), objects_of(tmp_path / "f", lambda: now[0])

    async def run() -> None:
        budgets = ingress(tmp_path / "f", config, objects=objects)
        budgets.count(KEY, Counts(prompt_tokens=600))
        await budgets.flush()
        objects.away = True
        budgets.count(KEY, Counts(prompt_tokens=70))
        for _ in range(4):
            await budgets.flush()
            now[0] += away_s / 4
        await budgets.flush()
        objects.away = False
        await budgets.flush()
        assert await used(ingress(tmp_path / "f", config)) == 670

    asyncio.run(run())


def test_a_counter_that_was_forgotten_or_lost_by_its_row_is_no_other_one(tmp_path: Path) -> None:
    """A period that ended long ago and comes again begins a new entry; an entry that its row lost is written again."""
    now, passed_s = [NOON_S], [0.0]
    config, objects = tenant(tokens=1000, period="day"), objects_of(tmp_path / "f", lambda: now[0])

    async def run() -> None:
        budgets = ingress(tmp_path / "f", config, objects=objects, clock=lambda: passed_s[0])
        budgets.count(KEY, Counts(prompt_tokens=600))
        await budgets.flush()
        now[0] += 40 * 86400
        await budgets.flush()
        assert not [place for place in budgets._spent if "-27" in place[1]], "it is not kept for ever"
        now[0] = NOON_S
        budgets.count(KEY, Counts(prompt_tokens=300))
        assert await used(budgets) == 900
        await budgets.flush()
        assert await used(ingress(tmp_path / "f", config)) == 900
        assert await objects.change("acme", "budget", "tokens 2026-11-27", lambda _: b"{}")
        now[0] += 1
        for _ in range(2):
            passed_s[0] += LOOK_S
            await used(budgets)
        assert await used(ingress(tmp_path / "f", config)) == 300, "what this counter knows"

    asyncio.run(run())


@pytest.mark.parametrize("first", ["31", "28", "29 leap", "30", "december", "summer time"])
def test_days_and_months_end_where_calendars_say(tmp_path: Path, first: str) -> None:
    begins = {
        "31": "2026-01-31", "28": "2026-02-28", "29 leap": "2028-02-29", "30": "2026-11-30", "december": "2026-12-31",
        "summer time": "2026-03-29",
    }[first]  # fmt: skip
    day = date.fromisoformat(begins)
    next_month = next(day + timedelta(n) for n in range(1, 32) if (day + timedelta(n)).month != day.month)

    async def run() -> None:
        for hour, minute in ((0, 0), (2, 30), (23, 59)):
            now_s = datetime(day.year, day.month, day.day, hour, minute, tzinfo=UTC).timestamp()
            for period, end in (("day", day + timedelta(1)), ("month", next_month)):
                budgets = ingress(tmp_path / "f", tenant(tokens=1, period=period), now_s=lambda now_s=now_s: now_s)
                (told,) = await budgets.told("acme")
                assert told["ends_at"] == f"{end}T00:00:00Z"

    asyncio.run(run())


STEP = st.one_of(
    st.tuples(st.sampled_from(["ask", "ask", "ask"]), st.integers(0, 2), st.integers(1, 400)),
    st.tuples(st.sampled_from(["end", "end", "refuse", "flush", "die", "away", "back"]), st.integers(0, 2), st.just(0)),
    st.tuples(st.sampled_from(["day", "month"]), st.just(0), st.just(0)),
    st.tuples(st.just("time"), st.just(0), st.sampled_from([1, -2, 20, 7200, -7200, 86400, 40 * 86400, -86400])),
)


@settings(max_examples=100)
@given(st.lists(STEP, max_size=60))
def test_in_any_order_nothing_is_forgotten_and_no_more_is_let_in_than_a_naive_count_allows(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    """Three ingresses; an oracle adds up by day and by month what was counted and what its ingress took with it.

    A budget is passed by one request and a thousandth an ingress, while none died and period and time stood still; and
    by its share and a request for each time that an ingress lost its database.
    """
    file, most = tmp_path_factory.mktemp("budgets") / "f", 2000
    configs = {period: tenant(tokens=most, period=period) for period in ("day", "month")}
    now, passed_s = [NOON_S], [0.0]

    def begin(objects: StoredObjects | None = None) -> Budgets:
        return ingress(file, configs[period], now_s=lambda: now[0], of=3, clock=lambda: passed_s[0], objects=objects)

    def row() -> str:
        return f"{datetime.fromtimestamp(now[0], UTC):%Y-%m-%d}"

    async def run() -> None:
        nonlocal period
        databases = [objects_of(file, lambda: now[0]) for _ in range(3)]
        lives = [begin(objects) for objects in databases]
        running: list[list[Allowance]] = [[], [], []]
        total, still, apart = Counter[str](), True, 0
        for step, at, amount in steps:
            mine = lives[at]
            passed_s[0] += 2.0  # the last look is old
            if step == "ask":
                allowance = asking(configs[period], amount)
                try:
                    await mine.check(allowance, ())
                    running[at].append(allowance)
                except RateLimited:
                    allowance.end(refused=True)
            elif step in ("end", "refuse") and running[at]:
                allowance = running[at].pop(0)
                if step == "end":
                    mine.count(KEY, Counts(prompt_tokens=allowance.prompt_tokens))
                    for name in (row(), row()[:-3]):
                        total[name] += allowance.prompt_tokens
                allowance.end(refused=step == "refuse")
                if still:
                    name = row() if period == "day" else row()[:-3]
                    assert total[name] <= most + 400 + 3 * most // 1000 + apart * (most // 3 + 400)
            elif step == "flush" and not databases[at].away:
                await mine.flush()
            elif step == "die":
                # What its looks wrote is not lost, and those that ran there end elsewhere.
                if looks := [one.look for one in mine._spent.values() if one.look is not None]:
                    await asyncio.wait(looks)  # or they would write after its death
                for place, one in mine._spent.items():
                    total[place[1].removeprefix("tokens ")] -= int(one.own - one.written)
                databases[at] = objects_of(file, lambda: now[0])
                lives[at], running[at], still = begin(databases[at]), [], False
            elif step == "away" and not databases[at].away:
                databases[at].away = True
                apart += 1
            elif step == "back":
                databases[at].away = False
            elif step in configs:
                period, still = step, still and step == period
                for each in lives:
                    each.configure([configs[period]], {})
            elif step == "time":
                now[0] += amount
                still = still and amount in (1, 20)
        for objects in databases:
            objects.away = False
        for each in lives:
            await each.flush()
        for unit, name in (("day", row()), ("month", row()[:-3])):
            period = unit
            assert await used(begin()) == total[name]

    period = "day"
    asyncio.run(run())


def test_no_request_waits_for_a_database_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2,000 tenants only some ask it at once, others' threads stay free, and all of them are told."""
    monkeypatch.setattr(budgets_module, "WAIT_S", 0.01)
    monkeypatch.setattr(budgets_module, "REPORT_S", 0.01)
    names = [f"t{number}" for number in range(2000)]
    configs = [tenant(tokens=1000).model_copy(update={"name": name}) for name in names]
    asked = 0

    async def run() -> None:
        hangs = asyncio.Event()

        class Hanging(LeavingObjects):
            async def get(self, *_: Any) -> Any:
                nonlocal asked
                asked += 1
                await hangs.wait()
                return None

            async def change(self, *place: Any) -> bool:
                await self.get()
                return await super().change(*place)

        budgets = ingress(tmp_path / "f", configs[0], of=2, objects=objects_of(tmp_path / "f", kind=Hanging))
        budgets.configure(configs, {})
        async with asyncio.timeout(120):
            await asyncio.gather(*(budgets.check(asking(config, 1), ()) for config in configs[:100]))
            assert len(await budgets.told(None)) == len(list(budgets.samples())) == 2000
            assert asked <= LOOKS
            # Alone, it lets in its half of what it knows to be left.
            one, answers = configs[0], 0
            with pytest.raises(RateLimited, match="cannot ask the others now"):
                while True:
                    await budgets.check(asking(one, 100), ())
                    answers += 1
            assert answers == 5
            monkeypatch.setattr(budgets_module, "WAIT_S", 60.0)
            hangs.set()
            await budgets.flush()
            await budgets.check(asking(one, 100), ())

    asyncio.run(run())


@pytest.mark.parametrize("row", [b"[]", b'{"a": {"of": "a newer release"}}', b'{"a": "none"}', b'{"held a": "1"}'])
def test_a_row_that_cannot_be_read_is_left_alone(tmp_path: Path, row: bytes, caplog: pytest.LogCaptureFixture) -> None:
    config = tenant(tokens=100, period="day")

    async def run() -> None:
        objects = objects_of(tmp_path / "f")
        budgets = ingress(tmp_path / "f", config, objects=objects)
        assert await objects.insert("acme", "budget", "tokens 2026-11-27", row, NOON_S + 1e6)
        await budgets.check(asking(config, 90), ())
        budgets.count(KEY, Counts(prompt_tokens=100))
        with pytest.raises(BudgetSpent):
            await budgets.check(asking(config, 90), ())
        await budgets.flush()
        assert await objects.get("acme", "budget", "tokens 2026-11-27") == row
        assert await objects.get("acme", "budget", "tokens 2026-11") is not None, "it stops no other row"

    asyncio.run(run())
    assert "the budget of acme is counted by this ingress alone" in caplog.text


@given(st.integers(0, 10**6), st.data())
def test_the_most_that_a_request_may_cost_is_no_less_than_what_it_costs(prompt: int, data: st.DataObject) -> None:
    cached = data.draw(st.integers(0, prompt))
    written = data.draw(st.integers(0, prompt - cached))
    money = st.decimals(0, 1000, places=3)
    price = PriceConfig(input=data.draw(money), output=data.draw(money), cached=data.draw(st.none() | money),
                        write=data.draw(st.none() | money))  # fmt: skip
    most = data.draw(st.integers(0, 10**6))
    counts = Counts(1, 1, prompt, cached, written, data.draw(st.integers(0, most)))
    bound = Counts(prompt_tokens=prompt, output_tokens=most)
    assert cost_of(counts, price) <= most_cost(bound, price)
    assert most_cost(bound, None) == 0


def test_a_soft_budget_refuses_nothing_and_others_have_none(tmp_path: Path) -> None:
    soft = tenant(tokens=1, hard=False)

    async def run() -> None:
        budgets = ingress(tmp_path / "f", soft)
        budgets.count(KEY, Counts(prompt_tokens=3))
        budgets.count(KEY._replace(tenant="globex"), Counts(prompt_tokens=3))
        await budgets.check(asking(soft), ())
        await budgets.check(asking(soft.model_copy(update={"name": "globex", "budget": None})), ())
        assert [told["tenant"] for told in await budgets.told(None)] == ["acme"]
        assert await budgets.told("globex") == []
        assert list(budgets.samples()) == [("warmpath_tenant_budget_used_ratio", (("tenant", "acme"),), 3.0)]

    asyncio.run(run())


def test_without_its_database_an_ingress_counts_alone(tmp_path: Path) -> None:
    config, objects = tenant(tokens=100), objects_of(tmp_path / "f")

    async def run() -> None:
        budgets = ingress(tmp_path / "f", config, objects=objects)
        other = ingress(tmp_path / "f", config)
        other.count(KEY, Counts(prompt_tokens=30))
        await other.flush()
        assert await used(budgets) == 30
        objects.away = True
        await budgets.check(asking(config), ())
        budgets.count(KEY, Counts(prompt_tokens=70))
        assert await used(budgets) == 100
        with pytest.raises(BudgetSpent):
            await budgets.check(asking(config), ())
        objects.away = False
        await budgets.flush()
        assert await used(ingress(tmp_path / "f", config)) == 100

    asyncio.run(run())
    with pytest.raises(ValueError, match="WARMPATH_RESPONSES_URL"):
        Budgets([config], {}, None)
    nobody = Budgets([], {}, None)
    with pytest.raises(ValueError, match="WARMPATH_RESPONSES_URL"):
        nobody.configure([config], {})
    assert asyncio.run(nobody.told(None)) == []


PRICES = {
    "m": {"input": "1.25", "cached": "0.125", "write": "1.5625", "output": "10"},
    "lora": {"input": 3, "output": 9},
}


def test_money_is_what_a_naive_oracle_adds_up(tmp_path: Path) -> None:
    """10,000 requests of three models, one without a price."""
    rng = random.Random(2)
    config = tenant(money=1000)
    cents = Decimal()
    rows: dict[UsageKey, Counts] = {}

    async def run() -> Any:
        nonlocal cents
        budgets = ingress(tmp_path / "f", config, PRICES)
        for _ in range(10_000):
            cached, written, rest, out = (rng.randrange(5000) for _ in range(4))
            model = rng.choice(("m", "lora", "free"))
            counts = Counts(1, 1, cached + written + rest, cached, written, out)
            if model == "m":
                read, write = cached * Decimal("12.5"), written * Decimal("156.25")
                cents += (rest * 125 + read + write + out * 1000) / Decimal(10**6)
            elif model == "lora":
                cents += ((rest + cached + written) * 300 + out * 900) / Decimal(10**6)
            key = KEY._replace(model=model)
            budgets.count(key, counts._replace(output_tokens=0, requests=0))
            budgets.count(key, Counts(output_tokens=out))
            rows[key] = rows.get(key, Counts()).plus(counts)
        return await used(budgets)

    total = asyncio.run(run())
    assert total == pytest.approx(float(cents / 100), abs=1e-9)
    priced = {name: PriceConfig.model_validate(price) for name, price in PRICES.items()}
    document = usage_document("2026-11-27", "2026-11-27", sorted(rows.items()), priced)
    assert document["total"]["cost"] == pytest.approx(float(cents / 100), abs=1e-9)
    shown = {row["model"]: row for row in document["data"]}
    assert shown["m"]["break_even_reads"] == pytest.approx((1.5625 - 1.25) / (1.25 - 0.125))
    assert shown["lora"]["break_even_reads"] is None and shown["lora"]["saved"] == 0 == shown["free"]["cost"]
    without = rows[KEY]._replace(cached_tokens=0, written_tokens=0)
    assert shown["m"]["saved"] == pytest.approx(float(cost_of(without, priced["m"]) - cost_of(rows[KEY], priced["m"])))


@pytest.mark.parametrize(
    ("budget", "sentence"),
    [
        ({}, "tenants.0.budget: a budget has either `tokens` or `money`"),
        ({"tokens": 1, "money": 1}, "tenants.0.budget: a budget has either `tokens` or `money`"),
        ({"money": 1}, "tenants.0.budget.money: a budget in money needs `prices`"),
        ({"tokens": 0}, "must be at least 1"),
        (100, "must be pairs of NAME: VALUE"),
    ],
)
def test_a_budget_that_cannot_be_meant_is_refused(budget: Any, sentence: str) -> None:
    with pytest.raises(BadSettings, match=sentence):
        app_config({"model": "demo", "tenants": [{"name": "acme", "key_sha256": ["a" * 64], "budget": budget}]})
