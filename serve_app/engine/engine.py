"""The built-in engine: one loop thread around a scheduler, a prefix cache and a runner.

Owns the inbox, the loop and every request's end. Knows nothing of Ray, HTTP, text or routing policy. Requests
flow in from any thread; outputs, cache events and load flow out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from router.block_hash import PrefixScope, TokenArray, hash_blocks
from router.events import CacheCleared, Event, LoadReport, StatsReport
from serve_app.cache.prefix_cache import ChainHasher, PrefixCache
from serve_app.cache.tiers import Tiers
from serve_app.cache.transfer import KvChain
from serve_app.engine.adapter import AdapterSpec
from serve_app.engine.admission import RESERVE
from serve_app.engine.gauges import gauge_samples
from serve_app.engine.load_view import LoadView
from serve_app.engine.lower_tiers import LowerTiers
from serve_app.engine.meters import EngineMeters
from serve_app.engine.outbox import Outbox
from serve_app.engine.prefix_transfer import PrefixTransfer
from serve_app.engine.protocol import (
    EngineError,
    EngineRequest,
    EngineSettings,
    EventSink,
    FinishReason,
    ImportedPrefix,
    OutputSink,
    QueueFull,
)
from serve_app.engine.saves import Saves
from serve_app.engine.scheduler import Scheduled, Scheduler
from serve_app.engine.sequence import Sequence as RequestSequence
from serve_app.engine.sequence import check_request
from serve_app.engine.speculation_meters import SpeculationMeters
from serve_app.engine.step import Runner, Segment, SegmentResult

_log = logging.getLogger(__name__)

STALL_AFTER_S = 120.0
"""A step that runs longer than this makes the engine unhealthy."""

Clock = Callable[[], float]
T = TypeVar("T")


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
            settings.num_blocks,
            settings.block_size,
            enabled=settings.enable_prefix_caching,
            hash_chain=hash_chain,
            pin_budget_blocks=settings.pin_budget_blocks,
            shares=settings.tenant_shares,
            clock=clock,
        )
        self._scheduler = Scheduler(self.settings, self._cache, runner.adapters)
        self._meters = EngineMeters()
        self._speculation = SpeculationMeters()
        self._saves = Saves(self._cache, self._meters)
        self._changed = threading.Condition()
        self._lower = self._open_tiers()
        self._transfer = PrefixTransfer(self._cache, runner, self._scheduler, self._on_loop)
        self._outbox = Outbox(self._meters)
        self._inbox: dict[str, RequestSequence] = {}
        self._cancels: list[str] = []
        self._calls: list[Callable[[], None]] = []
        self._live: dict[str, None] = {}
        self._waiting: Counter[str] = Counter()
        self._load = LoadView(self.settings)
        self._stopping = False
        self._closed = False
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
        """Queue a request (any thread).

        Raises RequestTooLong, QueueFull, UnknownAdapter, EngineError once stopped, or ValueError.
        """
        settings = self.settings
        check_request(
            request,
            vocab_size=self._runner.vocab_size,
            max_model_len=settings.max_model_len,
            max_blocks=settings.num_blocks - settings.pin_budget_blocks,
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
            if self._waiting.total() >= self._most_waiting(request.tenant):
                raise QueueFull(f"{self._waiting.total()} requests are waiting", self._load.retry_after_s())
            self._runner.adapters.pin(request.scope.lora)
            self._live[request.request_id] = None
            self._waiting[request.tenant] += 1
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
        with self._changed:
            waiting = self._waiting.total()
        gauges = gauge_samples(
            self._cache, self._labels, self._runner.block_bytes, self._scheduler.running_count, waiting
        )
        counted = (*self._meters.samples(self._labels), *self._speculation.samples(self._labels))
        tiers = self._lower.samples(self._labels) if self._lower is not None else ()
        adapters = self._runner.adapters.samples(self._labels)
        return StatsReport(samples=(*counted, *gauges, *tiers, *adapters))

    def reset_prefix_cache(self, *, tiers: bool = True) -> bool:
        """Forget every cached block not in use; False when blocks in use were kept. Waits for the current step.

        ``tiers``: also what lies below the pool.
        """
        return self._on_loop(lambda: self._reset(tiers))

    def export_prefix(self, scope: PrefixScope, root: bytes, token_ids: TokenArray) -> KvChain | None:
        """Return the KV of the pool's longest prefix of ``token_ids``, in whole blocks; None when there is none."""
        return self._transfer.export_prefix(scope, root, token_ids)

    def import_prefix(
        self, chain: KvChain, scope: PrefixScope, root: bytes, *, tenant: str = "default"
    ) -> ImportedPrefix:
        """Take as much of a chain as there is room for; what is held is kept. Raises a TransferError."""
        return self._transfer.import_prefix(chain, scope, root, tenant)

    def load_adapter(self, spec: AdapterSpec) -> None:
        """Make a LoRA adapter available while requests go on; reads files, so not for an event loop.

        Raises AdapterError when it cannot be served, QueueFull while all adapters in memory are needed.
        """
        self._runner.adapters.load(spec)

    def unload_adapter(self, key: str) -> bool:
        """Refuse new requests for an adapter; those it has go on. False when it is not loaded."""
        return self._runner.adapters.unload(key)

    def adapters(self) -> tuple[str, ...]:
        """Keys of the loaded adapters."""
        return self._runner.adapters.loaded

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
        with self._changed:
            while not (self._stopping or self._inbox or self._cancels or self._calls or self._has_work()):
                self._changed.wait(self._until_expiry_s())
                self._cache.expire_pins()
            if self._stopping:
                return False
            self._cache.expire_pins()
            for sequence in self._inbox.values():
                first = self._saves.arrived(sequence)
                if first is not None:
                    self._live[first.request.request_id] = None
                    self._runner.adapters.pin_too(first.request.scope.lora)
                    self._waiting[first.request.tenant] += 1
                    self._scheduler.add(first)
                self._scheduler.add(sequence)
            self._inbox.clear()
            for request_id in self._cancels:
                found = self._scheduler.find(request_id)
                if found is not None:
                    self._drop(found, "cancelled")
                    unwanted = self._scheduler.find(self._saves.abandoned(found) or "")
                    if unwanted is not None:
                        self._drop(unwanted, "cancelled")
            self._cancels.clear()
            self._load.update(self._scheduler, self._meters, ())
            calls, self._calls = self._calls, []
        for call in calls:
            call()
        if self._lower is not None:
            self._lower.begin_step()
        self._deliver()
        return True

    def _until_expiry_s(self) -> float | None:
        """Return how long an idle loop may sleep before a pin's time is over."""
        expiry_s = self._cache.pins.next_expiry_s
        return None if expiry_s is None else min(max(0.05, expiry_s - self._clock()), 3600.0)

    def _most_waiting(self, tenant: str) -> int:
        """Return the length of the waiting line beyond which a tenant is refused.

        Among several tenants the last eighth is for those that do not fill more than their part of the line.
        """
        most, tenants = self.settings.max_waiting_requests, len(self.settings.tenant_shares)
        others = sum(1 for other in self._waiting if other != tenant)
        if tenants > 1 and self._waiting[tenant] >= max(1, most // (others + 2)):
            return most - most // RESERVE
        return most

    def _waits_no_more(self, sequence: RequestSequence) -> None:
        tenant = sequence.request.tenant
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _has_work(self) -> bool:
        if self._scheduler.running_count:
            return True
        lower = self._lower
        if lower is None:
            return self._scheduler.waiting_count > 0
        return self._scheduler.waiting_count > lower.loading or lower.tiers.has_news

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
        results = self._execute([item.sequence.segment(item.tokens, item.drafts) for item in chosen])
        now = self._clock()
        self._meters.stepped(prefill_tokens, now - started)
        self._meters.computed_prompt_tokens += prefill_tokens
        with self._changed:
            for item, result in zip(chosen, results, strict=True):
                self._settle(item, result, now)
            self._load.update(self._scheduler, self._meters, self._inbox.values())
        self._deliver()

    def _execute(self, segments: Sequence[Segment]) -> list[SegmentResult]:
        """Run a step; when it raises, run each segment alone once, so that only the bad ones fail."""
        try:
            return self._runner.execute(segments)
        except Exception as error:
            _log.warning("a step of %d sequences failed", len(segments), exc_info=True)
            if len(segments) == 1:
                return [SegmentResult(error=_reason(error))]
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
            self._waits_no_more(sequence)
        self._meters.queue_time.observe(now - sequence.arrival_s)
        self._meters.admitted(
            sequence.request.tenant, sequence.prompt_tokens, sequence.cached_tokens, caching=self._cache.enabled
        )

    def _settle(self, item: Scheduled, result: SegmentResult, now: float) -> None:
        """Take one segment's result: publish its blocks, append its token, or end its request."""
        sequence = item.sequence
        if result.error:
            self._drop(sequence, "error", error=result.error)
            return
        reason: FinishReason | None = "length"
        tokens: tuple[int, ...] = ()
        taken = 0
        if result.token is not None:
            tokens = (*result.accepted, result.token)
            taken, reason = sequence.append_tokens(tokens)
            tokens = tokens[: taken - 1 if reason == "stop" else taken]
            self._meters.generation_tokens += taken
        if result.drafted is not None:
            sequence.drafted = result.drafted
            self._speculation.settled(result, taken)
        self._scheduler.computed(item, max(taken - 1, 0))
        if sequence.prefilling:
            return
        if reason is not None:
            self._drop(sequence, reason, tokens=tokens, now=now)
        else:
            self._outbox.progress(sequence, tokens, now)

    def _drop(
        self,
        sequence: RequestSequence,
        reason: FinishReason,
        *,
        tokens: tuple[int, ...] = (),
        error: str = "",
        now: float | None = None,
    ) -> None:
        """End a request and free its blocks. The lock is held."""
        request_id = sequence.request.request_id
        is_save = self._saves.ended(sequence, reason)
        self._scheduler.remove(request_id)
        self._live.pop(request_id, None)
        if self._lower is not None:
            self._lower.forget(request_id)
        self._runner.adapters.unpin(sequence.request.scope.lora)
        if sequence.scheduled_s is None:
            self._waits_no_more(sequence)
        if not is_save:
            self._outbox.end(sequence, reason, tokens=tokens, error=error, now=now)

    def _deliver(self) -> tuple[Event, ...]:
        events: tuple[Event, ...] = self._cache.take_events()
        if self._lower is not None:
            events = (*events, *self._lower.take_events())
        self._outbox.deliver(events, self._event_sink)
        return events

    def _fail_all(self, reason: str) -> None:
        with self._changed:
            self._stopping = self._closed = True
            for sequence in [*self._inbox.values(), *self._scheduler.waiting, *self._scheduler.running]:
                self._drop(sequence, "error", error=reason)
            self._inbox.clear()
            self._load.update(self._scheduler, self._meters, ())
            calls, self._calls = self._calls, []
        for call in calls:
            call()
        self._deliver()
        if self._lower is not None:
            self._lower.close()

    def _on_loop(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, run by the loop between two steps; at once where no loop runs."""
        answer: Future[T] = Future()

        def call() -> None:
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)

        with self._changed:
            if self._thread is None or self._closed or self._thread is threading.current_thread():
                call()
                self._deliver()
            else:
                self._calls.append(call)
                self._changed.notify_all()
        return answer.result()

    def _reset(self, tiers: bool) -> bool:
        if self._lower is not None and tiers:
            self._lower.tiers.clear()
            self._deliver()
        complete = self._cache.reset()
        # A cleared pool is announced as a cleared replica: what stays below has to be told again.
        if CacheCleared() in self._deliver() and self._lower is not None:
            self._lower.tiers.announce()
        return complete

    def _open_tiers(self) -> LowerTiers | None:
        settings, runner = self.settings, self._runner
        if not (settings.tiers.on and settings.enable_prefix_caching):
            return None
        tiers = Tiers(settings.tiers, runner.kv_format, runner.block_bytes, self._wake)
        lower = LowerTiers(
            self._cache, runner, tiers, settings.tiers.load_ratio, lambda: self._meters.prefill_tokens_per_s
        )
        self._scheduler.fetch = lower.fetch
        self._saves.file = lower.save
        return lower

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


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

    Raises UnsupportedModel for attention this engine does not compute, OSError when there is no checkpoint,
    ValueError when ``settings.speculative_model`` cannot draft for it.
    """
    from serve_app.engine.model_runner import ModelRunner
    from serve_app.engine.speculative import load_speculative

    load: Callable[[str | Path, EngineSettings], Runner] = (
        load_speculative if settings.num_speculative_tokens else ModelRunner
    )

    # Loaded in a thread that ends: OpenMP workers left to the caller's thread would share the cores with the loop's,
    # and libgomp then puts every worker to sleep after each operation (a decode step takes 14 ms instead of 8).
    with ThreadPoolExecutor(max_workers=1) as loader:
        runner = loader.submit(load, model_path, settings).result()
    return TorchEngine(runner, settings, event_sink, clock=clock)
