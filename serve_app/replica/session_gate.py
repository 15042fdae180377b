"""Sessions of a replica's requests: a request may wait until its session's context fits.

A waiting request is already in its engine's queue, like one that waits for a copy. So load reports count it, its time
limit holds, and it ends like any other. All in the replica's loop.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from router.protocol.samples import Sample
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import Clock, Engine, EngineRequest, RemoteKv
from serve_app.fairness.shares import Shares
from serve_app.replica.reporter import replica_figures
from serve_app.sessions.admission import Admission
from serve_app.sessions.report import session_report
from serve_app.sessions.sessions import Sessions

EXPIRE_EVERY_S = 60.0


class SessionGate:
    """The session gate of one replica; ``engine`` has started."""

    def __init__(self, engine: Engine, config: AppConfig, *, clock: Clock = time.monotonic) -> None:
        self.sessions = Sessions(config.block_size, clock, lambda: engine.load().prefill_tokens_per_s)
        self._engine = engine
        self._config = config
        self._clock = clock
        host_blocks = config.host_cache_bytes // max(1, engine.kv_block_bytes)
        self._admission = Admission(
            self.sessions,
            # A context in host memory loads in a moment, so both sizes count.
            int(replica_figures(engine, 0, config).pool_tokens) + host_blocks * config.block_size,
            pinned_tokens=lambda: int(replica_figures(engine, 0, config).pinned_tokens),
            clock=clock,
            wait_s=config.session_wait_s,
            shares=Shares(config.cache_shares),
        )
        self._held: dict[str, RemoteKv] = {}
        self._changed = asyncio.Event()

    def begin(self, request: EngineRequest) -> RemoteKv | None:
        """Note a request; return the KV to wait for, or None."""
        chain, prompt_tokens, size = request.block_hashes, len(request.token_ids), self._config.block_size
        if not chain or not request.store_kv or not request.reads_kv:  # its KV does not outlive it, or is not read
            return None

        def cached_tokens() -> int:
            return self._engine.known_blocks(chain, (prompt_tokens - 1) // size) * size

        known = cached_tokens()
        session = self.sessions.begin(request.request_id, request.tenant, chain, prompt_tokens, known, request.session)
        decision = request.decision
        pulled_tokens = decision.pull_tokens if decision is not None and decision.pull_from else 0
        if not self._admission.waits(session, prompt_tokens - max(known, pulled_tokens), cached_tokens):
            return None
        held = self._held[request.request_id] = RemoteKv(known)
        self._admit()
        self._changed.set()
        return None if held.done else held

    def end(self, request_id: str, answer_tokens: int) -> None:
        """Note that a request has ended, successfully or not."""
        self.sessions.end(request_id, answer_tokens)
        self._admission.forget(request_id)
        self._held.pop(request_id, None)
        if self._held:
            self._admit()

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

    def _admit(self) -> None:
        started = self._admission.admitted()
        for request_id in started:
            self._held.pop(request_id).end()
        if started:
            self._engine.wake()
