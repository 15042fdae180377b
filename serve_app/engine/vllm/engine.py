"""vLLM behind the engine's contract: requests in, tokens, cache events and load out.

Requests arrive from any thread; all outputs and events of vLLM arrive in the loop of ``VllmFrontend``.
"""

import asyncio
import math
import time
from bisect import bisect
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from msgspec import structs

from router.protocol.events import HOST_TIER, LoadReport, StatsReport
from router.protocol.samples import Histogram, Sample
from router.vllm_events.pool import FollowedPool
from router.vllm_events.subscriber import EventSubscriber
from serve_app.cache.tiers.tier import LOAD_BUCKETS_S
from serve_app.config.engine import MOST_AHEAD
from serve_app.engine.load_mirror import LiveRequest
from serve_app.engine.outside import OutsideEngine
from serve_app.engine.protocol import (
    EngineOutput,
    EngineRequest,
    ErrorKind,
    EventSink,
    FinishReason,
    FirstToken,
    OutputSink,
    prompt_outputs,
)
from serve_app.engine.reports import pin_samples
from serve_app.engine.scheduling.sequence import check_request, possible
from serve_app.engine.settings import STALL_AFTER_S
from serve_app.engine.step import ceil_div
from serve_app.engine.vllm.adapters import VllmAdapters
from serve_app.engine.vllm.event_endpoints import EventEndpoints
from serve_app.engine.vllm.frontend import Generated, VllmFrontend
from serve_app.engine.vllm.sampling.params import vllm_sampling
from serve_app.engine.vllm.saves import VllmSaves
from serve_app.engine.vllm.scheduling.tenant import salt_of, scope_args, tenant_args
from serve_app.engine.vllm.settings import VllmSettings, capability_samples
from serve_app.engine.vllm.tiers import VllmTiers
from serve_app.engine.vllm.transfer.job_runner import JobRunner
from serve_app.engine.vllm.transfer.migration import VllmMigration

_LABELS = (("engine", "vllm"),)
_REASONS: dict[str, FinishReason | None] = {"": None, "stop": "stop", "length": "length", "abort": "cancelled"}
_LOADS = 2
"""Most loads from tiers that a request waits for: after another request's, one of its own."""
LAST_STEP_S = 5.0
"""How long to wait for the end of the step in which a request was left, if vLLM reports none."""
_RESET_TOLD_S = 10.0
"""How long to wait for vLLM's events to report a reset."""


class VllmEngine(OutsideEngine):
    """Continuous batching by vLLM in child processes; satisfies ``protocol.Engine``."""

    def __init__(self, settings: VllmSettings, event_sink: EventSink) -> None:
        """Start vLLM, which takes half a minute or more. Raises the errors of ``VllmFrontend``."""
        super().__init__(settings, time.monotonic)
        self.settings = settings
        self._progress_s = time.monotonic()
        self._host_loads, self._host_bytes = Histogram(LOAD_BUCKETS_S), 0.0
        self._endpoints = EventEndpoints.create()
        directory = self._endpoints.directory
        try:
            self._frontend = VllmFrontend(settings, self._endpoints, self._stepped, self._meters.drafts)
        except BaseException:
            self._endpoints.remove()
            raise
        self.facts = facts = self._frontend.facts
        self.off = off = self._frontend.off
        self.settings = settings = self._frontend.settings
        self._loop = self._frontend.loop
        self._pool = FollowedPool(settings.block_size, facts.num_blocks)
        self._predicts = settings.enable_prefix_caching and "predictions" not in off
        group = settings.data_parallel
        sockets = self._endpoints.of_rank(0 if group is None else group.rank)
        self.adapters = VllmAdapters(directory / "adapters", self._frontend, settings).slots
        self._jobs = JobRunner(self._frontend, self.adapters, self._copies)
        self._saves = VllmSaves(settings, facts, self._pool, self._jobs.run, self._meters)
        self._most_blocks = self._longest()
        self.transfer = VllmMigration(
            settings,
            facts,
            self._pool,
            self._saves.pins,
            directory,
            self._jobs.wait,
            lambda: self._load.kv_usage,
            lambda saved, prefix: self._frontend.call(self._saves.take_over(saved, prefix)).result(),
        )
        try:
            self._tiers = VllmTiers(
                settings,
                facts.num_blocks,
                self._pool,
                self.transfer,
                self._meters,
                self._saves.pins,
                lambda: bool(self._load.live),
                event_sink,
            )
        except BaseException:
            self._frontend.stop()
            self._endpoints.remove()
            raise
        self._saves.on_saved = self._tiers.saved
        self._events = EventSubscriber(*sockets, self._pool, self._tiers.hear)

    def start(self) -> None:
        """Begin to listen to vLLM's events, if it sends any; vLLM itself runs since construction."""
        if self.settings.tenant_shares:
            self._jobs.step(self.settings.tenant_shares)
        if self._predicts:
            self._events.start()
        self._tiers.start()

    def stop(self) -> None:
        """End vLLM's processes; unfinished requests get an "error" output."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        self._frontend.call(self._end_all()).result()
        self._tiers.close()
        self._events.stop()
        self._frontend.stop()
        self._endpoints.remove()

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Queue a request. Raises RequestTooLong, QueueFull, UnknownAdapter, EngineError once stopped, ValueError."""
        request, size = possible(request, self.off), self.settings.block_size
        sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens or 1)
        check_request(
            structs.replace(request, sampling=sampling),
            vocab_size=self.facts.vocab_size,
            max_model_len=self.facts.max_model_len,
            max_blocks=self._most_blocks,
            block_size=size,
        )
        extra = tenant_args(request.tenant, request.order, request.expected_tokens)
        extra |= scope_args(request.root, request.scope.public_blocks * size, store_kv=request.store_kv)
        params = vllm_sampling(request, extra, exact=self.settings.exact, off=self.off)
        if request.store_kv:
            self.transfer.note_owner(request.root, request.scope, request.tenant)
        self._tiers.note(request)
        self._enter(request, sink, self._pool, size, params)

    def _entering(self, request: EngineRequest) -> None:
        self.adapters.pin(request.scope.lora)
        if not self._load.live:
            self._progress_s = time.monotonic()

    def load(self) -> LoadReport:
        """Return the load as of the last step, plus all requests submitted since."""
        report = super().load()
        with self._lock:
            blocks, load_s = self._host_blocks_loaded(), self._host_loads.total
        more_blocks, more_s = self._tiers.loaded
        blocks, load_s = blocks + more_blocks, load_s + more_s
        return structs.replace(report, tier_tokens_per_s=blocks * self.settings.block_size / load_s if load_s else 0.0)

    def stats(self) -> StatsReport:
        """Return counters and gauges as Prometheus-style samples."""
        pins, cached_blocks = self._saves.pins, self._pool.held_blocks
        with self._lock:
            gauges = tuple(self._load.gauges(self.facts.num_blocks, cached_blocks, pins.blocks, _LABELS))
        return StatsReport(
            samples=(
                *self._meters.samples(_LABELS),
                *gauges,
                *capability_samples(self.off, _LABELS),
                ("warmpath_unplaced_kv_blocks_total", _LABELS, float(self._pool.unplaced)),
                ("warmpath_kv_cache_block_bytes", _LABELS, float(self.kv_block_bytes)),
                ("warmpath_kv_cache_block_tokens", _LABELS, self.facts.block_tokens),
                *pin_samples(pins, _LABELS, self._saves.recalled),
                *self.adapters.samples(_LABELS),
                *self._host_samples(),
                *self._tiers.samples(_LABELS),
            )
        )

    def _host_blocks_loaded(self) -> float:
        return self._host_bytes / max(1, self.kv_block_bytes)

    def _host_samples(self) -> list[Sample]:
        if not self.settings.kv_offloading_size:
            return []
        labels = (*_LABELS, ("tier", HOST_TIER))
        blocks = float(self._pool.host_blocks)
        return [
            ("warmpath_kv_tier_blocks", labels, blocks),
            ("warmpath_kv_tier_bytes", labels, blocks * self.kv_block_bytes),
            ("warmpath_kv_tier_hits_total", labels, self._host_blocks_loaded()),
            *self._host_loads.samples("warmpath_kv_tier_load_seconds", labels),
        ]

    def reset_prefix_cache(self, *, tiers: bool = True) -> bool:
        """Release saves and drop all cached blocks; return False, dropping none, while a request uses one."""
        self._frontend.call(self._saves.clear()).result()
        self._tiers.reset(tiers=tiers)
        self._events.cleared.clear()
        reset = partial(self._frontend.llm.reset_prefix_cache, reset_connector=bool(self.settings.kv_offloading_size))
        done = bool(self._frontend.call(reset()).result())
        if done and self._predicts:
            self._jobs.step()  # vLLM reports the reset with this step's events; earlier reports precede the reset
            self._events.cleared.wait(_RESET_TOLD_S)
        return done

    def tell_cache(self, *, anew: bool = False) -> None:
        """Send a digest of the pool by vLLM's events so far; ``anew``: all its blocks first."""
        self._events.tell(anew=anew)

    def set_tenant_shares(self, shares: Mapping[str, float]) -> None:
        """Use these tenants from now on: in the waiting queue, for saves, and in vLLM's scheduler and pool."""
        with self._lock:
            self._load.line.shares.set_weights(shares)
        self._frontend.call(self._saves.set_shares(shares)).result()
        self._tiers.tiers.set_shares(shares)
        self._jobs.step(shares)

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block's KV."""
        return self.settings.block_bytes

    def cached_blocks(self, block_hashes: bytes, most: int) -> int:
        """Return how many of a chain's first ``most`` blocks are cached, as of vLLM's last events (any thread)."""
        return self._pool.count_held(block_hashes, most)

    def retire(self, last_block: bytes, shared_tokens: int) -> None:
        """Leave vLLM's order of eviction as it is: the context goes in its turn."""

    def wake(self) -> None:
        """Check again whether the KV that requests wait for has arrived (any thread)."""
        with self._lock:
            for live in self._load.live.values():
                if live.request.remote_kv is not None:
                    self._loop.call_soon_threadsafe(live.woken.set)

    def healthy(self) -> bool:
        """Return whether vLLM's core and the listener live, and no request has stalled."""
        if self._stopping or self._frontend.errored or not self._events.healthy():
            return False
        with self._lock:
            return not self._load.live or time.monotonic() - self._progress_s < STALL_AFTER_S

    def _longest(self) -> int:
        """Return the blocks of the longest prompt and answer that fit beside all saves, and beside drafts.

        Without saves each request of the longest length fits, however few blocks its windows take.
        """
        facts, size = self.facts, self.settings.block_size
        kept = self._saves.pins.budget_blocks * len(facts.groups)
        if not kept:
            return facts.max_model_len
        ahead = int(self.settings.speculative_config.get("num_speculative_tokens") or MOST_AHEAD)
        if self.settings.speculative_config:
            kept += ceil_div(ahead, size) * len(facts.groups)
        longest = range(facts.max_model_len // size + 2)
        return bisect(longest, facts.num_blocks - kept, key=lambda blocks: facts.blocks_for(blocks * size)) - 1

    async def _generate(self, live: LiveRequest) -> None:
        request = live.request
        key = request.scope.lora
        lora = self.adapters.weights(key) if key else None
        parts = self._frontend.generate(
            request.request_id,
            request.token_ids.tolist(),
            salt_of(request.root),
            live.params,
            lora,
            at_once=partial(self._take_at_once, live),
        )
        left_s = live.arrival_s + request.timeout_s - time.monotonic()
        async with asyncio.timeout(None if left_s == math.inf else left_s), aclosing(parts):
            while request.remote_kv is not None and not request.remote_kv.done:
                await live.woken.wait()
                live.woken.clear()
            if request.remote_kv is not None:  # part of the KV to be copied may not have arrived
                self._recount(live)
            held = 0
            for _ in range(_LOADS):
                if (load := self._tiers.loader.begin(request, held)) is None:
                    break
                self._recount(live, load.known)
                try:
                    await asyncio.shield(asyncio.wrap_future(load.ended))
                finally:
                    self._tiers.loader.leave(load)
                held = load.held_of(request)
                self._recount(live, held)
                if load.request is request:
                    break
            self._saves.renew(request)
            async for part in parts:
                if not live.begun:
                    live.save = await self._saves.keep(request)
                    self._tiers.used(request, part.cached_tokens // self.settings.block_size)
                self._take(live, part)
                if live.ended:
                    return

    def _recount(self, live: LiveRequest, expected: int = 0) -> None:
        """Count a request's tokens to compute anew, by the pool; at least ``expected`` blocks will be there."""
        request, size = live.request, self.settings.block_size
        cached = max(expected, self._pool.count_held(request.block_hashes, (len(request.token_ids) - 1) // size))
        with self._lock:
            live.uncached_tokens = len(request.token_ids) - cached * size

    def _copies(self) -> None:
        with self._lock:
            self._load.copies()

    def _failure(self, live: LiveRequest, error: BaseException | None) -> tuple[ErrorKind, str]:
        # A dead core fails all its requests. Other replicas can go on with them, until this one is replaced.
        kind: ErrorKind = "unavailable" if self._frontend.errored else "failed"
        return kind, f"vLLM failed: {type(error).__name__}" if error else "vLLM ended it"

    def _take_at_once(self, live: LiveRequest, token_ids: Sequence[int]) -> bool:
        """Pass on tokens from the middle of an answer. Until the first part is read, all wait for it."""
        if not live.begun or live.ended:
            return False
        self._meters.generation_tokens += len(token_ids)
        self._outbox.add(live.sink, EngineOutput(live.request.request_id, tuple(token_ids)))
        return True

    def _take(self, live: LiveRequest, part: Generated) -> None:
        request, sampling = live.request, live.request.sampling
        self._progress_s = time.monotonic()
        if part.failure:
            kind, _, why = part.failure.partition(": ")
            self._end(live, "error", error="grammar" if kind == "grammar" else "failed", message=why)
            return
        for output in prompt_outputs(request.request_id, part.prompt_logprobs):
            self._outbox.add(live.sink, output)
        ids = part.token_ids if sampling.max_tokens else ()
        reason = _REASONS.get(part.finish_reason, "error")
        if reason == "stop" and not sampling.max_tokens:
            reason = "length"
        self._meters.generation_tokens += len(ids)
        if reason == "stop" and ids and ids[-1] not in sampling.shown_stop_token_ids:
            ids = ids[:-1]
        output = EngineOutput(request.request_id, ids, part.logprobs[: len(ids)])
        if not live.begun and reason != "cancelled":
            output.first = self._first(live, part)
        if reason is None:
            self._outbox.add(live.sink, output)
            return
        for _ in range(part.preemptions):
            self._meters.preempted(request.tenant)
        self._end(live, reason, output=output, message="vLLM ended it" if reason == "error" else "")

    def _first(self, live: LiveRequest, part: Generated) -> FirstToken:
        """Note a request's first part; return the facts that are reported once."""
        request = live.request
        whole = (len(request.token_ids) - 1) // self.settings.block_size * self.settings.block_size
        cached = min(part.cached_tokens, whole)  # vLLM counts a block of host memory whose last token it computes again
        self._meters.queue_time.observe(part.queue_s)
        self._meters.prefill_time.observe(max(0.0, time.monotonic() - live.arrival_s - part.queue_s))
        self._meters.admitted(
            request.tenant, len(request.token_ids), cached, caching=self.settings.enable_prefix_caching
        )
        with self._lock:
            self._load.begun(live, cached)
        return FirstToken(cached, part.queue_s, live.save)

    def _leaving(self, live: LiveRequest, reason: FinishReason) -> None:
        with self._lock:
            self._load.ended(live, left=reason == "cancelled")
            rests = not self._load.live
        if rests:
            self._tiers.rest()
        self.adapters.unpin(live.request.scope.lora)

    def _last(self, live: LiveRequest, last: EngineOutput) -> None:
        if live in self._load.left:  # nobody waits for its tokens
            self._loop.call_later(LAST_STEP_S, self._report_left)
        else:
            super()._last(live, last)

    def _report_left(self) -> None:
        """End the requests that were left, now that the step at that time is over."""
        with self._lock:
            left, self._load.left = self._load.left, []
        for live in left:
            last = EngineOutput(live.request.request_id, finish_reason="cancelled", prefilled=live.prefilled)
            self._outbox.add(live.sink, last)

    def _stepped(
        self, running: int, kv_usage: float, prompt_tokens: int, duration_s: float, loads: tuple[float, float]
    ) -> None:
        with self._lock:
            if loads[1]:
                self._host_loads.observe(loads[1] / self.settings.ranks)
                self._host_bytes += loads[0]
            self._load.stepped(running, kv_usage, prompt_tokens, duration_s)
            self._progress_s = time.monotonic()
            left = bool(self._load.left)
        if left:
            self._report_left()
