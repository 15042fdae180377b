"""Which requests may start: none whose context would push live sessions out of the pool, as long as it can wait.

A request that finds most of its prompt cached starts at once. Another one waits while what live sessions hold and its
own context are more than the pool, unless its tenant's sessions and it fit the tenant's share: so a flood makes its own
tenant wait. Nobody waits longer than ``wait_s``. Without this, in a pool that is too small, every return computes again
what the return before pushed out. Not thread-safe.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from router.protocol.samples import Histogram, Sample
from serve_app.sessions.sessions import Session, Sessions

SMALL_PART = 64
"""Needs below this part of the pool never wait: they are the turns of conversations that go on."""

_BUCKETS_S = (0.1, 1.0, 10.0, 60.0, 300.0, 1800.0)

AGING_SHARE = 0.1
"""The least to compute first, but nothing is overtaken by what comes later than ten times its own computing time."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    session: Session
    arrival_s: float
    needed_tokens: int
    cached_tokens: Callable[[], int]


class Admission:
    """One replica's, over a pool of so many tokens.

    ``pinned_tokens``: returns those that saves keep. ``shares``: weights of tenants, 1.0 for all others.
    """

    def __init__(
        self,
        sessions: Sessions,
        pool_tokens: int,
        *,
        pinned_tokens: Callable[[], int],
        clock: Callable[[], float],
        wait_s: float,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        self.shares: Mapping[str, float] = shares or {}
        self.wait_s = wait_s
        self._sessions = sessions
        self._pool_tokens = pool_tokens
        self._pinned_tokens = pinned_tokens
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}
        self._waits_s = Histogram(_BUCKETS_S)

    def waits(self, session: Session, needed_tokens: int, cached_tokens: Callable[[], int]) -> bool:
        """Return whether a session's request, which has to compute so many tokens, waits until ``admitted`` names it.

        Ask that at once: there may be room. ``cached_tokens``: returns those of its prompt that are cached by then.
        """
        if not self.wait_s or needed_tokens * SMALL_PART <= self._pool_tokens or 2 * needed_tokens <= session.tokens:
            return False
        session.waits = True
        self._waiting[session.running] = _Waiting(session, self._clock(), needed_tokens, cached_tokens)
        return True

    @property
    def room_tokens(self) -> int:
        """The tokens that saves leave to sessions."""
        return self._pool_tokens - self._pinned_tokens()

    def waited_s(self, session: Session) -> float:
        """Return how long a session that waits has done so."""
        return self._clock() - self._waiting[session.running].arrival_s

    def forget(self, request_id: str) -> None:
        """Wait no more for a request that is over."""
        self._waiting.pop(request_id, None)

    def admitted(self) -> list[str]:
        """Return the requests that may start by now; they wait no more."""
        if not self._waiting:
            return []
        room, now_s, pace = self.room_tokens, self._clock(), self._sessions.pace()
        idle_s = now_s - self._sessions.busy_until_s()
        held: Counter[str] = Counter()
        for session in self._sessions.live():
            held[session.tenant] += session.own_tokens
        tenants = held.keys() | {waiting.session.tenant for waiting in self._waiting.values()}
        weights = {tenant: self.shares.get(tenant, 1.0) for tenant in tenants}
        total = sum(weights.values())
        aging = AGING_SHARE * pace
        line = sorted(self._waiting.items(), key=lambda item: item[1].arrival_s + item[1].needed_tokens / aging)
        started: list[str] = []
        for request_id, waiting in sorted(
            line, key=lambda item: held[item[1].session.tenant] / weights[item[1].session.tenant]
        ):
            session = waiting.session
            if session.turns == 1:  # another request may have computed the same prompt meanwhile
                session.shared_tokens = max(session.shared_tokens, waiting.cached_tokens())
            tenant, tokens = session.tenant, session.own_tokens
            fits = held.total() + tokens <= room or held[tenant] + tokens <= room * weights[tenant] / total
            if fits or not held or idle_s >= tokens / pace or waiting.arrival_s + self.wait_s <= now_s:
                idle_s = 0.0
                started.append(request_id)
                self._waits_s.observe(now_s - waiting.arrival_s)
                held[tenant] += tokens
                session.waits = False
                del self._waiting[request_id]
        return started

    def samples(self) -> Iterator[Sample]:
        """Yield how long requests waited."""
        return self._waits_s.samples("warmpath_session_wait_seconds")

    def look_again_s(self) -> float:
        """Return the time of the clock at which more may start though nothing ends; infinite without any waiting."""
        if not self._waiting:
            return math.inf
        pace, waiting = self._sessions.pace(), self._waiting.values()
        ends_s = (self._sessions.live_until_s(session, pace) for session in self._sessions.live())
        idle_s = self._sessions.busy_until_s() + min(one.session.own_tokens for one in waiting) / pace
        return min([min(one.arrival_s for one in waiting) + self.wait_s, idle_s, *ends_s])
