"""The limits of each tenant (requests per second, concurrent requests, tokens per minute) and their remaining amounts.

What a tenant has at once is counted over all ingresses (``Levels``). Each ingress counts its part of a rate. The APIs
write the headers. One asyncio loop uses it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from router.protocol.samples import Mean
from serve_app.config.tenants import TenantConfig
from serve_app.errors import LimitReason, RateLimited
from serve_app.fairness.levels import Levels

_WEIGHT = 0.2
"""The weight of the newest request in the mean duration."""
_LEAST = 1e-6
"""Smaller amounts count as zero, because sums of floats are not exact."""


class TokenBucket:
    """A bucket of size ``most`` that refills by ``per_s``. In T seconds it grants at most ``most`` + ``per_s`` x T.

    A full bucket also grants an amount above ``most``, and is then in debt.
    """

    __slots__ = ("_level", "_seen_s", "most", "per_s")

    def __init__(self, most: float, per_s: float, now_s: float) -> None:
        self.most = self._level = most
        self.per_s = per_s
        self._seen_s = now_s

    def level(self, now_s: float) -> float:
        """Return the current level, which is below 0 in debt."""
        self._level = min(self.most, self._level + self.per_s * max(0.0, now_s - self._seen_s))
        self._seen_s = now_s
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return the wait until the bucket can grant ``amount``; 0.0: it can now."""
        missing = min(amount, self.most) - self.level(now_s)
        return missing / self.per_s if missing > _LEAST else 0.0

    def take(self, amount: float, now_s: float) -> None:
        """Take ``amount`` out. A negative amount is put back."""
        self._level = min(self.most, self.level(now_s) - amount)

    def resize(self, most: float, per_s: float, now_s: float) -> None:
        """Change the size. Amounts already taken stay taken."""
        self._level = most - (self.most - self.level(now_s))
        self.most, self.per_s = most, per_s


@dataclass(frozen=True, slots=True)
class Left:
    """``remaining`` of a ``limit``, estimated over all ingresses. ``reset_s``: until the whole limit is available."""

    limit: int
    remaining: int
    reset_s: float

    def reason(self, name: str) -> LimitReason:
        """Return the reason of a refusal by this limit. ``name``: of its setting."""
        return LimitReason("ingress", name, self.limit - self.remaining, self.limit)


@dataclass(frozen=True, slots=True)
class LimitsLeft:
    """A tenant's remaining limits; None: no such limit."""

    requests: Left | None
    tokens: Left | None


@dataclass(slots=True, eq=False)
class _Tenant:
    """One tenant's counts in one of ``ingresses``. ``mean_s``: the duration of its requests."""

    config: TenantConfig
    ingresses: int
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    running: int = 0
    mean_s: Mean = field(default_factory=lambda: Mean(_WEIGHT, 1.0, begun=True))

    def requests_left(self, now_s: float) -> Left | None:
        """Return the remaining requests of this second, None without a limit."""
        if self.requests is None or self.config.requests_per_second is None:
            return None
        here = int(max(0.0, self.requests.level(now_s)) + _LEAST)  # whole requests only
        return _left(self.requests, max(1, int(self.config.requests_per_second)), here * self.ingresses, now_s)

    def tokens_left(self, now_s: float) -> Left | None:
        """Return the remaining tokens of this minute, None without a limit."""
        if self.tokens is None or self.config.tokens_per_minute is None:
            return None
        everywhere = int(max(0.0, self.tokens.level(now_s)) * self.ingresses + _LEAST)
        return _left(self.tokens, self.config.tokens_per_minute, everywhere, now_s)

    def refuse(self, now_s: float) -> None:
        """Raise RateLimited if a new request exceeds a limit now."""
        most = self.config.concurrent_requests
        if most is not None and self.running >= most:
            raise self.too_many(most, self.running)
        left = self.requests_left(now_s)
        if left is not None and self.requests is not None and (wait_s := self.requests.wait_s(1, now_s)):
            raise _refusal(left.reason("requests_per_second"), "requests a second", wait_s)

    def too_many(self, most: int, used: int) -> RateLimited:
        """Return the refusal of a request while as many as allowed, ``used``, are under way."""
        wait_s = min(60.0, max(1.0, self.mean_s.value / most))
        return limit_reached("concurrent_requests", used, most, "requests at once", wait_s)


class TenantLimits:
    """The limits of all tenants in one of ``ingresses``. ``levels``: this ingress' home of what is counted at once.

    ``checks``: limits that need a request's prompts.
    """

    def __init__(
        self,
        tenants: Sequence[TenantConfig] = (),
        ingresses: int = 1,
        *,
        levels: Levels | None = None,
        checks: Sequence[Check] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ingresses = ingresses
        self.levels = levels or Levels()
        self.checks = tuple(checks)
        self.levels.counts["concurrent_requests"] = self._requests_here
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self.configure(tenants)

    def configure(self, tenants: Sequence[TenantConfig]) -> None:
        """Use new limits from now on. Requests in progress continue, and still count."""
        now_s, parts = self._clock(), self._ingresses
        before, self._tenants = self._tenants, {}
        for config in tenants:
            tenant = self._tenants[config.name] = before.get(config.name) or _Tenant(config, parts)
            tenant.config = config
            rate, tokens = config.requests_per_second, config.tokens_per_minute
            requests, tokens_left = tenant.requests, tenant.tokens
            tenant.requests = None if rate is None else _sized(requests, max(1.0, rate / parts), rate / parts, now_s)
            tenant.tokens = None if tokens is None else _sized(tokens_left, tokens / parts, tokens / 60 / parts, now_s)

    def left(self, tenant: str) -> LimitsLeft | None:
        """Return a tenant's remaining limits, or None if its requests and tokens have no limit."""
        state, now_s = self._tenants.get(tenant), self._clock()
        if state is None:
            return None
        left = LimitsLeft(state.requests_left(now_s), state.tokens_left(now_s))
        return left if left.requests or left.tokens else None

    def refuse(self, tenant: str) -> None:
        """Raise RateLimited if a new request exceeds a limit now."""
        if (state := self._tenants.get(tenant)) is not None:
            state.refuse(self._clock())

    def half_used(self, tenant: str) -> bool:
        """Return whether a tenant has used half of a limit: what can wait leaves the rest to its other requests."""
        state = self._tenants.get(tenant)
        if state is None:
            return False
        most, left = state.config.concurrent_requests, self.left(tenant)
        lefts = () if left is None else (left.requests, left.tokens)
        return (most is not None and state.running * 2 >= most) or any(
            one is not None and one.remaining * 2 < one.limit for one in lefts
        )

    def begin(self, tenant: str) -> Allowance:
        """Count a new request. Raises RateLimited, without counting it, if it exceeds a limit."""
        state = self._tenants.get(tenant)
        if state is not None:
            state.refuse(self._clock())
            if state.requests is not None:
                state.requests.take(1, self._clock())
        return Allowance(state, self._clock, self)

    def _requests_here(self, tenant: str, _: object) -> tuple[int, bool]:
        state = self._tenants.get(tenant)
        return (0 if state is None else state.running), False


class Allowance:
    """The part of its tenant's limits that one request holds until its ``end``."""

    __slots__ = (
        "_begun_s",
        "_clock",
        "_limits",
        "_place",
        "_reserved",
        "_tenant",
        "_used",
        "at_end",
        "model",
        "output_tokens",
        "prompt_tokens",
    )

    def __init__(self, tenant: _Tenant | None, clock: Callable[[], float], limits: TenantLimits) -> None:
        self._tenant = tenant
        self._limits = limits
        self._place = 0
        self.at_end: list[Callable[[], object]] = []
        """Called at the end, for what other limits count."""
        self.model = ""
        self.prompt_tokens = self.output_tokens = 0
        self._clock = clock
        self._begun_s = clock()
        self._reserved = self._used = 0
        if tenant is not None:
            tenant.running += 1
            self._place = tenant.running

    async def agree(self) -> None:
        """Raise RateLimited if the tenant has too many requests at once in all ingresses together."""
        tenant = self._tenant
        if tenant is None or (most := tenant.config.concurrent_requests) is None:
            return
        total = await self._limits.levels.total(tenant.config.name, "concurrent_requests", most, self._place)
        if total > most:
            if tenant.requests is not None:
                tenant.requests.take(-1, self._clock())
            raise tenant.too_many(most, min(most, total - 1))

    @property
    def config(self) -> TenantConfig | None:
        """The tenant's settings, None without any."""
        return None if self._tenant is None else self._tenant.config

    async def prepared(self, prompts: Sequence[Any]) -> None:
        """Raise RateLimited if a limit refuses the request for its ``prompts``, the first generation of each."""
        for check in self._limits.checks:
            await check(self, prompts)

    def reserve(self, prompt_tokens: int, output_tokens: int, model: str = "") -> None:
        """Reserve the prompt, including cached tokens, and the longest output. Raises RateLimited and takes nothing."""
        self.model, self.prompt_tokens, self.output_tokens = model, prompt_tokens, output_tokens
        tenant = self._tenant
        if tenant is None or tenant.tokens is None:
            return
        now_s, tokens = self._clock(), prompt_tokens + output_tokens
        left, wait_s = tenant.tokens_left(now_s), tenant.tokens.wait_s(tokens, now_s)
        if left is not None and tokens > left.limit:
            raise RateLimited(
                f"This request asks for {tokens} tokens, {prompt_tokens} of prompt and {output_tokens} of answer; your "
                f"limit is {left.limit} a minute, so it can never be answered: shorten the prompt or lower max_tokens.",
                reason=left.reason("tokens_per_minute"),
            )
        if left is not None and wait_s:
            unit = f"tokens a minute, and this request asks for {tokens}"
            raise _refusal(left.reason("tokens_per_minute"), unit, wait_s)
        tenant.tokens.take(tokens, now_s)
        self._reserved, self._used = tokens, prompt_tokens

    def generated(self, tokens: int) -> None:
        """Count tokens of the answer."""
        self._used += tokens

    def end(self, *, refused: bool = False) -> None:
        """Return unused reserved tokens, or all if the request was ``refused``. A repeated call has no effect."""
        tenant, self._tenant = self._tenant, None
        while self.at_end:
            self.at_end.pop()()
        if tenant is None:
            return
        tenant.running -= 1
        now_s = self._clock()
        if not refused:
            tenant.mean_s.observe(now_s - self._begun_s)
        if tenant.tokens is not None and self._reserved:
            tenant.tokens.take((0 if refused else self._used) - self._reserved, now_s)


Check = Callable[[Allowance, Sequence[Any]], Awaitable[None]]
"""A limit that needs the prompts of a request. Raises RateLimited."""


def _sized(bucket: TokenBucket | None, most: float, per_s: float, now_s: float) -> TokenBucket:
    if bucket is None:
        return TokenBucket(most, per_s, now_s)
    bucket.resize(most, per_s, now_s)
    return bucket


def _left(bucket: TokenBucket, limit: int, everywhere: int, now_s: float) -> Left:
    return Left(limit, min(limit, everywhere), bucket.wait_s(bucket.most, now_s))


def limit_reached(limit: str, used: int, most: int, unit: str, wait_s: float) -> RateLimited:
    """Return the refusal of a request by a limit, after ``used`` of ``most``."""
    return _refusal(LimitReason("ingress", limit, used, most), unit, wait_s)


def _refusal(reason: LimitReason, unit: str, wait_s: float) -> RateLimited:
    used = f"{reason.used} of {reason.most} {unit}"
    sentence = f"Your limit {reason.limit} is reached ({used}); send the request again after {max(1, ceil(wait_s))} s."
    return RateLimited(sentence, retry_after_s=wait_s, reason=reason)
