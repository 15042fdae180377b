"""Budgets over several ingresses and their lives: nothing is counted twice, and little is spent past the end."""

import asyncio
import random
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.budgets import Budgets
from serve_app.config.live import BadSettings, app_config
from serve_app.config.tenants import PriceConfig, TenantConfig
from serve_app.errors import BudgetSpent, Overloaded
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.rate_limits import Allowance
from serve_app.fairness.shares import Shares
from serve_app.stored import StorageLimits, StoredObjects, open_database
from serve_app.usage import Counts, UsageKey, cost_of, usage_document

KEY = UsageKey("2026-11-27", "acme", "m", "")
NOON_S = datetime(2026, 11, 27, 12, tzinfo=UTC).timestamp()


def tenant(**budget: Any) -> TenantConfig:
    return TenantConfig.model_validate({"name": "acme", "key_sha256": ["a" * 64], "budget": budget})


def asking(config: TenantConfig) -> Allowance:
    return cast(Allowance, SimpleNamespace(config=config))


def ingress(
    file: Path,
    config: TenantConfig,
    prices: dict[str, Any] | None = None,
    *,
    now_s: Callable[[], float] = lambda: NOON_S,
) -> Budgets:
    """Return the budgets of a new life of an ingress."""
    bounds = StorageLimits(3600, 1 << 30, now_s)
    objects = StoredObjects(open_database(None, file, bounds), b"s" * 32, FairWorkers(Shares({})), bounds)
    priced = {name: PriceConfig.model_validate(price) for name, price in (prices or {}).items()}
    return Budgets([config], priced, objects)


async def used(budgets: Budgets) -> Any:
    (told,) = await budgets.told("acme")
    return told["used"]


def test_four_ingresses_spend_one_budget_and_a_kill_loses_little(tmp_path: Path) -> None:
    """200 clients until none is let in; an ingress dies without a word, and begins again."""
    config = tenant(tokens=100_000, period="day")
    spent = lost = answers = 0

    async def run() -> int:
        nonlocal spent, lost, answers
        ingresses = [ingress(tmp_path / "f", config) for _ in range(4)]
        for budgets in ingresses:
            budgets.start()
        rng = random.Random(1)

        async def client(number: int) -> None:
            nonlocal spent, lost, answers
            while True:
                at = number % 4
                mine = ingresses[at]
                try:
                    await mine.check(asking(config), ())
                except BudgetSpent as error:
                    assert error.code == "budget_spent" and error.status == 429
                    assert error.retry_after_s == 12 * 3600
                    return
                mine.count(KEY, Counts(prompt_tokens=40))
                await asyncio.sleep(rng.random() * 0.05)
                mine.count(KEY, Counts(requests=1, output_tokens=10))
                spent += 50
                answers += 1
                if answers == 800:
                    mine._writing.cancel()
                    lost = int(sum(one.own - one.written for one in mine._spent.values()))
                    ingresses[at] = ingress(tmp_path / "f", config)
                    ingresses[at].start()

        async with asyncio.TaskGroup() as clients:
            for number in range(200):
                clients.create_task(client(number))
        for budgets in ingresses:
            await budgets.flush()
        return int(await used(ingresses[0]))

    counted = asyncio.run(run())
    assert counted >= 100_000
    assert spent <= 101_000 + 200 * 50 + lost
    assert 0 <= spent - counted <= lost + 200 * 50  # what ran at the killed one was counted there


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


def test_without_its_database_an_ingress_counts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tenant(tokens=100)

    async def away(*_: object) -> bool:
        raise Overloaded("away")

    async def run() -> None:
        budgets = ingress(tmp_path / "f", config)
        with monkeypatch.context() as patch:
            for name in ("get", "change", "insert"):
                patch.setattr(StoredObjects, name, away)
            await budgets.check(asking(config), ())
            budgets.count(KEY, Counts(prompt_tokens=100))
            with pytest.raises(BudgetSpent):
                await budgets.check(asking(config), ())
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
