"""What engines share that compute outside of this process: their running requests, how these end, and the load."""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import structs

from router.protocol.block_hash import extend_chain
from router.protocol.events import LoadReport
from router.vllm_events.pool import FollowedPool
from serve_app.engine.load_mirror import LiveRequest, LoadMirror, LoadSettings
from serve_app.engine.protocol import (
    Clock,
    EngineError,
    EngineOutput,
    EngineRequest,
    ErrorKind,
    FinishReason,
    OutputSink,
)
from serve_app.engine.reports import EngineMeters, Outbox

STOPPED = "the engine was stopped"


class OutsideEngine(ABC):
    """The requests of one engine. A task in ``_loop`` stands for each; ``_generate`` is the subclass' part.

    The lock guards the load. All but ``cancel`` and ``load`` belongs to the loop.
    """

    _loop: asyncio.AbstractEventLoop

    def __init__(self, settings: LoadSettings, clock: Clock, *, turns: bool = True) -> None:
        """``turns``: whether waiting tenants take turns there."""
        self._clock = clock
        self._lock = threading.Lock()
        self._meters = EngineMeters()
        self._load = LoadMirror(settings, self._meters, turns=turns)
        self._outbox = Outbox(lambda: self._loop.call_soon(self._outbox.deliver))
        self._stopping = False

    @abstractmethod
    async def _generate(self, live: LiveRequest) -> None:
        """Have a request computed, and pass its outputs on."""

    @abstractmethod
    def _failure(self, live: LiveRequest, error: BaseException | None) -> tuple[ErrorKind, str]:
        """Return the kind of a request's failure and what its client is told; None: its task just ended."""

    def _entering(self, request: EngineRequest) -> None:  # noqa: B027  # most have nothing to take
        """Take what a request needs from here on; holds the lock. Raises to refuse it."""

    def _leaving(self, live: LiveRequest, reason: FinishReason) -> None:
        """Count a request no more, and give back what ``_entering`` took."""
        with self._lock:
            self._load.ended(live)

    def cancel(self, request_id: str) -> None:
        """Drop a request (any thread); its blocks are free within one step. Unknown ids are ignored."""
        with self._lock:
            live = self._load.live.get(request_id)
        if live is not None:
            self._loop.call_soon_threadsafe(lambda: live.task is not None and live.task.cancel())

    def load(self) -> LoadReport:
        """Return the load as of the last step, plus all requests submitted since."""
        with self._lock:
            return self._load.report(self._clock())

    def _enter(
        self, request: EngineRequest, sink: OutputSink, pool: FollowedPool, size: int, params: Mapping[str, Any]
    ) -> None:
        """Queue a checked request (any thread). Raises EngineError once stopped, QueueFull, ValueError."""
        ids = np.ascontiguousarray(request.token_ids, dtype=np.int32)
        chain = request.block_hashes or extend_chain(request.root, request.scope.public_blocks, request.identity, size)
        cached = pool.hit(chain, (len(ids) - 1) // size) * size if request.reads_kv else 0
        if request.remote_kv is not None:
            cached = max(cached, request.remote_kv.tokens)
        with self._lock:
            if self._stopping:
                raise EngineError("the engine is stopped")
            if request.request_id in self._load.live:
                raise ValueError(f"request id {request.request_id!r} is in use")
            self._load.check(request.tenant)
            self._entering(request)
            whole = structs.replace(request, token_ids=ids, block_hashes=chain)
            live = LiveRequest(whole, sink, params, self._clock(), len(ids) - cached, predicted_tokens=cached)
            self._load.arrived(live)
            self._loop.call_soon_threadsafe(self._begin, live)

    def _begin(self, live: LiveRequest) -> None:
        if not live.ended:
            live.task = self._loop.create_task(self._generate(live))
            live.task.add_done_callback(lambda task: self._settle(live, task))

    def _settle(self, live: LiveRequest, task: asyncio.Task[None]) -> None:
        """End a request if its task ended before its answer."""
        error = None if task.cancelled() else task.exception()
        if live.ended:
            return
        if task.cancelled():
            self._end(live, "cancelled")
        elif isinstance(error, TimeoutError):
            self._end(live, "timeout", message="The answer took too long; ask for fewer tokens.")
        else:
            kind, message = self._failure(live, error)
            self._end(live, "error", error=kind, message=message)

    def _end(
        self,
        live: LiveRequest,
        reason: FinishReason,
        *,
        output: EngineOutput | None = None,
        error: ErrorKind = "failed",
        message: str = "",
    ) -> None:
        """End a request once: release all that it holds, and report its end."""
        if live.ended:
            return
        self._leaving(live, reason)
        self._meters.finished[reason] += 1
        last = output or EngineOutput(live.request.request_id)
        last.end(reason, error, message)
        last.retry_after_s = 1.0 if error == "queue_full" else 0.0
        self._last(live, last)

    def _last(self, live: LiveRequest, last: EngineOutput) -> None:
        """Pass a request's last output on."""
        last.prefilled = live.prefilled
        self._outbox.add(live.sink, last)

    def _running(self) -> list[LiveRequest]:
        with self._lock:
            return list(self._load.live.values())

    async def _end_all(self) -> None:
        """End all requests with an error, and wait for their tasks."""
        requests = self._running()
        for live in requests:
            self._end(live, "error", message=STOPPED)
        tasks = [live.task for live in requests if live.task is not None]
        for task in tasks:
            task.cancel()
        self._outbox.deliver()
        await asyncio.gather(*tasks, return_exceptions=True)
