"""The built-in engine: one loop thread around a scheduler, a prefix cache and a runner.

Requests arrive from any thread; outputs, cache events and load leave.
"""

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from msgspec import structs

from router.protocol.block_hash import ChainHasher, count_leading, hash_blocks
from router.protocol.events import LoadReport, StatsReport
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.core.load_reporter import LoadReporter
from serve_app.engine.core.loop import EngineLoop
from serve_app.engine.core.outputs import CacheEvents, LiveRequests, OutputProcessor
from serve_app.engine.kv.prompt_pins import PromptPins
from serve_app.engine.kv.tier_loader import TierLoader
from serve_app.engine.kv.transfer import PrefixTransfer
from serve_app.engine.protocol import Clock, EngineError, EngineRequest, EventSink, OutputSink
from serve_app.engine.reports import EngineMeters, gauge_samples
from serve_app.engine.scheduling.scheduler import Scheduler
from serve_app.engine.scheduling.sequence import SequenceState, check_request
from serve_app.engine.settings import STALL_AFTER_S, EngineSettings
from serve_app.engine.step import Runner, ceil_div, run_step

_log = logging.getLogger(__name__)


class TorchEngine:
    """A ``protocol.Engine``. The loop's condition guards live requests and the load view; the loop owns the rest."""

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
        self.runner = runner
        self._clock = clock
        self.cache = PrefixCache(
            settings.num_blocks,
            settings.block_size,
            enabled=settings.enable_prefix_caching,
            hash_chain=hash_chain,
            pin_budget_blocks=settings.pin_budget_blocks,
            shares=settings.tenant_shares,
            clock=clock,
        )
        self.adapters = runner.adapters
        self._meters = EngineMeters()
        self._loop = EngineLoop(self._run, self._deliver, clock, stall_after_s)
        self._live = LiveRequests(self.settings, clock)
        self.tier_loader = TierLoader(self.settings, self.cache, runner, self._meters, self._loop.wake, clock)
        self.scheduler = Scheduler(self.settings, self.cache, self.adapters, self.tier_loader.fetch)
        pins = PromptPins(self.cache, self._meters, clock, self.tier_loader.spiller.save)
        self.transfer = PrefixTransfer(
            self.cache, runner, self.scheduler, self.tier_loader, pins, self._loop.call, clock
        )
        self._outputs = OutputProcessor(
            self.scheduler, pins, self.tier_loader, self.adapters, self._live, self._meters, self.cache.enabled
        )
        self._events = CacheEvents(self.cache, self.tier_loader.tiers, event_sink)
        self._load_reporter = LoadReporter(self.settings, self._meters, self.scheduler)
        self._labels = (("engine", runner.kind),)

    def start(self) -> None:
        """Start the thread."""
        self._loop.start()

    def stop(self) -> None:
        """End the thread; unfinished requests end with an error."""
        self._loop.stop()

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """See ``protocol.Engine``. Also raises EngineError once stopped."""
        settings = self.settings
        check_request(
            request,
            vocab_size=self.runner.vocab_size,
            max_model_len=settings.max_model_len,
            max_blocks=settings.num_blocks - settings.pin_budget_blocks,
            block_size=settings.block_size,
        )
        ids = np.ascontiguousarray(request.token_ids, dtype=np.int32)
        chain = b""
        if self.cache.enabled:
            chain = request.block_hashes or self.cache.prompt_chain(request.scope, request.root, request.identity)
        sequence = SequenceState(structs.replace(request, token_ids=ids), sink, chain, self._clock())
        sequence.cached_blocks_hint = self.cache.index.count_held(chain, sequence.reusable_blocks(self.cache))
        with self._loop.changed:
            if self._loop.stopping:
                raise EngineError("the engine is stopped")
            self._live.check(request.request_id, request.tenant, self._load_reporter.retry_after_s())
            self.adapters.pin(request.scope.lora)
            self._live.add(sequence)
            self._load_reporter.arrived(sequence)
            self._loop.post(lambda: self._enter(sequence))

    def cancel(self, request_id: str) -> None:
        """Drop a request (any thread); its blocks are free within one step. Unknown ids are ignored."""
        self._loop.post(lambda: self._cancel(request_id))

    def load(self) -> LoadReport:
        """Return the load as of the last step, plus all requests submitted since."""
        with self._loop.changed:
            return self._load_reporter.report(self._clock())

    def stats(self) -> StatsReport:
        """Return counters and gauges as Prometheus-style samples."""
        labels, load = self._labels, self._load_reporter
        gauges = gauge_samples(self.cache, labels, self.runner.block_bytes, load.running, load.waiting)
        parts = (self._meters, self.tier_loader, self.adapters)
        counted = (sample for part in parts for sample in part.samples(labels))
        return StatsReport(samples=(*counted, *gauges))

    def reset_prefix_cache(self, *, tiers: bool = True) -> bool:
        """See ``protocol.Engine``. Waits for the current step."""
        return self._loop.call(lambda: self._events.reset(tiers=tiers))

    def set_tenant_shares(self, shares: Mapping[str, float]) -> None:
        """See ``protocol.Engine``."""
        self._loop.call(lambda: self._set_tenant_shares(shares))

    def tell_cache(self, *, anew: bool = False) -> None:
        """See ``protocol.Engine``."""
        self._loop.call(lambda: self._events.send_digest(anew=anew))

    def retire(self, last_block: bytes, shared_tokens: int) -> None:
        """See ``protocol.Engine``."""
        cache, first = self.cache, ceil_div(shared_tokens, self.settings.block_size)

        def demote() -> None:
            cache.demote(cache.index.line_through(last_block)[first:])

        self._loop.post(demote)

    def wake(self) -> None:
        """Check again whether each request's ``remote_kv`` is done (any thread)."""
        self._loop.wake()

    def healthy(self) -> bool:
        """Return whether the loop is alive and its current step is not stalled."""
        return self._loop.healthy()

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block's KV."""
        return self.runner.block_bytes

    def cached_blocks(self, block_hashes: bytes, most: int) -> int:
        """Return how many of a chain's first ``most`` blocks are cached or being computed (any thread; a hint)."""
        index, pending = self.cache.index, self.scheduler.pending
        return count_leading(block_hashes, most, lambda block: index.held(block) or pending.has(block))

    def _run(self) -> None:
        reason = "the engine was stopped"
        try:
            while self.take_in():
                with self._loop.step():
                    self.step()
        except Exception:
            _log.exception("the engine loop died")
            reason = "the engine failed"
        self._fail_all(reason)

    def take_in(self) -> bool:
        """Wait for work and run the calls posted since the last step; False once stopping."""
        loop, live = self._loop, self._live
        with loop.changed:
            while not (loop.calls or loop.stopping or self._has_work() or live.next_deadline_s <= self._clock()):
                loop.changed.wait(self._until_expiry_s())
                self.cache.expire_pins()
            if loop.stopping:
                return False
        self.cache.expire_pins()
        loop.run_calls()
        with loop.changed:
            for request_id in live.take_overdue(self._clock()):
                self._outputs.cancel(request_id, "timeout", "The answer took too long; ask for fewer tokens.")
            self._load_reporter.update()
        self.tier_loader.begin_step()
        self._deliver()
        return True

    def _until_expiry_s(self) -> float | None:
        """Return how long an idle loop may sleep before a pin or a request expires."""
        pinned_s = self.cache.pins.next_expiry_s
        expiry_s = min(self._live.next_deadline_s, math.inf if pinned_s is None else pinned_s)
        return None if expiry_s == math.inf else min(max(0.05, expiry_s - self._clock()), 3600.0)

    def _has_work(self) -> bool:
        if len(self.scheduler.running):
            return True
        loader = self.tier_loader
        return self.scheduler.startable_count > loader.loading or loader.tiers.has_news

    def step(self) -> None:
        """Choose, compute and settle one step."""
        meters = self._meters
        chosen = self.scheduler.schedule(meters.prefill_tokens_per_s, *meters.decode_line_s)
        for sequence in self.scheduler.preempted:
            self._outputs.preempted(sequence)
        if not chosen:
            return
        started = self._clock()
        prefill_tokens = prompt_tokens = recomputed = 0
        with self._loop.changed:
            for item in chosen:
                if item.admitted:
                    self._outputs.admitted(item.sequence, started)
                if item.sequence.computed < item.sequence.prefill_tokens:
                    fresh, again = item.sequence.split_prefill(item.tokens)
                    prefill_tokens += item.tokens
                    prompt_tokens += fresh
                    recomputed += again
            self._load_reporter.begin_step(chosen)
        segments = [item.sequence.segment(item.tokens) for item in chosen]
        run_step(self.runner, segments)
        now = self._clock()
        meters.stepped(prefill_tokens, now - started, len(chosen))
        meters.computed_prompt_tokens += prompt_tokens
        meters.recomputed_tokens += recomputed
        with self._loop.changed:
            for item, segment in zip(chosen, segments, strict=True):
                self._outputs.process(item, segment, now)
            self._load_reporter.update()
        self._deliver()

    def _deliver(self) -> None:
        """Send cache events, then outputs: the routers know the events before a follow-up request arrives."""
        self._events.send()
        self._outputs.outbox.deliver()

    def _fail_all(self, reason: str) -> None:
        """End every request with an error, and close the tiers."""
        with self._loop.changed:
            self._loop.stopping = True
            self._loop.run_calls(last=True)
            for sequence in [*self.scheduler.waiting, *self.scheduler.running]:
                self._outputs.end(sequence, "error", message=reason)
            self._load_reporter.update()
        self._deliver()
        self.tier_loader.spiller.close()

    def _enter(self, sequence: SequenceState) -> None:
        self.tier_loader.learn(sequence.request)
        self.scheduler.add(sequence)
        with self._loop.changed:
            self._load_reporter.entered(sequence)

    def _cancel(self, request_id: str) -> None:
        with self._loop.changed:
            self._outputs.cancel(request_id)

    def _set_tenant_shares(self, shares: Mapping[str, float]) -> None:
        self.cache.set_shares(shares)
        self.tier_loader.tiers.set_shares(shares)
        with self._loop.changed:
            self._live.waiting.shares.set_weights(shares)
            self._load_reporter.tenants = len(shares)
