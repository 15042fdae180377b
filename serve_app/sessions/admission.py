"""Admission of requests: a request waits if its context would evict live sessions from the pool.

A request with most of its prompt cached starts at once. Another one waits while live sessions and its own context
exceed the pool, unless its tenant's sessions and it fit the tenant's share, so that a flood delays only its own tenant.
No request waits longer than ``wait_s``. Without admission, in a pool that is too small, every returning session
recomputes the blocks that the previous one evicted. Not thread-safe.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from router.protocol.samples import WAIT_BUCKETS_S, Histogram, Sample
from serve_app.fairness.shares import Shares
from serve_app.sessions.sessions import Session, Sessions

SMALL_PART = 64
"""Requests that need less than this part of the pool never wait. They are the turns of active conversations."""

AGING_SHARE = 0.1
"""Shortest prefill first, but no request is overtaken by one that arrives after ten times its own computing time."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    session: Session
    arrival_s: float
    needed_tokens: int
    cached_tokens: Callable[[], int]


@dataclass(eq=False)
class Admission:
    """One replica's admission, for a pool of ``pool_tokens``.

    ``pinned_tokens``: returns the tokens kept by saves.
    """

    sessions: Sessions
    pool_tokens: int
    pinned_tokens: Callable[[], int]
    clock: Callable[[], float]
    wait_s: float
    shares: Shares = field(default_factory=lambda: Shares({}))
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _waits_s: Histogram = field(default_factory=lambda: Histogram(WAIT_BUCKETS_S))

    def waits(self, session: Session, needed_tokens: int, cached_tokens: Callable[[], int]) -> bool:
        """Return whether a session's request waits until ``admitted`` returns it. ``needed_tokens``: to compute.

        Call ``admitted`` at once, because there may be space. ``cached_tokens``: returns its prompt's cached tokens.
        """
        if not self.wait_s or needed_tokens * SMALL_PART <= self.pool_tokens or 2 * needed_tokens <= session.tokens:
            return False
        self.sessions.set_waiting(session, waits=True)
        self._waiting[session.running] = _Waiting(session, self.clock(), needed_tokens, cached_tokens)
        return True

    @property
    def room_tokens(self) -> int:
        """The tokens that saves leave for sessions."""
        return self.pool_tokens - self.pinned_tokens()

    def waited_s(self, session: Session) -> float:
        """Return the time that a waiting session has waited."""
        return self.clock() - self._waiting[session.running].arrival_s

    def forget(self, request_id: str) -> None:
        """Remove a request that has ended."""
        self._waiting.pop(request_id, None)

    def admitted(self) -> list[str]:
        """Return the requests that may start now, and stop waiting for them."""
        if not self._waiting:
            return []
        room, now_s, pace = self.room_tokens, self.clock(), self.sessions.pace()
        idle_s = now_s - self.sessions.busy_until_s()
        held = self.sessions.held()
        held_tokens = held.total()
        tenants = held.keys() | {waiting.session.tenant for waiting in self._waiting.values()}
        share = {tenant: room * self.shares.fraction(tenant, among=tenants) for tenant in tenants}
        aging = AGING_SHARE * pace
        line = sorted(self._waiting.items(), key=lambda item: item[1].arrival_s + item[1].needed_tokens / aging)
        started: list[str] = []
        for request_id, waiting in sorted(
            line, key=lambda item: held[item[1].session.tenant] / self.shares.weight(item[1].session.tenant)
        ):
            session = waiting.session
            if session.turns == 1:  # another request may have computed the same prompt
                session.shared_tokens = max(session.shared_tokens, waiting.cached_tokens())
            tenant, tokens = session.tenant, session.own_tokens
            # Not ``verdict``: within its share it also takes the space of others' sessions that wait for their return.
            fits = held_tokens + tokens <= room or held[tenant] + tokens <= share[tenant]
            if fits or not held or idle_s >= tokens / pace or waiting.arrival_s + self.wait_s <= now_s:
                idle_s = 0.0
                started.append(request_id)
                self._waits_s.observe(now_s - waiting.arrival_s)
                held[tenant] += tokens
                held_tokens += tokens
                self.sessions.set_waiting(session, waits=False)
                del self._waiting[request_id]
        return started

    def samples(self) -> Iterator[Sample]:
        """Yield the histogram of waiting times."""
        return self._waits_s.samples("warmpath_wait_seconds", (("place", "session"),))

    def look_again_s(self) -> float:
        """Return the time at which more requests may start even if none ends; infinite without waiting requests."""
        if not self._waiting:
            return math.inf
        pace, waiting = self.sessions.pace(), self._waiting.values()
        idle_s = self.sessions.busy_until_s() + min(one.session.own_tokens for one in waiting) / pace
        return min([min(one.arrival_s for one in waiting) + self.wait_s, idle_s, self.sessions.next_end_s()])
