"""The ends of a step.

Its results become tokens and ends (``OutputProcessor``), and its events leave (``CacheEvents``).

A request that ends is removed everywhere, in order. Events of the pool and of the tiers below are in the order in which
they happened; a digest among them shows listeners whether their view is exact. Belongs to the engine's loop.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.protocol.events import POOL_TIER, BlocksStored, CacheCleared, CacheDigest, Event, TierDigest
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.cache.tiers.tiers import Tiers
from serve_app.engine.kv.prompt_pins import PromptPins
from serve_app.engine.kv.tier_loader import TierLoader
from serve_app.engine.protocol import (
    Clock,
    EngineOutput,
    ErrorKind,
    EventSink,
    FinishReason,
    FirstToken,
    QueueFull,
    prompt_outputs,
)
from serve_app.engine.reports import EngineMeters, Outbox
from serve_app.engine.scheduling.scheduler import Scheduled, Scheduler
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import AdapterSlots, Segment
from serve_app.fairness.shares import Budget, Shares

_log = logging.getLogger(__name__)


class CacheEvents:
    """The cache events of one engine."""

    def __init__(self, cache: PrefixCache, tiers: Tiers, sink: EventSink) -> None:
        self._cache = cache
        self._tiers = tiers
        self._sink = sink

    def send(self) -> tuple[Event, ...]:
        """Send the events since the last call, and return them."""
        events = (*self._cache.take_events(), *self._tiers.take_events())
        self._send(events)
        return events

    def send_digest(self, *, anew: bool) -> None:
        """Send the digest after all events so far; ``anew``: and before it all held blocks."""
        index = self._cache.index
        self.send()
        if anew:
            self._send((CacheCleared(), BlocksStored(b"".join(entry.block_hash for entry in index))))
            self._tiers.announce()
            self.send()
        pool = TierDigest(POOL_TIER, len(index), index.xor)
        self._send((CacheDigest((pool, *self._tiers.digests())),))

    def reset(self, *, tiers: bool) -> bool:
        """Drop all cached blocks not in use, and those of the tiers if ``tiers``; False if some were kept."""
        if tiers:
            self._tiers.clear()
            self.send()
        complete = self._cache.reset()
        # A cleared pool is announced as a cleared replica: blocks that stay in tiers are announced again.
        if CacheCleared() in self.send():
            self._tiers.announce()
        return complete

    def _send(self, events: Sequence[Event]) -> None:
        if events:
            try:
                self._sink(events)
            except Exception:
                _log.exception("the event sink failed; %d cache events are lost", len(events))


class LiveRequests:
    """Deadlines of live requests; ``waiting``: those not admitted yet. The loop's condition guards it."""

    def __init__(self, settings: EngineSettings, clock: Clock) -> None:
        shares, limit = Shares(settings.tenant_shares, clock), "max_waiting_requests"
        self.waiting = Budget(shares, lambda: settings.max_waiting_requests, limit, "engine")
        self.next_deadline_s = math.inf
        self._deadlines_s: dict[str, float] = {}

    def check(self, request_id: str, tenant: str, retry_after_s: float) -> None:
        """Raise ValueError for an id in use, QueueFull if the queue is full for the tenant."""
        if request_id in self._deadlines_s:
            raise ValueError(f"request id {request_id!r} is in use")
        self.waiting.shares.touch(tenant)
        if self.waiting.verdict(tenant, 1) != "granted":
            raise QueueFull(self.waiting.reason(tenant), retry_after_s)

    def add(self, sequence: SequenceState) -> None:
        """Add a checked request."""
        deadline_s = sequence.arrival_s + sequence.request.timeout_s
        self._deadlines_s[sequence.request.request_id] = deadline_s
        self.next_deadline_s = min(self.next_deadline_s, deadline_s)
        self.waiting.take(sequence.request.tenant, 1)

    def take_overdue(self, now_s: float) -> list[str]:
        """Return the ids of overdue requests. Looks at all requests only if one may be overdue."""
        if now_s < self.next_deadline_s:
            return []
        deadlines = self._deadlines_s
        self.next_deadline_s = min((end_s for end_s in deadlines.values() if end_s > now_s), default=math.inf)
        return [request_id for request_id, end_s in deadlines.items() if end_s <= now_s]

    def admitted(self, sequence: SequenceState) -> None:
        """Note that a waiting sequence was admitted, or ended before that."""
        self.waiting.give_back(sequence.request.tenant, 1)

    def remove(self, sequence: SequenceState) -> None:
        """Note that a sequence is no longer live."""
        del self._deadlines_s[sequence.request.request_id]
        if sequence.scheduled_s is None:
            self.admitted(sequence)


@dataclass(frozen=True, slots=True)
class OutputProcessor:
    """Progress and ends of one engine's requests. Called with the loop's condition held."""

    scheduler: Scheduler
    pins: PromptPins
    tier_loader: TierLoader
    adapters: AdapterSlots
    live: LiveRequests
    meters: EngineMeters
    caching: bool
    outbox: Outbox = field(default_factory=Outbox)

    def admitted(self, sequence: SequenceState, now: float) -> None:
        """Note that a sequence is in a step for the first time."""
        sequence.scheduled_s = now
        self.live.admitted(sequence)
        self.meters.queue_time.observe(now - sequence.arrival_s)
        self.meters.admitted(
            sequence.request.tenant, sequence.prompt_tokens, sequence.cached_tokens, caching=self.caching
        )

    def preempted(self, sequence: SequenceState) -> None:
        """Note that a sequence was preempted; its restart asks the tiers again."""
        self.meters.preempted(sequence.request.tenant)
        self.tier_loader.forget(sequence.request.request_id)

    def process(self, item: Scheduled, segment: Segment, now: float) -> None:
        """Process a computed segment: publish its blocks, append its token, or end its request."""
        sequence = item.sequence
        if segment.error:
            self.end(sequence, "error", error=segment.error, message=segment.message)
            return
        reason: FinishReason | None = "length"
        tokens: tuple[int, ...] = ()
        if segment.token is not None:
            reason = sequence.append_token(segment.token)
            if reason != "stop" or segment.token in sequence.request.sampling.shown_stop_token_ids:
                tokens = (segment.token,)
            self.meters.generation_tokens += 1
        self.scheduler.computed(item)
        if segment.prompt_logprobs:
            sequence.reported_logprobs += len(segment.prompt_logprobs)
            for part in prompt_outputs(sequence.request.request_id, segment.prompt_logprobs):
                self.outbox.add(sequence.sink, part)
        if sequence.computed < sequence.prefill_tokens:
            return
        logprobs = (segment.logprob,) if tokens and segment.logprob is not None else ()
        output = EngineOutput(sequence.request.request_id, tokens, logprobs)
        if sequence.first_token_s is None:
            output.first = self._first(sequence, now)
        if reason is not None:
            self.end(sequence, reason, output)
        else:
            self.outbox.add(sequence.sink, output)

    def cancel(self, request_id: str, reason: FinishReason = "cancelled", message: str = "") -> None:
        """End a request; unknown ids are ignored."""
        sequence = self.scheduler.find(request_id)
        if sequence is not None:
            self.end(sequence, reason, message=message)

    def end(
        self,
        sequence: SequenceState,
        reason: FinishReason,
        output: EngineOutput | None = None,
        *,
        error: ErrorKind = "failed",
        message: str = "",
    ) -> None:
        """End a request and free its blocks. ``output``: its last one, if it ended by generating.

        ``error``: the kind of failure of the reason "error".
        """
        request, prefilled = sequence.request, sequence.prefilled
        self.scheduler.remove(sequence)
        self.tier_loader.forget(request.request_id)
        self.adapters.unpin(request.scope.lora)
        self.live.remove(sequence)
        self.meters.finished[reason] += 1
        last = output or EngineOutput(request.request_id)
        last.end(reason, error, message)
        last.prefilled = prefilled
        self.outbox.add(sequence.sink, last)

    def _first(self, sequence: SequenceState, now: float) -> FirstToken:
        """Pin the prefixes that a request asks to keep; return the facts that are reported once."""
        assert sequence.scheduled_s is not None, "only a step makes a token"
        sequence.first_token_s = now
        self.meters.prefill_time.observe(now - sequence.scheduled_s)
        queue_s = sequence.scheduled_s - sequence.arrival_s
        save = self.pins.keep(sequence) if sequence.request.saves else None
        return FirstToken(sequence.cached_tokens, queue_s, save)
