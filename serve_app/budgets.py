"""Budgets: what each tenant may spend in a day or a month, in tokens or money, over all ingresses and their lives.

A tenant's row of a period, in the database of responses, has one entry for each life of an ingress, which writes its
own total there: nothing counts twice, and a crash loses what was not written yet. A request waits until its ingress has
looked at the others' totals within the last second, and since it spent a thousandth of the budget.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from math import inf
from typing import Any

import msgspec

from router.background import run_in_background
from router.protocol.samples import Sample
from serve_app.config.tenants import BudgetConfig, PriceConfig, TenantConfig
from serve_app.errors import BudgetSpent, LimitReason, WarmpathError
from serve_app.fairness.rate_limits import Allowance
from serve_app.stored import StoredObjects
from serve_app.usage import Counts, UsageKey, cost_of

logger = logging.getLogger(__name__)

LOOK_S, LOOK_PART = 1.0, Decimal("0.001")
"""An ingress looks at the others' totals after this time, or after it has spent this part of the budget itself."""
KEPT = timedelta(days=40)
_KIND = "budget"


@dataclass(slots=True)
class _Spent:
    """One period of a tenant. ``own``: spent here; ``total``: by all at the last look, with ``written`` of it here."""

    period: str
    ends: datetime
    own: Decimal = Decimal()
    written: Decimal = Decimal()
    total: Decimal = Decimal()
    looked_s: float = -inf
    reached: bool = True
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def used(self) -> Decimal:
        return self.total - self.written + self.own


class Budgets:
    """What all tenants spend, in one ingress (``shares.Budget`` divides a capacity instead).

    ``objects`` None: there is no database, and no tenant has a budget.
    """

    def __init__(
        self,
        tenants: Sequence[TenantConfig],
        prices: Mapping[str, PriceConfig],
        objects: StoredObjects | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objects = objects
        self._clock = clock
        self._life = secrets.token_hex(8)
        self._budgets: dict[str, BudgetConfig] = {}
        self._spent: dict[str, _Spent] = {}
        self._over: list[tuple[str, _Spent]] = []
        """Ended periods whose last part is not written yet."""
        self.configure(tenants, prices)

    def configure(self, tenants: Sequence[TenantConfig], prices: Mapping[str, PriceConfig]) -> None:
        """Use other budgets and prices from now on. What is spent in a period stays spent."""
        self.require_database(tenants)
        before, self.prices = self._budgets, dict(prices)
        self._budgets = {tenant.name: tenant.budget for tenant in tenants if tenant.budget is not None}
        for name, budget in before.items():  # another unit or period is another row
            if (other := self._budgets.get(name)) is None or _row(other, self._now()) != _row(budget, self._now()):
                self._leave(name)

    def require_database(self, tenants: Sequence[TenantConfig]) -> None:
        """Raise ValueError if a tenant has a budget and there is no database to count it in."""
        if self._objects is None and any(tenant.budget is not None for tenant in tenants):
            raise ValueError(
                "budgets are counted in the database of responses, and this ingress has none: set "
                "$WARMPATH_RESPONSES_URL to a Redis or Postgres, or responses_file"
            )

    def start(self) -> None:
        """Write what is spent, regularly."""
        self._writing = run_in_background(self._write)

    def count(self, key: UsageKey, counts: Counts) -> None:
        """Count a part of a request."""
        budget = self._budgets.get(key.tenant)
        if budget is None:
            return
        if budget.tokens is not None:
            self._of(key.tenant, budget).own += counts.prompt_tokens + counts.output_tokens
        else:
            self._of(key.tenant, budget).own += cost_of(counts, self.prices.get(key.model))

    async def check(self, allowance: Allowance, _: Sequence[Any]) -> None:
        """Raise BudgetSpent for a request of a tenant without any left."""
        tenant = allowance.config
        if tenant is None or (budget := self._budgets.get(tenant.name)) is None:
            return
        spent = await self._looked(tenant.name, budget)
        if not budget.hard or spent.used < budget.most:
            return
        most, ends = budget.shown(budget.most), spent.ends
        raise BudgetSpent(
            f"Your budget of {most} a {budget.period} is spent ({budget.shown(spent.used)}); it begins anew at "
            f"{ends:%Y-%m-%dT%H:%M:%SZ}. Wait, or ask for a larger one.",
            retry_after_s=(ends - self._now()).total_seconds(),
            reason=LimitReason("ingress", "budget", int(spent.used), int(budget.most)),
        )

    async def told(self, tenant: str | None) -> list[dict[str, Any]]:
        """Return the budgets of one tenant, or (None) all, and how much of them is used."""
        return [
            self._told(name, budget, await self._looked(name, budget))
            for name, budget in self._budgets.items()
            if tenant in (None, name)
        ]

    def samples(self) -> Iterator[Sample]:
        """Yield the used part of each budget, as of the last look."""
        for name, budget in self._budgets.items():
            used = self._of(name, budget).used
            yield "warmpath_tenant_budget_used_ratio", (("tenant", name),), float(used / budget.most)

    async def flush(self) -> None:
        """Write all that is spent and not written yet."""
        over, self._over = self._over, []
        for name, spent in [*over, *self._spent.items()]:
            if spent.own != spent.written:
                async with spent.looking:
                    await self._look(name, spent)
        self._over += [(name, spent) for name, spent in over if spent.own != spent.written]

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.flush()

    def _told(self, name: str, budget: BudgetConfig, spent: _Spent) -> dict[str, Any]:
        number = int if budget.tokens is not None else float
        return {
            "tenant": name,
            "unit": "tokens" if budget.tokens is not None else "money",
            "period": budget.period,
            "limit": number(budget.most),
            "used": number(spent.used),
            "left": number(max(Decimal(), budget.most - spent.used)),
            "ends_at": f"{spent.ends:%Y-%m-%dT%H:%M:%SZ}",
            "hard": budget.hard,
        }

    def _now(self) -> datetime:
        now_s = time.time() if self._objects is None else self._objects.now_s()
        return datetime.fromtimestamp(now_s, UTC)

    def _of(self, name: str, budget: BudgetConfig) -> _Spent:
        row = _row(budget, now := self._now())
        spent = self._spent.get(name)
        if spent is None or spent.period != row:
            self._leave(name)
            spent = self._spent[name] = _Spent(row, _end(budget, now))
        return spent

    def _leave(self, name: str) -> None:
        if (spent := self._spent.pop(name, None)) is not None and spent.own != spent.written:
            self._over.append((name, spent))

    async def _looked(self, name: str, budget: BudgetConfig) -> _Spent:
        """Return what is spent, as of now or shortly before."""
        spent = self._of(name, budget)

        def due() -> bool:
            new = spent.own - spent.written
            return (spent.reached and new > LOOK_PART * budget.most) or self._clock() - spent.looked_s >= LOOK_S

        if due():
            async with spent.looking:
                if due():  # nobody did it meanwhile
                    await self._look(name, spent)
        return spent

    async def _look(self, name: str, spent: _Spent) -> None:
        """Write the own total, and read the others'. If the database is away, what is known counts."""
        own, total = spent.own, Decimal()

        def change(data: bytes) -> bytes:
            nonlocal total
            row = msgspec.json.decode(data, type=dict[str, str]) | {self._life: str(own)}
            total = sum(map(Decimal, row.values()), Decimal())
            return msgspec.json.encode(row)

        assert self._objects is not None
        place = name, _KIND, spent.period
        try:
            if own == spent.written and (data := await self._objects.get(*place)) is not None:
                change(data)
            else:
                while not await self._objects.change(*place, change):
                    first = msgspec.json.encode({self._life: str(own)})
                    if await self._objects.insert(*place, first, (spent.ends + KEPT).timestamp()):
                        total = own
                        break
            spent.written, spent.total, spent.reached = own, total, True
        except WarmpathError:
            spent.reached = False
            logger.warning("the budget of %s is counted by this ingress alone until its database answers", name)
        spent.looked_s = self._clock()


def _row(budget: BudgetConfig, now: datetime) -> str:
    """Return the name of the row of a period."""
    unit = "tokens" if budget.tokens is not None else "money"
    return f"{unit} {now:%Y-%m-%d}" if budget.period == "day" else f"{unit} {now:%Y-%m}"


def _end(budget: BudgetConfig, now: datetime) -> datetime:
    day = now.replace(hour=0, minute=0, second=0, microsecond=0)
    if budget.period == "day":
        return day + timedelta(days=1)
    return (day + timedelta(days=32 - day.day)).replace(day=1)
