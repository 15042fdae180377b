"""Sessions of a replica's requests: a request may wait until its session's context fits.

A waiting request is already in its engine's queue, like one that waits for a copy. So load reports count it, its time
limit holds, and it ends like any other. All in the replica's loop.

A request with most of its prompt cached starts at once. Another one waits while live sessions and its own context
exceed the pool, unless its tenant's sessions and it fit the tenant's share, so that a flood delays only its own tenant.
Without admission, in a pool that is too small, every returning session recomputes the blocks that the previous one
evicted. Where a replica has the time, that is cheaper than a wait: a request starts once no prompt was computed, while
it waited, for a part of the time that the tokens take which it may evict. No request waits longer than ``wait_s``. Not
thread-safe.
"""

import asyncio
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import accumulate
from typing import Any

from router.protocol.samples import WAIT_BUCKETS_S, Histogram, Sample
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import Clock, Engine, EngineRequest, RemoteKv
from serve_app.errors import LimitReason
from serve_app.fairness.shares import Shares
from serve_app.replica.reporter import replica_figures
from serve_app.sessions import Session, Sessions

SMALL_PART = 64
"""Requests that need less than this part of the pool never wait. They are the turns of active conversations."""

AGING_SHARE = 0.1
"""Least served session first, but no request is overtaken by one that arrives after ten times the computing time of
what its session was served, this request included."""

MUCH = 4.0
"""A paused session that was served this many times as much keeps no other one of its tenant waiting: short sessions
pass long ones, and sessions alike do not evict each other."""

PATIENCE = 0.15
"""The idle time after which a request starts, as a part of the time that the tokens take which it may evict. Waits for
space are far longer than that, and not every evicted context returns."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    session: Session
    arrival_s: float
    served_tokens: float
    cached_tokens: Callable[[], int]
    until_s: float


@dataclass(eq=False)
class Admission:
    """One replica's admission, for a pool of ``pool_tokens``. None waits while that is unknown: 0.

    ``pinned_tokens``: returns the tokens kept by saves.
    """

    sessions: Sessions
    pool_tokens: int
    pinned_tokens: Callable[[], int]
    clock: Callable[[], float]
    wait_s: float
    shares: Shares = field(default_factory=lambda: Shares({}))
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _spent_s: float = 0.0  # of the sessions' idle time: before the first one waited, and taken by starts since
    _waits_s: Histogram = field(default_factory=lambda: Histogram(WAIT_BUCKETS_S))

    def waits(
        self, session: Session, needed_tokens: int, cached_tokens: Callable[[], int], timeout_s: float = math.inf
    ) -> bool:
        """Return whether a session's request waits until ``admitted`` returns it. ``needed_tokens``: to compute.

        Call ``admitted`` at once, because there may be space. ``cached_tokens``: returns its prompt's cached tokens.
        ``timeout_s``: its time until it fails; half of it is for the answer.
        """
        now_s = self.clock()
        session.serve(needed_tokens, now_s)
        known = self.wait_s and self.pool_tokens
        if not known or needed_tokens * SMALL_PART <= self.pool_tokens or 2 * needed_tokens <= session.tokens:
            return False
        self.sessions.set_waiting(session, waits=True)
        if not self._waiting:
            self._spent_s = self.sessions.idle_s()
        until_s = now_s + min(self.wait_s, timeout_s / 2)
        self._waiting[session.running] = _Waiting(session, now_s, session.served(now_s), cached_tokens, until_s)
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
        usage = self.sessions.held()
        used_tokens = usage.total()
        tenants = usage.keys() | {waiting.session.tenant for waiting in self._waiting.values()}
        share = {tenant: room * self.shares.fraction(tenant, among=tenants) for tenant in tenants}
        aging = AGING_SHARE * pace
        turns = {name: waiting.arrival_s + waiting.served_tokens / aging for name, waiting in self._waiting.items()}
        named = {(one.session.tenant, one.session.name): turns[name] for name, one in self._waiting.items()}

        def turn(item: tuple[str, _Waiting]) -> tuple[float, bool]:
            """A child gives way to its parent."""
            own, session = turns[item[0]], item[1].session
            parent = named.get((session.tenant, session.parent), own) if session.parent else own
            return max(own, parent), parent > own

        line = sorted(self._waiting.items(), key=turn)
        started: list[str] = []
        paused = {one: self._paused(one) for one in {waiting.session.tenant for waiting in self._waiting.values()}}
        for request_id, waiting in sorted(
            line, key=lambda item: usage[item[1].session.tenant] / self.shares.weight(item[1].session.tenant)
        ):
            session = waiting.session
            if session.turns == 1:  # another request may have computed the same prompt
                session.shared_tokens = max(session.shared_tokens, waiting.cached_tokens())
            tenant, tokens = session.tenant, session.own_tokens
            services, sums = paused[tenant]
            passed = sums[bisect_right(services, MUCH * session.served(now_s))]
            # Not ``verdict``: within its share it also takes the space of others' sessions that wait for their return.
            fits = used_tokens - passed + tokens <= room or usage[tenant] - passed + tokens <= share[tenant]
            price_s = self._price_s(tokens, used_tokens - passed, room)
            idle = self.sessions.idle and self.sessions.idle_s() - self._spent_s >= price_s
            if fits or not usage or idle or waiting.until_s <= now_s:
                if usage and not fits:
                    self._spent_s += price_s
                started.append(request_id)
                self._waits_s.observe(now_s - waiting.arrival_s)
                usage[tenant] += tokens
                used_tokens += tokens
                self.sessions.set_waiting(session, waits=False)
                del self._waiting[request_id]
        return started

    def _price_s(self, tokens: int, used_tokens: int, room: int) -> float:
        """Return the idle time that a context of ``tokens`` needs to start; 0.0 where it evicts no live session."""
        return PATIENCE * max(0, min(tokens, used_tokens + tokens - room)) / self.sessions.pace()

    def _paused(self, tenant: str) -> tuple[list[float], list[int]]:
        """Return the services of a tenant's paused sessions, ascending; and the tokens of those from each one on."""
        now_s = self.clock()
        paused = sorted((session.served(now_s), tokens) for session, tokens in self.sessions.paused(tenant))
        sums = [*accumulate((tokens for _, tokens in reversed(paused)), initial=0)]
        return [served for served, _ in paused], sums[::-1]

    def samples(self) -> Iterator[Sample]:
        """Yield the histogram of waiting times, under its own name too, which boards have."""
        yield from self._waits_s.samples("warmpath_wait_seconds", (("place", "session"),))
        yield from self._waits_s.samples("warmpath_session_wait_seconds")

    def look_again_s(self) -> float:
        """Return the time at which more requests may start even if none ends; infinite without waiting requests."""
        if not self._waiting:
            return math.inf
        waiting, idle_until_s = self._waiting.values(), math.inf
        if self.sessions.idle:
            least, used_tokens = min(one.session.own_tokens for one in waiting), self.sessions.held().total()
            price_s = self._price_s(least, used_tokens, self.room_tokens)
            idle_until_s = self.clock() + price_s - (self.sessions.idle_s() - self._spent_s)
        return min([min(one.until_s for one in waiting), idle_until_s, self.sessions.next_end_s()])


MOST_TOLD = 200
"""The maximum number of reported sessions: those in use or used last."""


def session_report(sessions: Sessions, admission: Admission, tenant: str | None, now_s: float) -> dict[str, Any]:
    """Return a replica's part of ``GET /v1/cache/sessions`` (docs: api). ``tenant`` None: for an operator."""
    own, pace = sessions.all(tenant), sessions.pace()
    usage = sessions.held()
    live_tokens = usage.total() if tenant is None else usage[tenant]
    room = {"room_tokens": admission.room_tokens} if tenant is None else {}

    def row(session: Session) -> dict[str, Any]:
        state = sessions.state(session, pace)
        idle_s = 0.0 if session.running else now_s - session.used_s
        report: dict[str, Any] = {
            "session": session.name,
            "tenant": session.tenant,
            "state": state,
            "turns": session.turns,
            "tokens": session.tokens,
            "own_tokens": session.own_tokens,
            "age_s": round(now_s - session.began_s, 1),
            "idle_s": round(idle_s, 1),
        }
        if state == "paused":
            report["live_for_s"] = round(sessions.live_until_s(session, pace) - now_s, 1)
        if state == "waiting":
            report["waited_s"] = round(admission.waited_s(session), 1)
            report["why"] = _why(session.own_tokens, live_tokens, **room)
            reason = LimitReason("session", "num_blocks", usage[session.tenant], room.get("room_tokens"))
            report["reason"] = reason.shown()
        return report

    latest = nsmallest(MOST_TOLD, own, key=lambda session: 0.0 if session.running else now_s - session.used_s)
    return {"sessions": len(own), "live_tokens": live_tokens, **room, "rows": [row(session) for session in latest]}


def _why(needed_tokens: int, live_tokens: int, room_tokens: int | None = None) -> str:
    if room_tokens is None:  # the total would reveal other tenants' sessions
        return f"It waits for space: its {needed_tokens:,} tokens do not fit beside live sessions."
    return (
        f"It waits for space: live sessions hold {live_tokens:,} of {room_tokens:,} tokens, and it needs "
        f"{needed_tokens:,}."
    )


EXPIRE_EVERY_S = 60.0
LOOK_S = 10.0
"""How often to ask for the pool of a server of others: it is unknown at first, and may be another's later."""


class SessionGate:
    """The session gate of one replica; ``engine`` has started."""

    def __init__(self, engine: Engine, config: AppConfig, *, clock: Clock = time.monotonic) -> None:
        self.sessions = Sessions(config.block_size, clock, lambda: engine.load().prefill_tokens_per_s)
        self._engine = engine
        self._config = config
        self._clock = clock
        self._look_s = math.inf
        self._admission = Admission(
            self.sessions,
            self._pool_tokens(),
            # Figures are all of the engine's, which takes as long as all else here.
            pinned_tokens=lambda: int(replica_figures(engine, 0, config).pinned_tokens) if config.pin_budget else 0,
            clock=clock,
            wait_s=config.session_wait_s,
            shares=Shares(config.cache_shares),
        )
        self._tickets: dict[str, RemoteKv] = {}
        self._changed = asyncio.Event()

    def _pool_tokens(self) -> int:
        """Return the tokens that the engine can hold. A context in host memory loads in a moment, so both count."""
        config = self._config
        if config.engine_traits.external:
            self._look_s = self._clock() + LOOK_S
        host_blocks = config.host_cache_bytes // max(1, self._engine.kv_block_bytes)
        return int(replica_figures(self._engine, 0, config).pool_tokens) + host_blocks * config.block_size

    def begin(self, request: EngineRequest) -> RemoteKv | None:
        """Note a request; return the KV to wait for, or None."""
        if self._clock() >= self._look_s:
            self._admission.pool_tokens = self._pool_tokens()
        chain, prompt_tokens, size = request.block_hashes, len(request.token_ids), self._config.block_size
        if not chain or not request.store_kv or not request.reads_kv:  # its KV does not outlive it, or is not read
            return None

        def cached_tokens() -> int:
            return self._engine.cached_blocks(chain, (prompt_tokens - 1) // size) * size

        cached = cached_tokens()
        session = self.sessions.begin(
            request.request_id, request.tenant, chain, prompt_tokens, cached, request.session, request.system_tokens,
            parent=request.parent, expected_tokens=request.expected_tokens, final=request.final,
        )  # fmt: skip
        decision = request.decision
        pulled_tokens = decision.pull_tokens if decision is not None and decision.pull_from else 0
        needed_tokens = prompt_tokens - max(cached, pulled_tokens)
        if not self._admission.waits(session, needed_tokens, cached_tokens, request.timeout_s):
            return None
        waiting = self._tickets[request.request_id] = RemoteKv(cached)
        self._admit()
        self._changed.set()
        return None if waiting.done else waiting

    def first_token(self, request_id: str) -> None:
        """Note that a request's prompt has been computed."""
        self.sessions.first_token(request_id)
        if self._tickets and self.sessions.idle:
            self._changed.set()

    def end(self, request_id: str, answer_tokens: int) -> None:
        """Note that a request has ended, successfully or not."""
        session = self.sessions.end(request_id, answer_tokens)
        self._admission.forget(request_id)
        self._tickets.pop(request_id, None)
        self._closed([session] if session is not None else [])

    def close(self, tenant: str, names: Collection[str]) -> int:
        """End a tenant's sessions of some names, whose own blocks go first then; return how many have ended."""
        sessions = self.sessions.close(tenant, names)
        self._closed(sessions)
        return len(sessions)

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Use these weights of tenants from now on."""
        self._admission.shares.set_weights(shares)

    def report(self, tenant: str | None) -> dict[str, Any]:
        """Return the report on sessions for a tenant, or for an operator (None)."""
        return session_report(self.sessions, self._admission, tenant, self._clock())

    async def run(self) -> None:
        """Let requests start as others' sessions end, until cancelled."""
        while True:
            self._admit()
            self.sessions.expire()
            self._changed.clear()
            pause_s = min(self._admission.look_again_s() - self._clock(), EXPIRE_EVERY_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(pause_s, 0.01)):
                    await self._changed.wait()

    def samples(self) -> Iterator[Sample]:
        """Yield counters and gauges."""
        yield from self.sessions.samples()
        yield from self._admission.samples()

    def _closed(self, sessions: Sequence[Session]) -> None:
        for session in sessions:
            if session.marks:
                self._engine.retire(session.marks[0][1], max(session.shared_tokens, session.system_tokens))
        if self._tickets:
            self._admit()

    def _admit(self) -> None:
        started = self._admission.admitted()
        for request_id in started:
            self._tickets.pop(request_id).end()
        if started:
            self._engine.wake()
