"""The sessions of one replica, by tenant: the part of the pool that each holds, and the time until it returns.

A request that begins with nine tenths of an earlier prompt continues its session, unless the client names another
session. Clients change the end of earlier prompts, for example reminders for one turn. A session is live while its
answer runs. After that it is live for the time in which nine of ten of its tenant's sessions returned, if its context
is worth that. The memory is bounded by tenant. Not thread-safe.

``SessionLimit`` is a tenant's limit on live sessions over all ingresses. Each ingress knows the sessions of its
requests, only of tenants with the limit. It asks the others about a prompt that continues none of them; one that knows
the session gives it up.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Literal, NamedTuple, Protocol

from router.protocol.block_hash import HASH_BYTES
from router.protocol.samples import Histogram, Sample, faded
from serve_app.fairness.levels import Levels
from serve_app.fairness.rate_limits import Allowance, limit_reached

MOST_SESSIONS = 256
"""The maximum for one tenant in a replica."""

FIRST_HOLD_S, LEAST_HOLD_S, MOST_HOLD_S = 120.0, 10.0, 150.0
"""The time that a session is live after its answer, without measured returns, and the bounds with measured returns."""

WORTH = 4.0
"""The longest hold of a context, in multiples of its own computing time, times the share of its tenant's sessions that
return. A longer hold would cost the waiting requests more than it saves."""

DEFAULT_PACE = 20_000.0
"""Tokens a second, before a replica has measured its own rate."""

MOST_GENERATIONS = 4
"""Sessions that began each other and close together; later ones are forgotten in time."""

RETURNS = 256
"""The number of a tenant's last pauses that are remembered."""

SessionState = Literal["running", "paused", "waiting", "left"]

_JOB_BUCKETS_S = (10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0)


@dataclass(slots=True, eq=False)
class Session:
    """One chain of requests. ``tokens``: of its context; ``shared_tokens``: of those, cached before it began.

    ``marks``: (offset in the chain, hash) of some blocks in the last tenth of its last prompt, the longest prefix
    first; ``name``: given by the client; ``gone``: it has not returned within the longest hold; ``closing``: its
    client closed it while its request runs; ``left``: it is no longer live, however long others' pauses turn out to be.
    ``system_tokens``: of its system prompt, which others may share. ``parent``: the name of the session that began it;
    ``expected_tokens``: of the answer that runs, as the client guesses. ``served_tokens``: computed for it, as of
    ``served_s``.
    """

    tenant: str
    name: str
    shared_tokens: int
    began_s: float
    used_s: float
    tokens: int = 0
    marks: tuple[tuple[int, bytes], ...] = ()
    turns: int = 0
    running: str = ""
    waits: bool = False
    gone: bool = False
    closing: bool = False
    left: bool = False
    system_tokens: int = 0
    parent: str = ""
    expected_tokens: int = 0
    served_tokens: float = 0.0
    served_s: float = 0.0

    def served(self, now_s: float) -> float:
        """Return the tokens that were computed for it; older ones count less."""
        return faded(self.served_tokens, self.served_s, now_s)

    def serve(self, tokens: int, now_s: float) -> None:
        """Count tokens that are computed for it."""
        self.served_tokens, self.served_s = self.served(now_s) + tokens, now_s

    @property
    def own_tokens(self) -> int:
        """The tokens of its context, with those of the answer to come, that were not cached when it began."""
        return max(0, self.tokens + self.expected_tokens - self.shared_tokens)

    def common_blocks(self, chain: bytes, name: str) -> int:
        """Return the number of leading blocks that a chain shares with the last prompt, or 0 for another session."""
        if self.running or (name and self.name and name != self.name):
            return 0
        return next((at // HASH_BYTES + 1 for at, block_hash in self.marks if chain.startswith(block_hash, at)), 0)

    def mark(self, chain: bytes) -> None:
        """Record a prompt's chain as the last one."""
        blocks = len(chain) // HASH_BYTES
        before = [1, *(1 + (1 << power) for power in range(blocks.bit_length()))]
        starts = [(blocks - back) * HASH_BYTES for back in before if back <= min(blocks, 1 + blocks // 10)]
        self.marks = tuple((at, chain[at : at + HASH_BYTES]) for at in starts)


@dataclass(slots=True)
class _Tenant:
    sessions: list[Session] = field(default_factory=list)
    """Least recently used first."""
    pauses_s: deque[float] = field(default_factory=lambda: deque(maxlen=RETURNS))
    """Infinite for sessions that did not return."""
    hold_s: float = FIRST_HOLD_S
    worth: float = WORTH
    live: dict[Session, tuple[float, int]] = field(default_factory=dict)
    """The live sessions: until when, and the tokens that ``live_tokens`` counts for each."""
    live_tokens: int = 0
    ends: list[tuple[float, int, Session]] = field(default_factory=list)
    """A heap of the ends of paused sessions, with outdated ones."""
    moved: bool = False
    """Whether ``hold_s`` or ``worth`` has changed since the ends were computed."""

    def find(self, chain: bytes, name: str) -> tuple[int, Session | None]:
        """Return the session that a prompt continues, None for a new one, and the number of their common blocks."""
        # One comparison for each session excludes nearly all of them.
        near = [one for one in self.sessions for at, block_hash in one.marks[-1:] if chain.startswith(block_hash, at)]
        matches = [(other.common_blocks(chain, name), other) for other in near]
        common, session = max(matches, key=lambda pair: pair[0], default=(0, None))
        return common, session if common else None

    def drop(self, session: Session) -> None:
        _, tokens = self.live.pop(session, (0.0, 0))
        self.live_tokens -= tokens

    def next_end_s(self) -> float:
        while self.ends:
            until_s, _, session = self.ends[0]
            if self.live.get(session, (inf, 0))[0] == until_s:
                return until_s
            heappop(self.ends)
        return inf

    def gone(self, session: Session) -> None:
        if not session.gone:
            session.gone = True
            self.paused(inf)

    def returned(self, session: Session, now_s: float) -> None:
        if session.gone and inf in self.pauses_s:
            self.pauses_s.remove(inf)
        session.gone = False
        self.paused(now_s - session.used_s)

    def paused(self, pause_s: float) -> None:
        before = self.hold_s, self.worth
        self.pauses_s.append(pause_s)
        returns = sorted(pause_s for pause_s in self.pauses_s if pause_s < inf)
        self.worth = WORTH * (len(returns) + 1) / (len(self.pauses_s) + 1)
        if len(returns) >= 8:
            self.hold_s = min(max(returns[len(returns) * 9 // 10], LEAST_HOLD_S), MOST_HOLD_S)
        self.moved = self.moved or (self.hold_s, self.worth) != before


class Sessions:
    """All sessions of a replica. ``clock``: monotonic; ``tokens_per_s``: the prefill rate, 0.0 while unknown.

    ``most``: of one tenant. Beyond it, the least recently used session is forgotten.
    """

    def __init__(
        self,
        block_size: int,
        clock: Callable[[], float],
        tokens_per_s: Callable[[], float] = lambda: 0.0,
        most: int = MOST_SESSIONS,
    ) -> None:
        self._most = most
        self._size = block_size
        self._clock = clock
        self._tokens_per_s = tokens_per_s
        self._tenants: dict[str, _Tenant] = {}
        self._by_request: dict[str, Session] = {}
        self._returns: Counter[str] = Counter()
        self._job_s = Histogram(_JOB_BUCKETS_S)
        self._unused_tokens = 0
        self._pace = DEFAULT_PACE
        self._live: set[str] = set()  # tenants with live sessions
        self._stale: set[str] = set()  # tenants whose sessions' ends may have moved
        self._numbers = count()
        self._computing: set[str] = set()  # requests without a first token
        self._idle_since_s = clock()
        self._idle_s = 0.0

    def begin(
        self,
        request_id: str,
        tenant: str,
        chain: bytes,
        prompt_tokens: int,
        cached_tokens: int,
        name: str = "",
        system_tokens: int = 0,
        *,
        parent: str = "",
        expected_tokens: int = 0,
        final: bool = False,
    ) -> Session:
        """Record a request, and return its session. ``chain``: the packed hashes of the prompt's full blocks.

        The sessions that a session began are not expected back once it goes on. ``final``: it closes with the answer.
        """
        now_s = self._clock()
        own = self._tenants.setdefault(tenant, _Tenant())
        for other in own.sessions:
            if not other.running and other.used_s + MOST_HOLD_S < now_s:
                own.gone(other)
        common, session = own.find(chain, name)
        if session is not None:
            own.sessions.remove(session)
            own.returned(session, now_s)
            kept = cached_tokens >= 0.9 * common * self._size
            self._returns["hit" if kept else "missed"] += 1
        else:
            session = Session(tenant, name, cached_tokens, now_s, now_s)
            for above in [other for other in own.sessions if parent and other.name == parent][-1:]:
                session.serve(int(above.served(now_s)), now_s)  # one job has one service
        own.sessions.append(session)
        session.running, session.left, session.turns = request_id, False, session.turns + 1
        session.mark(chain)
        session.tokens, session.system_tokens = prompt_tokens, system_tokens
        session.name, session.parent = name or session.name, parent or session.parent
        session.expected_tokens, session.closing = expected_tokens, final
        self._by_request[request_id] = session
        self._compute(request_id)
        self._count(own, session)
        for child in [child for child in own.live if name and child.parent == name and not child.running]:
            child.left = True
            self._count(own, child)
        if len(own.sessions) > self._most:
            self._forget(own, next((session for session in own.sessions if not session.running), own.sessions[0]))
        if own.moved:
            self._stale.add(tenant)
        return session

    def end(self, request_id: str, answer_tokens: int = 0) -> Session | None:
        """Record the end of a request, with any outcome. Return its session if that ends with it."""
        session = self._by_request.pop(request_id, None)
        self.first_token(request_id)
        if session is not None:
            session.tokens = 0 if session.waits else session.tokens + answer_tokens
            session.running, session.waits, session.expected_tokens = "", False, 0
            session.used_s = self._clock()
            own = self._tenants[session.tenant]
            self._count(own, session)
            if session.closing:
                self._forget(own, session, closed=True)
                return session
        return None

    def close(self, tenant: str, names: Collection[str]) -> list[Session]:
        """End a tenant's sessions of some names, and those that they began; return those that have ended.

        One whose request runs ends with that.
        """
        own = self._tenants.get(tenant, _Tenant())
        closed = {*names} - {""}
        for _ in range(MOST_GENERATIONS):
            closed |= {session.name for session in own.sessions if session.parent in closed} - {""}
        named = [session for session in own.sessions if session.name in closed or session.parent in closed]
        for session in named:
            session.closing = bool(session.running)
            if not session.closing:
                self._forget(own, session, closed=True)
        return [session for session in named if not session.closing]

    def live(self, tenant: str) -> int:
        """Return the number of a tenant's sessions that run or will soon return."""
        self._settle()
        return len(self._tenants[tenant].live) if tenant in self._live else 0

    def leave(self, tenant: str, chain: bytes, name: str = "") -> bool:
        """Forget the session that a prompt continues elsewhere; return whether it was live."""
        own = self._tenants.get(tenant)
        _, session = own.find(chain, name) if own is not None else (0, None)
        if own is None or session is None:
            return False
        self._settle()
        was_live = session in own.live
        self._forget(own, session)
        return was_live

    def drop(self, request_id: str) -> None:
        """Forget the session of a running request."""
        self.first_token(request_id)
        session = self._by_request.get(request_id)
        if session is not None:
            self._forget(self._tenants[session.tenant], session)

    def set_waiting(self, session: Session, *, waits: bool) -> None:
        """Note that a running session waits for its start, or no longer does."""
        if waits != session.waits:
            (self.first_token if waits else self._compute)(session.running)
        session.waits = waits
        if self._by_request.get(session.running) is session:
            self._count(self._tenants[session.tenant], session)

    def pace(self) -> float:
        """Return the replica's prefill rate in tokens a second, within a tenth, so that it seldom changes."""
        measured = self._tokens_per_s() or DEFAULT_PACE
        if not 0.9 * self._pace <= measured <= 1.1 * self._pace:
            self._pace = measured
            self._stale.update(self._tenants)
        return self._pace

    def live_until_s(self, session: Session, pace: float) -> float:
        """Return the time until which a session is live; infinite while one of its requests runs."""
        own = self._tenants[session.tenant]
        idle_s = 0.0 if session.left else min(own.hold_s, own.worth * session.own_tokens / pace)
        return inf if session.running else session.used_s + idle_s

    def held(self) -> Counter[str]:
        """Return the own tokens of the sessions that run or will soon return, by tenant with such sessions.

        Sessions that wait for their start hold none.
        """
        self._settle()
        return Counter({tenant: self._tenants[tenant].live_tokens for tenant in self._live})

    def paused(self, tenant: str) -> list[tuple[Session, int]]:
        """Return a tenant's sessions that will soon return, with the tokens that ``held`` counts for each."""
        self._settle()
        live = self._tenants[tenant].live if tenant in self._live else {}
        return [(session, tokens) for session, (_, tokens) in live.items() if not session.running]

    def next_end_s(self, tenant: str | None = None) -> float:
        """Return the time at which the next paused session, of one tenant or of all, is no longer live, or infinity."""
        self._settle()
        ends = (self._tenants[name].next_end_s() for name in self._live if tenant in (None, name))
        return min(ends, default=inf)

    def first_token(self, request_id: str) -> None:
        """Note that a request's prompt has been computed."""
        if request_id in self._computing:
            self._computing.remove(request_id)
            if not self._computing:
                self._idle_since_s = self._clock()

    def _compute(self, request_id: str) -> None:
        if not self._computing:
            self._idle_s = self.idle_s()
        self._computing.add(request_id)

    def idle_s(self) -> float:
        """Return for how long, in all, the replica had no prompt to compute; those that wait for space do not count."""
        return self._idle_s + (0.0 if self._computing else self._clock() - self._idle_since_s)

    @property
    def idle(self) -> bool:
        """Whether the replica has no prompt to compute now."""
        return not self._computing

    def state(self, session: Session, pace: float) -> SessionState:
        """Return a session's current state."""
        if session.running:
            return "waiting" if session.waits else "running"
        return "paused" if self.live_until_s(session, pace) > self._clock() else "left"

    def all(self, tenant: str | None = None) -> list[Session]:
        """Return the sessions of one tenant or of all tenants, least recently used first."""
        if tenant is not None:
            return list(self._tenants[tenant].sessions) if tenant in self._tenants else []
        return [session for own in self._tenants.values() for session in own.sessions]

    def expire(self, after_s: float = 3600.0) -> None:
        """Forget sessions unused for ``after_s``, and tenants without sessions."""
        then_s = self._clock() - after_s
        for tenant, own in list(self._tenants.items()):
            for session in [session for session in own.sessions if not session.running and session.used_s < then_s]:
                self._forget(own, session)
            if own.moved:
                self._stale.add(tenant)
            if not own.sessions:
                del self._tenants[tenant]
                self._live.discard(tenant)

    def samples(self) -> Iterator[Sample]:
        """Yield counters and gauges."""
        self._settle()
        live = sum(len(self._tenants[tenant].live) for tenant in self._live)
        total, waiting = sum(len(own.sessions) for own in self._tenants.values()), self._waiting()
        running = len(self._by_request) - waiting
        states = {"running": running, "paused": live - running, "waiting": waiting, "left": total - live - waiting}
        for state, number in states.items():
            yield "warmpath_sessions", (("state", state),), float(number)
        for outcome in ("hit", "missed"):
            yield "warmpath_session_returns_total", (("outcome", outcome),), float(self._returns[outcome])
        yield "warmpath_session_unused_tokens_total", (), float(self._unused_tokens)
        yield from self._job_s.samples("warmpath_session_seconds", ())

    def _waiting(self) -> int:
        return sum(session.waits for session in self._by_request.values())

    def _count(self, own: _Tenant, session: Session) -> None:
        """Correct the sums of a tenant for a session that has changed."""
        own.drop(session)
        until_s = -inf if session.waits else self.live_until_s(session, self._pace)
        session.left = not session.running and until_s <= self._clock()
        if until_s > self._clock():
            own.live[session] = until_s, session.own_tokens
            own.live_tokens += session.own_tokens
            self._live.add(session.tenant)
            if until_s < inf:
                heappush(own.ends, (until_s, next(self._numbers), session))
                if len(own.ends) > 4 * self._most:
                    self._count_all(own)

    def _count_all(self, own: _Tenant) -> None:
        own.live.clear()
        own.ends.clear()
        own.live_tokens, own.moved = 0, False
        for session in own.sessions:
            self._count(own, session)

    def _settle(self) -> None:
        """Drop the sessions that are no longer live, and count those of tenants with other holds anew."""
        self.pace()
        now_s = self._clock()
        while self._stale:
            own = self._tenants.get(self._stale.pop())
            if own is not None:
                self._count_all(own)
        for tenant in list(self._live):
            own = self._tenants[tenant]
            while own.next_end_s() <= now_s:
                session = heappop(own.ends)[2]
                own.drop(session)
                session.left = True
            if not own.live:
                self._live.remove(tenant)

    def _forget(self, own: _Tenant, session: Session, *, closed: bool = False) -> None:
        own.sessions.remove(session)
        own.drop(session)
        if not closed:  # else it says nothing about how soon others return
            own.gone(session)
        self._by_request.pop(session.running, None)
        self._unused_tokens += session.own_tokens
        self._job_s.observe(session.used_s - session.began_s)


NAME = "concurrent_sessions"
MOST = 10_000
"""The largest limit, because an ingress compares a prompt with each of its tenant's sessions."""
EXPIRE_EVERY_S = 60.0


class LimitedPrompt(Protocol):
    """A prompt as its session knows it. ``block_hashes``: of its full blocks; ``session``: the client's word for it.

    ``parent``: its word for the session that began it; ``final``: the session ends with this answer.
    """

    request_id: str
    block_hashes: bytes
    token_ids: Sequence[int]
    session: str
    parent: str
    final: bool


class _Chain(NamedTuple):
    hashes: bytes
    name: str
    final: bool


class SessionLimit:
    """The limit in one ingress, and its ``levels``. ``tokens_per_s``: a replica's prefill rate, 0.0 while unknown."""

    def __init__(
        self,
        levels: Levels,
        block_size: int,
        tokens_per_s: Callable[[], float] = lambda: 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._levels = levels
        self._sessions = Sessions(block_size, clock, tokens_per_s, most=MOST)
        self._clock = clock
        self._expired_s = clock()
        self._levels.counts[NAME] = self._count

    def close(self, tenant: str, names: Collection[str]) -> None:
        """End a tenant's sessions of some names."""
        self._sessions.close(tenant, names)

    async def check(self, allowance: Allowance, prompts: Sequence[LimitedPrompt]) -> None:
        """Begin the sessions of a request's prompts, or continue them. Raises RateLimited."""
        config = allowance.config
        if config is None or config.concurrent_sessions is None:
            return
        if self._clock() >= self._expired_s + EXPIRE_EVERY_S:
            self._expired_s = self._clock()
            self._sessions.expire()
        tenant, most, sessions = config.name, config.concurrent_sessions, self._sessions
        for prompt in prompts:
            before, chain = sessions.live(tenant), _Chain(prompt.block_hashes, prompt.session, prompt.final)
            if prompt.final:  # it takes the place of its session, with any prompt
                sessions.close(tenant, [chain.name])
            sessions.begin(
                prompt.request_id, tenant, chain.hashes, len(prompt.token_ids), 0, chain.name,
                parent=prompt.parent, final=prompt.final,
            )  # fmt: skip
            allowance.at_end.append(partial(sessions.end, prompt.request_id))
            live = sessions.live(tenant)
            if live <= before:  # it continues a live session
                continue
            total = await self._levels.total(tenant, NAME, most, live, chain)
            if total > most:
                sessions.drop(prompt.request_id)
                wait_s = min(60.0, max(1.0, sessions.next_end_s(tenant) - self._clock()))
                raise limit_reached(NAME, min(most, total - 1), most, "sessions", wait_s)

    def _count(self, tenant: str, what: _Chain | None) -> tuple[int, bool]:
        moved = what is not None and self._sessions.leave(tenant, what.hashes, what.name)
        if what is not None and what.final:
            before = self._sessions.live(tenant)
            self._sessions.close(tenant, [what.name])
            moved = moved or self._sessions.live(tenant) < before
        return self._sessions.live(tenant), moved
