"""The limit on a tenant's live sessions, over all ingresses.

Each ingress knows the sessions of the requests that it answers, only of tenants with the limit. It asks the others
about a prompt that continues none of them; one that knows the session gives it up.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from serve_app.fairness.levels import Levels
from serve_app.fairness.rate_limits import Allowance, TenantLimits, limit_reached
from serve_app.sessions.sessions import Sessions

NAME = "concurrent_sessions"
MOST = 10_000
"""The largest limit, because an ingress compares a prompt with each of its tenant's sessions."""
EXPIRE_EVERY_S = 60.0


class LimitedPrompt(Protocol):
    """A prompt as its session knows it. ``block_hashes``: of its full blocks; ``session``: the client's word for it."""

    request_id: str
    block_hashes: bytes
    token_ids: Sequence[int]
    session: str


class _Chain(NamedTuple):
    hashes: bytes
    name: str


class SessionLimit:
    """Adds the limit to an ingress' ``limits``. ``tokens_per_s``: a replica's prefill rate, 0.0 while unknown."""

    def __init__(
        self,
        limits: TenantLimits,
        block_size: int,
        tokens_per_s: Callable[[], float] = lambda: 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._levels: Levels = limits.levels
        self._sessions = Sessions(block_size, clock, tokens_per_s, most=MOST)
        self._clock = clock
        self._expired_s = clock()
        self._levels.counts[NAME] = self._count
        limits.checks.append(self._begin)

    async def _begin(self, allowance: Allowance, prompts: Sequence[LimitedPrompt]) -> None:
        config = allowance.config
        if config is None or config.concurrent_sessions is None:
            return
        if self._clock() >= self._expired_s + EXPIRE_EVERY_S:
            self._expired_s = self._clock()
            self._sessions.expire()
        tenant, most, sessions = config.name, config.concurrent_sessions, self._sessions
        for prompt in prompts:
            before, chain = sessions.live(tenant), _Chain(prompt.block_hashes, prompt.session)
            sessions.begin(prompt.request_id, tenant, chain.hashes, len(prompt.token_ids), 0, chain.name)
            allowance.at_end.append(partial(sessions.end, prompt.request_id))
            live = sessions.live(tenant)
            if live == before:  # it continues a live session
                continue
            total = await self._levels.total(tenant, NAME, most, live, chain)
            if total > most:
                sessions.drop(prompt.request_id)
                wait_s = min(60.0, max(1.0, sessions.next_end_s(tenant) - self._clock()))
                raise limit_reached(NAME, min(most, total - 1), most, "sessions", wait_s)

    def _count(self, tenant: str, what: _Chain | None) -> tuple[int, bool]:
        moved = what is not None and self._sessions.leave(tenant, what.hashes, what.name)
        return self._sessions.live(tenant), moved
