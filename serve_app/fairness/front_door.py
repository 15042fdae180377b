"""What a request passes before anything expensive is done for it: bounds by tenant on what waits, then a line.

It has an ingress' part of the replicas' places. One asyncio loop uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import ceil
from types import TracebackType

from serve_app.errors import RateLimited
from serve_app.fairness.rate_limits import Allowance, TenantLimits
from serve_app.fairness.shares import Budget, Shares
from serve_app.fairness.waiting_line import Place, WaitingLine

_FIRST_GUESS = 0.25
"""Uncached tokens a byte of body, for a tenant that was not seen before."""
_WEIGHT = 0.2
"""Of the newest request in a tenant's average."""


class FrontDoor:
    """Admits requests. ``places``: generations that may be under way at once; ``max_waiting``: requests in line,
    ``max_bytes``: of their bodies, which both may be set; all three by tenant, by the rule of ``Budget``.
    ``limits``: what tenants may ask for however much is free; default: anything.
    """

    def __init__(
        self,
        shares: Shares,
        *,
        places: Callable[[], int],
        max_waiting: int,
        max_bytes: int,
        limits: TenantLimits | None = None,
    ) -> None:
        self._limits = limits or TenantLimits()
        self.max_waiting = max_waiting
        self.max_bytes = max_bytes
        self._shares = shares
        self._requests = Budget(shares, lambda: self.max_waiting)
        self._bytes = Budget(shares, lambda: self.max_bytes)
        self._line = WaitingLine(Budget(shares, places))
        self._uncached: dict[str, float] = {}

    def waiting(self) -> Counter[str]:
        """Return the requests in line by tenant."""
        return self._line.waiting()

    def arrive(self, tenant: str) -> Arrival:
        """Let a request in that has just come. Raises RateLimited where too many of its tenant's wait or came."""
        self._shares.touch(tenant)
        self._check(self._requests, tenant, 1, "requests")
        return Arrival(self, tenant, self._limits.begin(tenant))

    def learn(self, tenant: str, body_bytes: int, uncached_tokens: int) -> None:
        """Note what a request cost that was answered."""
        before = self._uncached.get(tenant, _FIRST_GUESS)
        self._uncached[tenant] = before + _WEIGHT * (uncached_tokens / max(1, body_bytes) - before)

    def cost_tokens(self, tenant: str, body_bytes: int) -> int:
        """Return the uncached tokens that a body of a tenant should have, by its earlier ones."""
        return int(self._uncached.get(tenant, _FIRST_GUESS) * body_bytes)

    def _check(self, budget: Budget, tenant: str, amount: int, what: str) -> None:
        """Raise RateLimited unless a tenant may take ``amount``, saying whether it or others fill the room."""
        verdict = budget.verdict(tenant, amount)
        if verdict != "granted":
            raise self._refusal(tenant, what, own=verdict == "over_share")

    def _refusal(self, tenant: str, what: str, *, own: bool, code: str | None = None) -> RateLimited:
        retry_after_s = self._line.retry_after_s(tenant)
        again = f"send this one again after {ceil(retry_after_s)} s"
        message = f"There is no room for your request: too many {what} wait for an answer already; {again}."
        if own:
            message = f"Too many of your {what} wait for an answer already; {again}, or send fewer at once."
        return RateLimited(message, code=code, retry_after_s=retry_after_s)


class Arrival:
    """One request on its way in; leaving the ``with`` block frees what it holds and has not handed over."""

    def __init__(self, door: FrontDoor, tenant: str, allowance: Allowance) -> None:
        self.allowance = allowance
        self._handed_over = False
        self._door = door
        self._tenant = tenant
        self._waits = True
        self._place: Place | None = None
        self.body_bytes = 0
        door._requests.take(tenant, 1)

    def __enter__(self) -> Arrival:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.release()

    def grow(self, size_bytes: int) -> None:
        """Count bytes of the body, before they are read. Raises RateLimited where too many of its tenant's wait."""
        self._door._check(self._door._bytes, self._tenant, size_bytes, "bytes")
        self._door._bytes.take(self._tenant, size_bytes)
        self.body_bytes += size_bytes

    async def turn(self, choices: int, order: int = 0, *, flex: bool = False) -> None:
        """Wait for the turn of a request of ``choices``: for a place of as many, or of the tenant's share.

        Of a tenant's requests those of the lowest ``order`` go first. Raises RateLimited for a ``flex`` one where it
        would not leave half of the tenant's waiting room to its others.
        """
        room = self._door._requests
        if flex and not room.within(self._tenant, room.share(self._tenant) // 2):
            raise self._door._refusal(self._tenant, "requests", own=True, code="resource_unavailable")
        cost = max(choices, self._door.cost_tokens(self._tenant, self.body_bytes))
        self._place = await self._door._line.enter(self._tenant, choices, cost, order)
        self._stop_waiting()

    def hand_over(self) -> Place:
        """Return the place, which is the caller's from now on with the ``allowance``; all else is freed."""
        place, self._place = self._place, None
        self._handed_over = True
        assert place is not None, "a place comes with a turn"
        self.release()
        return place

    def release(self) -> None:
        """Free what was taken; harmless when that was done."""
        self._stop_waiting()
        if self.body_bytes:
            self._door._bytes.give_back(self._tenant, self.body_bytes)
            self.body_bytes = 0
        if self._place is not None:
            self._place.give_back()
            self._place = None
        if not self._handed_over:
            self.allowance.end(refused=True)

    def _stop_waiting(self) -> None:
        if self._waits:
            self._waits = False
            self._door._requests.give_back(self._tenant, 1)
