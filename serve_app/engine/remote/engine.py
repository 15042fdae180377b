"""A server that already runs, behind the engine's contract: requests and tokens over HTTP, KV events over ZeroMQ.

One thread with its own loop. `seat.py` has the server; while none answers, load reports say why (``out``).
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
from msgspec import structs

from router.protocol.events import LoadReport, StatsReport
from serve_app.config.engine import CAPABILITIES, ENGINES, Capability
from serve_app.engine.load_mirror import LiveRequest
from serve_app.engine.outside import OutsideEngine
from serve_app.engine.protocol import (
    EngineOutput,
    EngineRequest,
    ErrorKind,
    EventSink,
    ExternalEngine,
    FinishReason,
    FirstToken,
    OutputSink,
    SaveResult,
    UnknownAdapter,
    prompt_outputs,
)
from serve_app.engine.remote.adapters import Names
from serve_app.engine.remote.answers import Busy, Part, WorkerGone
from serve_app.engine.remote.reading import WorkerHttp, printable
from serve_app.engine.remote.seat import ClaimWorker, WorkerSeat
from serve_app.engine.remote.settings import RemoteSettings
from serve_app.engine.scheduling.sequence import check_request, possible

logger = logging.getLogger(__name__)

_LABELS = (("engine", "remote"),)
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
AWAY = "The model's server takes no requests now; send the request again."
BROKEN_OFF = "The model's server broke off this answer; send the request again."
FULL = "The model's server is full; send the request again later."
"""What clients are told, since a server's address and its words are for operators."""

OFF: frozenset[Capability] = frozenset(CAPABILITIES) - ENGINES["remote"].can


class RemoteEngine(OutsideEngine, ExternalEngine):
    """One server behind one replica."""

    def __init__(
        self,
        settings: RemoteSettings,
        event_sink: EventSink,
        *,
        clock: Callable[[], float] = time.monotonic,
        open_http: Callable[[str], WorkerHttp] = WorkerHttp,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """``loop``: the caller's own, which ``attend`` and ``close`` are called in, instead of a thread's."""
        super().__init__(settings, clock, turns=False)
        self._loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote-engine", daemon=True)
        self._last_first_s = 0.0
        self._names = Names()
        self.seat = WorkerSeat(settings, event_sink, clock, open_http, lambda: len(self._load.live), self._left)

    @property
    def settings(self) -> RemoteSettings:
        """The settings; the workers may change."""
        return self.seat.settings

    @property
    def adapters(self) -> Names:
        """The adapters that requests may name."""
        return self._names

    def share(self, claim: ClaimWorker) -> None:
        """Take workers by ``claim``, beside other replicas; call it before ``start``."""
        self.seat.claim = claim

    def set_workers(self, entries: Sequence[str]) -> None:
        """Look for workers there from the next look on."""
        self.seat.settings = replace(self.settings, workers=tuple(entries))

    @property
    def seats(self) -> int:
        """How many replicas the listed workers need."""
        return max(1, len(self.seat.listed))

    def start(self) -> None:
        """Begin to look for a worker."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.seat.begin(), self._loop).result()

    def stop(self) -> None:
        """Leave the worker as it is; unfinished requests get an "error" output."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        if self._thread.ident is not None:
            asyncio.run_coroutine_threadsafe(self.close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        worker = self.seat.worker
        self.seat.claim((), worker.url if worker is not None else "")

    async def close(self) -> None:
        """End all requests with an error, and look after the worker no longer."""
        self.seat.attend_no_more()
        await self._end_all()
        await self.seat.close()

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Queue a request. Raises RequestTooLong, QueueFull, UnknownAdapter, EngineError once stopped, ValueError."""
        request, size, facts = possible(request, OFF), self.settings.block_size, self.seat.facts
        limit = self.settings.max_model_len
        check_request(
            request,
            vocab_size=self.settings.vocab_size,
            max_model_len=min(limit, facts.max_model_len or limit) if facts is not None else limit,
            max_blocks=limit,
            block_size=size,
        )
        if request.scope.lora and request.scope.lora not in self.adapters.loaded:
            raise UnknownAdapter(f"{request.scope.lora} is not loaded")
        self._enter(request, sink, self.seat.far.pool, size, {})

    def load(self) -> LoadReport:
        """Return the load of this deployment's requests, and the numbers of other clients' requests at the server."""
        report, (running, waiting) = super().load(), self.seat.others
        return structs.replace(
            report,
            running_sequences=max(report.running_sequences, running),
            waiting_sequences=max(report.waiting_sequences, waiting),
            attributes=self.seat.attributes(),
            out=self.seat.out,
        )

    def stats(self) -> StatsReport:
        """Return counters and gauges as Prometheus-style samples."""
        with self._lock:
            facts, far = self.seat.facts, self.seat.far
            blocks = facts.num_blocks if facts is not None else 0
            cached_blocks = far.pool.held_blocks
            gauges = tuple(self._load.gauges(max(blocks, cached_blocks), cached_blocks, 0, _LABELS))
        predictions = "warmpath_worker_predictions_total"
        return StatsReport(
            (
                *self._meters.samples(_LABELS),
                *gauges,
                (predictions, (*_LABELS, ("result", "right")), float(far.right)),
                (predictions, (*_LABELS, ("result", "wrong")), float(far.wrong)),
                ("warmpath_worker_up", _LABELS, float(not self.seat.out)),
                ("warmpath_unplaced_kv_blocks_total", _LABELS, float(far.pool.unplaced)),
                ("warmpath_kv_cache_block_tokens", _LABELS, float(self.settings.block_size)),
            )
        )

    def healthy(self) -> bool:
        """Return False once the loop has died. A dead worker is no reason to start another replica."""
        return not self._stopping and self._thread.is_alive() and self.seat.attended

    def tell_cache(self, *, anew: bool = False) -> None:
        """Send a digest of the pool by the worker's events so far; ``anew``: all its blocks first."""
        follower = self.seat.far.follower
        if follower is not None and not self.seat.out:
            follower.tell(anew=anew)

    def cached_blocks(self, block_hashes: bytes, most: int) -> int:
        """Return how many of a chain's first ``most`` blocks are cached, by the worker's last events (any thread)."""
        return self.seat.far.pool.count_held(block_hashes, most)

    def reset_prefix_cache(self, *, tiers: bool = True) -> bool:
        """Return False: the cache is the server's."""
        return False

    def _left(self) -> None:
        """End all requests: the worker takes none now, and other replicas can go on with them."""
        for live in self._running():
            self._end(live, "error", error="unavailable", message=AWAY)
            if live.task is not None:
                live.task.cancel()

    async def _generate(self, live: LiveRequest) -> None:
        seat, request = self.seat, live.request
        worker, facts, far, predicted = seat.worker, seat.facts, seat.far, live.predicted_tokens
        if worker is None or facts is None:
            self._end(live, "error", error="unavailable", message=AWAY)
            return
        again = 0
        if request.grammar and request.resumed_tokens:
            # The server's grammar cannot begin in the middle: the answer is computed again, with the same seed.
            again = request.resumed_tokens
            kept = len(request.token_ids) - again
            sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens + again)
            request = structs.replace(
                request, token_ids=request.token_ids[:kept], block_hashes=b"", resumed_tokens=0, sampling=sampling
            )
        cached, believed = None, not far.doubt(self._clock())
        left_s = live.arrival_s + request.timeout_s - self._clock()
        finish, had = "", 0
        async with asyncio.timeout(None if left_s == float("inf") else left_s):
            if request.scope.lora:
                await seat.ensure_adapter(worker, facts, live.request)
            async for part in seat.parts(worker, facts, request):
                if part.cached_tokens is not None:
                    cached = min(part.cached_tokens, len(request.token_ids))
                finish = part.finish or finish
                ids, logprobs = part.token_ids, part.logprobs
                if had < again and ids:
                    before = live.request.token_ids[len(request.token_ids) + had :].tolist()
                    same = min(len(ids), again - had)
                    if list(ids[:same]) != before[:same]:
                        raise ValueError("a worker was lost in the middle of a constrained answer; send it again")
                    had, ids, logprobs = had + same, ids[same:], logprobs[same:]
                if ids or part.prompt_logprobs:
                    expected = predicted if believed else 0
                    first = FirstToken(expected if cached is None else cached, expected=cached is None)
                    self._take(live, ids, logprobs, part, first, believed)
        if not finish:
            raise WorkerGone(f"{worker.url} broke off an answer")
        reason = _FINISH.get(finish)
        if reason is None:
            raise WorkerGone(f"{worker.url} ended an answer with {printable(finish, 40)!r}")
        followed = request.reads_kv and not again and seat.far is far
        if cached is not None and followed and far.follower is not None:
            far.judge(predicted, cached)
        if followed and len(request.token_ids) - (cached or predicted) >= 2 * self.settings.block_size:
            far.computed(self._clock())
        self._finish(live, reason, cached)

    def _take(
        self,
        live: LiveRequest,
        ids: tuple[int, ...],
        logprobs: tuple[Any, ...],
        part: Part,
        first: FirstToken,
        believed: bool,
    ) -> None:
        """Pass tokens on, but for a stop token that stays hidden."""
        request, sampling = live.request, live.request.sampling
        for output in prompt_outputs(request.request_id, part.prompt_logprobs):
            self._outbox.add(live.sink, output)
        ids = ids if sampling.max_tokens else ()
        if part.finish == "stop" and ids and ids[-1] not in sampling.shown_stop_token_ids:
            ids = ids[:-1] if ids[-1] in sampling.stop_token_ids else ids
        output = EngineOutput(request.request_id, ids, logprobs[: len(ids)])
        self._meters.generation_tokens += len(ids)
        if not live.begun:
            output.first = self._first(live, first, believed)
        self._outbox.add(live.sink, output)

    def _first(self, live: LiveRequest, first: FirstToken, believed: bool) -> FirstToken:
        now_s = self._clock()
        begun_s = max(live.arrival_s, self._last_first_s)  # prompts are computed one after the other, more or less
        self._last_first_s = now_s
        self._meters.prefill_time.observe(now_s - live.arrival_s)
        with self._lock:
            self._load.begun(live, first.cached_tokens)
            self._load.stepped(sum(each.begun for each in self._load.live.values()), 0.0, 0, 0.0)
        if first.expected and not believed:
            live.unsure_s = now_s - begun_s
        else:
            self._meters.stepped(live.taken_tokens, now_s - begun_s)
        return replace(first, save=SaveResult("off")) if live.request.saves else first

    def _finish(self, live: LiveRequest, reason: FinishReason, cached: int | None) -> None:
        """End a complete answer; its usage is now known for certain."""
        if live.ended:
            return
        request = live.request
        last = EngineOutput(request.request_id)
        if not live.begun:
            last.first = self._first(live, FirstToken(cached or 0), believed=True)
        elif cached is not None:
            computed = len(request.token_ids) - cached
            if computed != live.taken_tokens:
                last.first = FirstToken(live.taken_tokens - computed, correction=True)
            live.taken_tokens = computed
            if live.unsure_s:
                self._meters.stepped(computed, live.unsure_s)
        if reason == "stop" and not request.sampling.max_tokens:
            reason = "length"
        self._end(live, reason, output=last)

    def _failure(self, live: LiveRequest, error: BaseException | None) -> tuple[ErrorKind, str]:
        if isinstance(error, WorkerGone | aiohttp.ClientError | OSError):
            logger.warning("request %s leaves its server: %s", live.request.request_id, error)
            self.seat.look_now()
            return "unavailable", BROKEN_OFF
        if isinstance(error, Busy):
            return "queue_full", FULL
        if isinstance(error, ValueError):
            return "invalid", str(error)
        logger.error("a request failed", exc_info=error)
        return "failed", "the engine failed this request"

    def _leaving(self, live: LiveRequest, reason: FinishReason) -> None:
        if live.taken_tokens:
            whole = len(live.request.token_ids)
            self._meters.admitted(live.request.tenant, whole, whole - live.taken_tokens, caching=True)
            self._meters.computed_prompt_tokens += live.taken_tokens
        super()._leaving(live, reason)
