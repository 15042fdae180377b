"""Admission of requests before any expensive work: limits by tenant on waiting requests, then a queue.

It has an ingress's part of the replicas' places. One asyncio loop uses it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil, inf
from types import TracebackType
from typing import Any

from router.protocol.samples import Mean, Sample
from serve_app.errors import Overloaded, RateLimited
from serve_app.fairness.queue import Place, WaitingLine
from serve_app.fairness.rate_limits import Allowance, TenantLimits
from serve_app.fairness.shares import Budget, Shares

ALONE_AFTER_S = 10.0
BESIDE_PART = 16
"""Work that can wait has one place in this many while others are answered, and at least one."""
_FIRST_GUESS = 0.25
"""Uncached tokens per byte of body, for a new tenant."""
_WEIGHT = 0.2
"""The weight of the newest request in a tenant's average."""
ASKED_S = 5.0
"""For this long a request asks for a first replica, even if it was refused meanwhile, or answered elsewhere: figures
for the autoscaler leave once a second."""
START_AGAIN_S = 10.0
"""When to send a request again that could not wait for a model's first replica."""


class FrontDoor:
    """Admits requests. ``places``: the maximum of concurrent generations; ``max_waiting``: of queued requests;
    ``max_bytes``: of their bodies. ``Budget`` divides all three among tenants.
    ``limits``: rate limits of tenants, even with free capacity; default: none. ``starting``: there is no replica yet.
    """

    def __init__(
        self,
        shares: Shares,
        *,
        places: Callable[[], int],
        max_waiting: int,
        max_bytes: int,
        limits: TenantLimits | None = None,
        starting: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._starting = starting
        self._clock = clock
        self._others_s = -inf
        """When a request that cannot wait came last."""
        self._asked_s = -inf
        """When a request that needs a replica came last."""
        self._beside = 0
        self._limits = limits or TenantLimits()
        self.max_waiting = max_waiting
        self.max_bytes = max_bytes
        self._shares = shares
        self._requests = Budget(shares, lambda: self.max_waiting, "max_queued_requests")
        self._bytes = Budget(shares, lambda: self.max_bytes, "max_body_bytes")
        self.places = places
        self._line = WaitingLine(Budget(shares, places, "max_num_seqs"))
        self._uncached = defaultdict[str, Mean](lambda: Mean(_WEIGHT, _FIRST_GUESS, begun=True))

    def configure(self, max_waiting: int, max_bytes: int) -> None:
        """Use other bounds."""
        self.max_waiting, self.max_bytes = max_waiting, max_bytes

    def waiting(self) -> Counter[str]:
        """Return the number of queued requests by tenant."""
        return self._line.waiting()

    def samples(self) -> Iterator[Sample]:
        """Yield the number of queued requests by tenant, and the histogram of their waiting times."""
        for tenant, requests in self.waiting().items():
            yield "warmpath_requests_waiting", (("tenant", tenant),), float(requests)
        yield from self._line.waits.samples("warmpath_wait_seconds", (("place", "ingress"),))

    def outlook(self, tenant: str) -> dict[str, Any]:
        """Return why a tenant's request would be refused if it arrived now, and why it would wait; None: it would not.

        Nothing is counted.
        """
        try:
            self._limits.refuse(tenant)
            self._check(self._requests, tenant, 1)
        except (RateLimited, Overloaded) as error:
            return {"refusal": error.shown_reason["reason"], "wait": None}
        reason = self._line.reason(tenant)
        return {"refusal": None, "wait": None if reason is None else reason.shown()}

    def is_quiet(self, tenant: str, asking: int) -> bool:
        """Return whether work that can wait may start now, beside ``asking`` requests of it, here or on their way.

        Nobody waits, and a quarter of the places stays free. While others are answered, or came some seconds ago, it
        has few, because each slows their tokens down. The tenant keeps half of its own limits for its other requests.
        """
        places, yielding = self.places(), self._line.yielding
        others = self._line.running(None) - yielding
        running = others + max(asking, yielding)
        alone = not others and self._clock() - self._others_s > ALONE_AFTER_S
        most = places * 3 // 4
        if not alone:
            most = min(most, others + max(1, places // BESIDE_PART))
        return not self._line.waiting() and running < max(1, most) and not self._limits.half_used(tenant)

    def load(self, tenant: str | None) -> int:
        """Return the waiting requests and running generations of a tenant, None: of all."""
        return self._requests.held(tenant) + self._line.running(tenant)

    def taken(self) -> tuple[int, int, int]:
        """Return what all take now: of the queued requests, of their bodies' bytes, and of the places.

        All are 0 once nobody is here; anything else would then be lost for ever.
        """
        return self._requests.held(None), self._bytes.held(None), self._line.running(None)

    @contextmanager
    def needing_a_replica(self) -> Iterator[None]:
        """Count work that takes no place here, such as warming a prompt, among what asks for a first replica."""
        self._beside += 1
        try:
            yield
        finally:
            self._beside -= 1
            self.note_asking()

    def asking(self) -> int:
        """Return the number of requests for a first replica: at least 1 for a while after one has come."""
        here = self.waiting().total() + self._line.running(None) + self._beside
        return here or int(self._clock() - self._asked_s < ASKED_S)

    def arrive(self, tenant: str) -> Arrival:
        """Register a new request. Raises RateLimited if too many of its tenant's requests wait or have arrived."""
        self._shares.touch(tenant)
        self._check(self._requests, tenant, 1)
        allowance = self._limits.begin(tenant)
        self._requests.take(tenant, 1)
        return Arrival(self, tenant, allowance)

    def learn(self, tenant: str, body_bytes: int, uncached_tokens: int) -> None:
        """Record the cost of an answered request."""
        self._uncached[tenant].observe(uncached_tokens / max(1, body_bytes))

    def cost_tokens(self, tenant: str, body_bytes: int) -> int:
        """Return the estimated uncached tokens of a tenant's body, from its earlier requests."""
        return int(self._uncached[tenant].value * body_bytes)

    # What an ``Arrival`` does here.

    def let_in(self, tenant: str, requests: int, body_bytes: int) -> None:
        """Count what waits here from now on. Raises RateLimited, or Overloaded while no replica has started."""
        if requests:
            self._shares.touch(tenant)
        more = [
            (budget, amount) for budget, amount in ((self._requests, requests), (self._bytes, body_bytes)) if amount
        ]
        for budget, amount in more:
            self._check(budget, tenant, amount)
        for budget, amount in more:
            budget.take(tenant, amount)

    def let_out(self, tenant: str, requests: int, body_bytes: int) -> None:
        """Count what waits here no longer."""
        for budget, amount in ((self._requests, requests), (self._bytes, body_bytes)):
            if amount:
                budget.give_back(tenant, amount)

    async def turn(self, arrival: Arrival, choices: int, order: int, *, flex: bool) -> Place:
        """Wait for places. Raises RateLimited: see ``Arrival.turn``."""
        tenant, room = arrival.tenant, self._requests
        if not flex:
            self._others_s = self._clock()
        await arrival.allowance.agree()
        if flex and not room.claim(tenant, room.share(tenant) // 2).within:
            raise self._refusal(room, tenant, own=True, code="resource_unavailable")
        cost = max(choices, self.cost_tokens(tenant, arrival.body_bytes))
        return await self._line.enter(tenant, choices, cost, order)

    def note_asking(self) -> None:
        """Note that a request needs a replica now."""
        self._asked_s = self._clock()

    def _check(self, budget: Budget, tenant: str, amount: int) -> None:
        """Raise RateLimited, or Overloaded while no replica has started, unless a tenant may take ``amount``.

        The message blames the tenant or the total load.
        """
        answer = budget.verdict(tenant, amount)
        if answer != "granted":
            raise self._refusal(budget, tenant, own=answer == "over_share")

    def _refusal(self, budget: Budget, tenant: str, *, own: bool, code: str | None = None) -> RateLimited | Overloaded:
        if self._starting():
            message = "The model's first replica is starting, and no more requests can wait for it; send this one again"
            again_s, reason = START_AGAIN_S, budget.reason(tenant)
            message = f"{message} after {again_s:.0f} s."
            return Overloaded(message, code="model_starting", retry_after_s=again_s, reason=reason)
        retry_after_s, unit = self._line.retry_after_s(tenant), "bytes" if budget is self._bytes else "requests"
        again = f"send this one again after {ceil(retry_after_s)} s"
        message = f"There is no capacity for your request: too many {unit} wait for an answer already; {again}."
        if own:
            message = f"Too many of your {unit} wait for an answer already; {again}, or send fewer at once."
        return RateLimited(message, code=code, retry_after_s=retry_after_s, reason=budget.reason(tenant))


class Arrival:
    """One request during admission. Leaving the ``with`` block frees all that it holds and has not handed over."""

    def __init__(self, door: FrontDoor, tenant: str, allowance: Allowance) -> None:
        self.allowance = allowance
        self.tenant = tenant
        self.body_bytes = 0
        self._door = door
        self._instead_of: FrontDoor | None = None
        self._waits = 1
        """Whether it is counted among the requests that wait there."""
        self._place: Place | None = None
        self._handed_over = False

    def __enter__(self) -> Arrival:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.release()

    def grow(self, size_bytes: int) -> None:
        """Count bytes of the body before they are read. Raises RateLimited if too many of its tenant's bytes wait."""
        self._door.let_in(self.tenant, 0, size_bytes)
        self.body_bytes += size_bytes

    def move(self, door: FrontDoor, instead_of: FrontDoor | None = None) -> None:
        """Wait at another door from now on. Raises the errors of ``FrontDoor.arrive``, and stays here then.

        ``instead_of``: that of a model that is to start for this request, though another one answers it.
        """
        self._instead_of = instead_of
        if door is not self._door:
            door.let_in(self.tenant, self._waits, self.body_bytes)
            self._door.let_out(self.tenant, self._waits, self.body_bytes)
            self._door = door

    async def turn(self, choices: int, order: int = 0, *, flex: bool = False) -> None:
        """Wait for a place for ``choices`` generations, or for the tenant's whole share if that is less.

        A tenant's requests with the lowest ``order`` are first. Raises RateLimited if too many of the tenant's requests
        are under way at all ingresses, and for a ``flex`` request that would not leave half of the tenant's queue
        capacity to its other requests.
        """
        self._place = await self._door.turn(self, choices, order, flex=flex)
        self._stop_waiting()

    def hand_over(self) -> Place:
        """Return the place. The caller then owns it and the ``allowance``; all else is freed."""
        place, self._place = self._place, None
        self._handed_over = True
        assert place is not None, "a turn grants a place"
        for door in (self._door, self._instead_of):  # no limit refuses the request from here on
            if door is not None:
                door.note_asking()
        self.release()
        return place

    def release(self) -> None:
        """Free everything that this request holds. A repeated call has no effect."""
        self._stop_waiting()
        self._door.let_out(self.tenant, 0, self.body_bytes)
        self.body_bytes = 0
        if self._place is not None:
            self._place.give_back()
            self._place = None
        if not self._handed_over:
            self.allowance.end(refused=True)

    def _stop_waiting(self) -> None:
        self._door.let_out(self.tenant, self._waits, 0)
        self._waits = 0
