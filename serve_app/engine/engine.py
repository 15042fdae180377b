"""The built-in engine: one loop thread around a scheduler, a prefix cache and a runner.

Owns the inbox, the loop and every request's end. Knows nothing of Ray, HTTP, text or routing policy. Requests
flow in from any thread; outputs, cache events and load flow out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from router.block_hash import hash_blocks
from router.events import LoadReport, StatsReport
from serve_app.cache.prefix_cache import ChainHasher, PrefixCache
from serve_app.engine.load_view import LoadView
from serve_app.engine.meters import EngineMeters, Sample
from serve_app.engine.protocol import (
    EngineError,
    EngineOutput,
    EngineRequest,
    EngineSettings,
    EventSink,
    FinishReason,
    OutputSink,
    QueueFull,
)
from serve_app.engine.scheduler import Scheduled, Scheduler
from serve_app.engine.sequence import Sequence as RequestSequence
from serve_app.engine.sequence import check_request
from serve_app.engine.step import Runner, Segment, SegmentResult

_log = logging.getLogger(__name__)

STALL_AFTER_S = 120.0
"""A step that runs longer than this makes the engine unhealthy."""

Clock = Callable[[], float]


class TorchEngine:
    """Continuous batching with a prefix cache; satisfies ``protocol.Engine``.

    The lock guards the inbox, the set of live requests and the load view; scheduler and cache belong to the loop.
    """

    def __init__(
        self,
        runner: Runner,
        settings: EngineSettings,
        event_sink: EventSink,
        *,
        clock: Clock = time.monotonic,
        stall_after_s: float = STALL_AFTER_S,
        hash_chain: ChainHasher = hash_blocks,
    ) -> None:
        if settings.max_num_batched_tokens <= settings.max_num_seqs:
            raise ValueError("max_num_batched_tokens must exceed max_num_seqs, or prefill could starve")
        self.settings = replace(settings, max_model_len=min(settings.max_model_len, runner.max_positions))
        self._runner = runner
        self._event_sink = event_sink
        self._clock = clock
        self._stall_after_s = stall_after_s
        self._cache = PrefixCache(
            settings.num_blocks, settings.block_size, enabled=settings.enable_prefix_caching, hash_chain=hash_chain
        )
        self._scheduler = Scheduler(self.settings, self._cache)
        self._meters = EngineMeters()
        self._changed = threading.Condition()
        self._inbox: dict[str, RequestSequence] = {}
        self._cancels: list[str] = []
        self._resets: list[_Reset] = []
        self._live: dict[str, None] = {}
        self._waiting = 0
        self._load = LoadView(self.settings)
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._step_started_s: float | None = None
        self._labels = (*settings.labels, ("engine", runner.kind))

    def start(self) -> None:
        """Start the loop thread. Raises EngineError when it was started before."""
        if self._thread is not None:
            raise EngineError("the engine was started before")
        self._thread = threading.Thread(target=self._run, name="warmpath-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the loop after its current step; unfinished requests get an "error" output."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is None:
            self._fail_all("the engine was stopped")
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Queue a request (any thread). Raises RequestTooLong, QueueFull, EngineError once stopped, or ValueError."""
        settings = self.settings
        check_request(
            request,
            vocab_size=self._runner.vocab_size,
            max_model_len=settings.max_model_len,
            max_blocks=settings.num_blocks,
            block_size=settings.block_size,
        )
        ids = np.ascontiguousarray(request.token_ids, dtype=np.int32)
        chain = b""
        if self._cache.enabled:
            chain = request.block_hashes or self._cache.chain(request.root, ids)
        sequence = RequestSequence(replace(request, token_ids=ids), sink, chain, self._clock())
        sequence.held_blocks_hint = self._cache.count_held(chain, self._cache.reusable_blocks(len(ids)))
        with self._changed:
            if self._stopping:
                raise EngineError("the engine is stopped")
            if request.request_id in self._live:
                raise ValueError(f"request id {request.request_id!r} is in use")
            if self._waiting >= settings.max_waiting_requests:
                raise QueueFull(f"{self._waiting} requests are waiting", self._load.retry_after_s())
            self._live[request.request_id] = None
            self._waiting += 1
            self._inbox[request.request_id] = sequence
            self._load.arrived(sequence)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """Drop a request (any thread); its blocks are free within one step. Unknown ids are ignored."""
        with self._changed:
            if request_id in self._live:
                self._cancels.append(request_id)
                self._changed.notify_all()

    def load(self) -> LoadReport:
        """Return the load as of the last step, with everything submitted since."""
        with self._changed:
            return self._load.report()

    def stats(self) -> StatsReport:
        """Return counters and gauges as Prometheus-style samples."""
        return StatsReport(samples=(*self._meters.samples(self._labels), *self._gauges()))

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block not in use; False when blocks in use were kept. Waits for the current step."""
        reset = _Reset()
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                return self._reset()
            self._resets.append(reset)
            self._changed.notify_all()
        reset.done.wait()
        return reset.complete

    def healthy(self) -> bool:
        """Return whether the loop is alive and its current step has not run for too long."""
        if self._thread is None or not self._thread.is_alive() or self._stopping:
            return False
        started = self._step_started_s
        return started is None or self._clock() - started < self._stall_after_s

    def _run(self) -> None:
        reason = "the engine was stopped"
        try:
            while self._drain():
                self._step_started_s = self._clock()
                self._step()
                self._step_started_s = None
        except Exception:
            _log.exception("the engine loop died")
            reason = "the engine failed"
        self._fail_all(reason)

    def _drain(self) -> bool:
        """Wait for work, take in what was asked for since the last step; False once stopping."""
        outputs: dict[OutputSink, list[EngineOutput]] = {}
        with self._changed:
            while not (self._stopping or self._inbox or self._cancels or self._resets or self._has_work()):
                self._changed.wait()
            if self._stopping:
                return False
            for sequence in self._inbox.values():
                self._scheduler.add(sequence)
            self._inbox.clear()
            for request_id in self._cancels:
                dropped = self._scheduler.remove(request_id)
                if dropped is not None:
                    self._end(dropped, "cancelled", outputs)
            self._cancels.clear()
            for reset in self._resets:
                reset.complete = self._reset()
                reset.done.set()
            self._resets.clear()
            self._load.update(self._scheduler, self._meters, self._inbox.values())
        self._deliver(outputs)
        return True

    def _has_work(self) -> bool:
        return bool(self._scheduler.running_count or self._scheduler.waiting_count)

    def _step(self) -> None:
        chosen = self._scheduler.schedule()
        if not chosen:
            return
        started = self._clock()
        prefill_tokens = 0
        for item in chosen:
            if item.admitted:
                self._admitted(item.sequence, started)
            if item.sequence.prefilling:
                prefill_tokens += item.tokens
        results = self._execute([item.sequence.segment(item.tokens) for item in chosen])
        now = self._clock()
        self._meters.stepped(prefill_tokens, now - started)
        self._meters.computed_prompt_tokens += prefill_tokens
        outputs: dict[OutputSink, list[EngineOutput]] = {}
        with self._changed:
            for item, result in zip(chosen, results, strict=True):
                self._settle(item, result, now, outputs)
            self._load.update(self._scheduler, self._meters, self._inbox.values())
        self._deliver(outputs)

    def _execute(self, segments: Sequence[Segment]) -> list[SegmentResult]:
        """Run a step; when it raises, run each segment alone once, so that only the bad ones fail."""
        try:
            return self._runner.execute(segments)
        except Exception as error:
            if len(segments) == 1:
                return [SegmentResult(error=_reason(error))]
            _log.warning("a step of %d sequences failed (%s): retrying each alone", len(segments), error)
        results = []
        for segment in segments:
            try:
                results.extend(self._runner.execute([segment]))
            except Exception as error:
                results.append(SegmentResult(error=_reason(error)))
        return results

    def _admitted(self, sequence: RequestSequence, now: float) -> None:
        sequence.scheduled_s = now
        with self._changed:
            self._waiting -= 1
        self._meters.queue_time.observe(now - sequence.arrival_s)
        self._meters.admitted(
            sequence.request.tenant, sequence.prompt_tokens, sequence.cached_tokens, caching=self._cache.enabled
        )

    def _settle(
        self, item: Scheduled, result: SegmentResult, now: float, outputs: dict[OutputSink, list[EngineOutput]]
    ) -> None:
        """Take one segment's result: publish its blocks, append its token, or end its request."""
        sequence = item.sequence
        if result.error:
            self._scheduler.remove(sequence.request.request_id)
            self._end(sequence, "error", outputs, error=result.error)
            return
        self._scheduler.computed(item)
        if sequence.prefilling:
            return
        reason: FinishReason | None = "length"
        tokens: tuple[int, ...] = ()
        if result.token is not None:
            reason = sequence.append_token(result.token)
            tokens = () if reason == "stop" else (result.token,)
            self._meters.generation_tokens += 1
        if reason is not None:
            self._scheduler.remove(sequence.request.request_id)
            self._end(sequence, reason, outputs, tokens=tokens, now=now)
        else:
            self._emit(sequence, outputs, self._timed(sequence, EngineOutput("", tokens), now))

    def _timed(self, sequence: RequestSequence, output: EngineOutput, now: float) -> EngineOutput:
        """Complete an output; the first one of a request also says what was cached and how long it queued."""
        output = replace(output, request_id=sequence.request.request_id)
        if sequence.last_token_s is not None:
            self._meters.inter_token.observe(now - sequence.last_token_s)
        else:
            self._meters.ttft.observe(now - sequence.arrival_s)
            scheduled = sequence.arrival_s if sequence.scheduled_s is None else sequence.scheduled_s
            output = replace(output, cached_tokens=sequence.cached_tokens, queue_s=scheduled - sequence.arrival_s)
        sequence.last_token_s = now
        return output

    def _end(
        self,
        sequence: RequestSequence,
        reason: FinishReason,
        outputs: dict[OutputSink, list[EngineOutput]],
        *,
        tokens: tuple[int, ...] = (),
        error: str = "",
        now: float | None = None,
    ) -> None:
        """Close a request that the scheduler has let go. The lock is held."""
        request_id = sequence.request.request_id
        self._live.pop(request_id, None)
        if sequence.scheduled_s is None:
            self._waiting -= 1
        self._meters.finish(reason)
        output = EngineOutput(request_id, tokens, finish_reason=reason, error=error)
        if now is not None:
            output = self._timed(sequence, output, now)
        self._emit(sequence, outputs, output)

    def _emit(
        self, sequence: RequestSequence, outputs: dict[OutputSink, list[EngineOutput]], output: EngineOutput
    ) -> None:
        outputs.setdefault(sequence.sink, []).append(output)

    def _deliver(self, outputs: dict[OutputSink, list[EngineOutput]]) -> None:
        """Send cache events, then outputs: a follow-up request finds the routers already told."""
        events = self._cache.take_events()
        if events:
            try:
                self._event_sink(events)
            except Exception:
                _log.exception("the event sink failed; %d cache events are lost", len(events))
        for sink, batch in outputs.items():
            try:
                sink(batch)
            except Exception:
                _log.exception("an output sink failed for %s", ", ".join(o.request_id for o in batch))

    def _reset(self) -> bool:
        complete = self._cache.reset()
        if self._thread is None or not self._thread.is_alive():
            self._deliver({})
        return complete

    def _fail_all(self, reason: str) -> None:
        outputs: dict[OutputSink, list[EngineOutput]] = {}
        with self._changed:
            self._stopping = True
            left = [*self._inbox.values(), *self._scheduler.waiting, *self._scheduler.running]
            self._inbox.clear()
            for sequence in left:
                self._scheduler.remove(sequence.request.request_id)
                self._end(sequence, "error", outputs, error=reason)
            for reset in self._resets:
                reset.complete = self._cache.reset()
                reset.done.set()
            self._resets.clear()
            self._load.update(self._scheduler, self._meters, self._inbox.values())
        self._deliver(outputs)

    def _gauges(self) -> list[Sample]:
        pool, labels, block_bytes = self._cache.pool, self._labels, self._runner.block_bytes
        counts = {"used": pool.used_blocks, "cached": pool.idle_blocks, "free": pool.free_blocks}
        samples: list[Sample] = [
            ("warmpath_num_requests_running", labels, float(self._scheduler.running_count)),
            ("warmpath_num_requests_waiting", labels, float(self._waiting)),
            ("warmpath_kv_cache_usage_perc", labels, counts["used"] / pool.total_blocks),
            ("warmpath_prefix_cache_blocks", labels, float(self._cache.indexed_blocks)),
            ("warmpath_prefix_cache_bytes", labels, float(self._cache.indexed_blocks * block_bytes)),
            ("warmpath_prefix_cache_evicted_blocks_total", labels, float(self._cache.evicted_blocks)),
        ]
        for state, blocks in counts.items():
            by_state = (*labels, ("state", state))
            samples.append(("warmpath_kv_cache_blocks", by_state, float(blocks)))
            samples.append(("warmpath_kv_cache_bytes", by_state, float(blocks * block_bytes)))
        return samples


class _Reset:
    """A request to reset the prefix cache, and its answer."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.complete = False


def _reason(error: Exception) -> str:
    return f"the forward failed: {type(error).__name__}"


def build_engine(
    model_path: str | Path,
    settings: EngineSettings,
    event_sink: EventSink,
    *,
    clock: Clock = time.monotonic,
) -> TorchEngine:
    """Load a local checkpoint and return its engine, not started.

    Raises UnsupportedModel for attention this engine does not compute, OSError when there is no checkpoint.
    """
    from serve_app.engine.model_runner import ModelRunner

    # Loaded in a thread that ends: OpenMP workers left to the caller's thread would share the cores with the loop's,
    # and libgomp then puts every worker to sleep after each operation (a decode step takes 14 ms instead of 8).
    with ThreadPoolExecutor(max_workers=1) as loader:
        runner = loader.submit(ModelRunner, model_path, settings).result()
    return TorchEngine(runner, settings, event_sink, clock=clock)
