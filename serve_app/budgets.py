"""Budgets: what each tenant may spend in a day or a month, in tokens or money, over all ingresses and their lives.

A tenant's row of a period, in the database of responses, has entries of each counter, the one of an ingress' life: what
it has spent, and what it holds for requests under way, which lapses when it dies. A request is let in once the row says
that it is held, or while what the row does not say yet is a thousandth of the budget: so all ingresses together spend
at most one request and that part for each of them too much. Without the database, each may use its share of the rest.

Tokens are counted once, by ``usage.Ledger``, which gives each count to the budgets. The two keep it apart: usage stays
with its ingress (by model and prompt, priced when it is read, written when there is time), while a budget is of all
ingresses, priced when it is spent, and written before further requests are let in.
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
from serve_app.errors import BudgetSpent, LimitReason, Overloaded, RateLimited, WarmpathError
from serve_app.fairness.rate_limits import Allowance
from serve_app.stored.objects import StoredObjects
from serve_app.usage import Counts, UsageKey, cost_of, most_cost

logger = logging.getLogger(__name__)

LOOK_S, LOOK_PART = 1.0, Decimal("0.001")
"""An ingress looks at a row after this time, or before more than this part of the budget is not in it."""
WAIT_S, REPORT_S = 1.0, 5.0
"""How long a request, and a report of all budgets, waits for looks."""
AWAY_S = 5.0
"""After a failed look the next one begins so much later, and no request waits for it."""
LOOKS = 8
"""Looks at once, so that a database that hangs leaves threads to others."""
RESERVED_S = 30
"""What is held lapses so long after its ingress wrote it last; one that lives writes it again in time."""
KEPT = timedelta(days=40)
ENDED = timedelta(days=1)
"""How long an ended period is remembered, as clocks are also set back."""
_KIND = "budget"
_NONE = Decimal()


@dataclass(slots=True, eq=False)
class _Spent:
    """One counter: a period of a tenant in this ingress.

    ``own``: spent here; ``granted``: held for requests that were let in; ``waiting``: for those that wait for a look.
    At the last look the row had ``written`` and ``reserved`` of these; all other counters had spent ``others``,
    and reserved ``others_reserved``.
    """

    tenant: str
    period: str
    ends: datetime
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    own: Decimal = _NONE
    granted: Decimal = _NONE
    waiting: Decimal = _NONE
    written: Decimal = _NONE
    reserved: Decimal = _NONE
    reserved_until_s: float = inf
    others: Decimal = _NONE
    others_reserved: Decimal = _NONE
    looked_s: float = -inf
    began_s: float = -inf
    reached: bool = True
    look: asyncio.Task[bool] | None = None

    @property
    def total(self) -> Decimal:
        """What all had spent at the last look."""
        return self.others + self.written

    @property
    def used(self) -> Decimal:
        """What is spent, as far as this ingress knows."""
        return self.total - self.written + self.own

    @property
    def taken(self) -> Decimal:
        """What is spent or held for requests that were let in."""
        return self.used + self.others_reserved + self.granted

    @property
    def unwritten(self) -> Decimal:
        """What is spent here, or held for requests that were let in, and not in the row."""
        return self.own + self.granted - self.written - self.reserved

    def changed(self, now_s: float) -> bool:
        """Return whether the row is to be written."""
        here = self.own, self.granted + self.waiting
        return here != (self.written, self.reserved) or bool(
            self.reserved and self.reserved_until_s - now_s < RESERVED_S / 2
        )


class Budgets:
    """What all tenants spend, in one of ``ingresses`` (``shares.Budget`` divides a capacity instead).

    ``objects`` None: there is no database, and no tenant has a budget.
    """

    def __init__(
        self,
        tenants: Sequence[TenantConfig],
        prices: Mapping[str, PriceConfig],
        objects: StoredObjects | None,
        ingresses: int = 1,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objects = objects
        self._ingresses = ingresses
        self._clock = clock
        self._budgets: dict[str, BudgetConfig] = {}
        self._spent: dict[tuple[str, str], _Spent] = {}
        """By tenant and row: of each period that is not over, or not written yet."""
        self._turns = asyncio.Semaphore(LOOKS)
        self.configure(tenants, prices)

    def configure(self, tenants: Sequence[TenantConfig], prices: Mapping[str, PriceConfig]) -> None:
        """Use other budgets and prices from now on. What is spent in a day or month stays spent in both."""
        self.require_database(tenants)
        self.prices = dict(prices)
        self._budgets = {tenant.name: tenant.budget for tenant in tenants if tenant.budget is not None}

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
        """Count a part of a request, in the day and in the month, since a budget's period may change in between."""
        budget = self._budgets.get(key.tenant)
        if budget is None:
            return
        amount = self._amount(budget, key.model, counts, cost_of)
        for period in _ENDS:
            self._of(key.tenant, budget, period).own += amount

    async def check(self, allowance: Allowance, _: Sequence[Any]) -> None:
        """Hold the most that a request may spend until its end.

        Raises BudgetSpent if nothing of its tenant's budget is left, RateLimited if requests under way may use it.
        """
        tenant = allowance.config
        if tenant is None or (budget := self._budgets.get(tenant.name)) is None or not budget.hard:
            return
        most = Counts(prompt_tokens=allowance.prompt_tokens, output_tokens=allowance.output_tokens)
        amount = self._amount(budget, allowance.model, most, most_cost)
        spent = self._of(tenant.name, budget, budget.period)
        spent.waiting += amount
        try:
            await self._looked(spent, budget)
            self._refuse(spent, budget)
            spent.granted += amount
        finally:
            spent.waiting -= amount

        def give_back() -> None:
            spent.granted -= amount

        allowance.at_end.append(give_back)

    async def told(self, tenant: str | None) -> list[dict[str, Any]]:
        """Return the budgets of one tenant, or (None) all, and how much of them is used, as far as it is known."""
        rows = [
            (name, budget, self._of(name, budget, budget.period))
            for name, budget in self._budgets.items()
            if tenant in (None, name)
        ]
        looks = [self._begin_look(spent) for _, budget, spent in rows if self._due(spent, budget)]
        if looks:
            await asyncio.wait(looks, timeout=REPORT_S)
        return [self._report(name, budget, spent) for name, budget, spent in rows]

    def samples(self) -> Iterator[Sample]:
        """Yield the used part of each budget, as of the last look."""
        for name, budget in self._budgets.items():
            used = self._of(name, budget, budget.period).used
            yield "warmpath_tenant_budget_used_ratio", (("tenant", name),), float(used / budget.most)

    async def flush(self) -> None:
        """Write all that is spent or held and not written yet, until the database does not answer once."""
        now_s, ended = self._now_s(), self._now() - ENDED
        for place, spent in list(self._spent.items()):
            if spent.look is not None:  # it began before what was counted since
                look = spent.look
                await asyncio.wait([look])
                if not look.result():
                    return
            if spent.changed(now_s):
                look = self._begin_look(spent)
                await asyncio.wait([look])
                if not look.result():
                    return
            elif spent.ends < ended and not (spent.granted or spent.waiting or spent.look):
                del self._spent[place]

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.flush()

    def _amount(
        self, budget: BudgetConfig, model: str, counts: Counts, cost: Callable[[Counts, PriceConfig | None], Decimal]
    ) -> Decimal:
        """Return so many tokens in the unit of a budget."""
        return Decimal(counts.tokens) if budget.tokens is not None else cost(counts, self.prices.get(model))

    def _refuse(self, spent: _Spent, budget: BudgetConfig) -> None:
        """Raise RateLimited for a request that asks for more than is left."""
        most, used = budget.formatted(budget.most), budget.formatted(spent.used)
        reason = LimitReason("ingress", "budget", int(spent.used), int(budget.most))
        if spent.used >= budget.most:
            raise BudgetSpent(
                f"Your budget of {most} a {budget.period} is spent ({used}); it begins anew at "
                f"{spent.ends:%Y-%m-%dT%H:%M:%SZ}. Wait, or ask for a larger one.",
                retry_after_s=(spent.ends - self._now()).total_seconds(),
                reason=reason,
            )
        if spent.taken >= budget.most:
            raise RateLimited(
                f"Your requests under way may use what is left of your budget of {most} a {budget.period} ({used} are "
                "spent); send the request again once they ended, or lower their max_tokens.",
                retry_after_s=1.0,
                reason=reason,
            )
        left = budget.most - spent.total - spent.others_reserved - spent.reserved
        if spent.unwritten > LOOK_PART * budget.most and spent.unwritten >= left / self._ingresses:
            raise RateLimited(
                f"This server's part of what is left of your budget of {most} a {budget.period} is used, and it cannot "
                "ask the others now; send the request again later.",
                retry_after_s=AWAY_S,
                reason=reason,
            )

    def _report(self, name: str, budget: BudgetConfig, spent: _Spent) -> dict[str, Any]:
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

    def _now_s(self) -> float:
        return time.time() if self._objects is None else self._objects.now_s()

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._now_s(), UTC)

    def _of(self, name: str, budget: BudgetConfig, period: str) -> _Spent:
        unit, now = "tokens" if budget.tokens is not None else "money", self._now()
        place = name, f"{unit} {now:%Y-%m-%d}" if period == "day" else f"{unit} {now:%Y-%m}"
        spent = self._spent.get(place)
        if spent is None:
            spent = self._spent[place] = _Spent(*place, _ENDS[period](now))
        return spent

    def _due(self, spent: _Spent, budget: BudgetConfig) -> bool:
        if not spent.reached:
            return self._clock() - spent.looked_s >= AWAY_S
        return spent.unwritten + spent.waiting > LOOK_PART * budget.most or self._clock() - spent.looked_s >= LOOK_S

    async def _looked(self, spent: _Spent, budget: BudgetConfig) -> None:
        """Wait until the row has what is spent and asked here, and has told what others have; or as long as may be."""
        began_s = self._clock()
        while self._due(spent, budget):
            reached, look = spent.reached, self._begin_look(spent)
            left_s = WAIT_S - (self._clock() - min(began_s, spent.began_s))
            if not reached or left_s <= 0 or not (await asyncio.wait([look], timeout=left_s))[0]:
                return

    def _begin_look(self, spent: _Spent) -> asyncio.Task[bool]:
        """Look at a row, unless one does; return the work."""
        if spent.look is None:
            spent.began_s = self._clock()
            spent.look = asyncio.get_running_loop().create_task(self._look(spent))
        return spent.look

    async def _look(self, spent: _Spent) -> bool:
        """Write what is spent and held here, and read what others have; return whether the database answers.

        If not, or if the row cannot be read, what is known counts. An entry that the row has lost is written again.
        """
        assert self._objects is not None
        place = spent.tenant, _KIND, spent.period
        try:
            async with self._turns:
                now_s = self._now_s()
                own, reserved, until_s = spent.own, spent.granted + spent.waiting, now_s + RESERVED_S
                row = _Row(spent.key, own, reserved, until_s, now_s)
                data = None if spent.changed(now_s) else await self._objects.get(*place)
                if data is None or not row.has(data):
                    while not await self._objects.change(*place, row.written):
                        first = row.written(b"{}")
                        if await self._objects.insert(*place, first, (spent.ends + KEPT).timestamp()):
                            break
                    spent.written, spent.reserved, spent.reserved_until_s = own, reserved, until_s
            spent.others, spent.others_reserved, spent.reached = row.others, row.others_reserved, True
        except (WarmpathError, msgspec.MsgspecError, ArithmeticError, ValueError) as error:
            if spent.reached:
                logger.warning("the budget of %s is counted by this ingress alone for now: %s", spent.tenant, error)
            spent.reached = False
            return not isinstance(error, Overloaded)
        else:
            return True
        finally:
            spent.looked_s, spent.look = self._clock(), None


class _Row:
    """What one counter writes into its row, and reads of the others. An amount that is held says until when."""

    def __init__(self, key: str, own: Decimal, reserved: Decimal, until_s: float, now_s: float) -> None:
        self._key, self._now_s = key, now_s
        self._entries = {key: str(own)}
        if reserved:
            self._entries[f"{_RESERVED} {key} {until_s:.0f}"] = str(reserved)
        self.others = self.others_reserved = _NONE

    def has(self, data: bytes) -> bool:
        """Read the others, and return whether the row has this counter."""
        entries = self._read(data)
        return self._key in entries or not Decimal(self._entries[self._key])

    def written(self, data: bytes) -> bytes:
        """Read the others, and return the row with this counter's entries."""
        return msgspec.json.encode(self._read(data) | self._entries)

    def _read(self, data: bytes) -> dict[str, str]:
        """Return the entries that hold: not of what was held by this counter, or by those that died."""
        entries: dict[str, str] = {}
        self.others = self.others_reserved = _NONE
        for name, value in msgspec.json.decode(data, type=dict[str, str]).items():
            amount = Decimal(value)
            if name.startswith(_RESERVED):
                _, key, until_s = name.split(" ")
                if key == self._key or float(until_s) < self._now_s:
                    continue
                self.others_reserved += amount
            elif name != self._key:
                self.others += amount
            entries[name] = value
        return entries


_RESERVED = "held"


def _end_of_day(now: datetime) -> datetime:
    return now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)


def _end_of_month(now: datetime) -> datetime:
    return _end_of_day(now.replace(day=1) + timedelta(days=31)).replace(day=1)


_ENDS: Mapping[str, Callable[[datetime], datetime]] = {"day": _end_of_day, "month": _end_of_month}
