"""The results of a step become outputs; a request that ends is removed everywhere.

Owns the order in which everything lets go of a request that ends. In: a scheduled part and its result; out: tokens and
ends in the outbox, blocks published or free.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from serve_app.engine.core.live_requests import LiveRequests
from serve_app.engine.kv.prompt_pins import PromptPins
from serve_app.engine.kv.tier_loader import TierLoader
from serve_app.engine.metrics import EngineMeters
from serve_app.engine.outbox import Outbox
from serve_app.engine.protocol import EngineOutput, FinishReason
from serve_app.engine.scheduling.scheduler import Scheduled, Scheduler
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.speculative.meters import SpeculationMeters
from serve_app.engine.step import AdapterSlots, SegmentResult


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
    speculation: SpeculationMeters = field(default_factory=SpeculationMeters)

    def admitted(self, sequence: SequenceState, now: float) -> None:
        """Note that a sequence is in a step for the first time."""
        sequence.scheduled_s = now
        self.live.admitted(sequence)
        self.meters.queue_time.observe(now - sequence.arrival_s)
        self.meters.admitted(
            sequence.request.tenant, sequence.prompt_tokens, sequence.cached_tokens, caching=self.caching
        )

    def preempted(self, sequence: SequenceState) -> None:
        """Note that a sequence was preempted; the tiers are asked again when it restarts."""
        self.meters.preempted(sequence.request.tenant)
        self.tier_loader.forget(sequence.request.request_id)

    def process(self, item: Scheduled, result: SegmentResult, now: float) -> None:
        """Take one segment's result: publish its blocks, append its token, or end its request."""
        sequence = item.sequence
        if result.error:
            self.end(sequence, "error", error=result.error)
            return
        reason: FinishReason | None = "length"
        tokens: tuple[int, ...] = ()
        taken = 0
        if result.token is not None:
            tokens = (*result.accepted, result.token)
            taken, reason = sequence.append_tokens(tokens)
            shown = taken
            if reason == "stop" and tokens[taken - 1] not in sequence.request.sampling.shown_stop_token_ids:
                shown -= 1
            tokens = tokens[:shown]
            self.meters.generation_tokens += taken
        if result.drafted is not None:
            sequence.drafted = result.drafted
            self.speculation.verified(result)
        self.scheduler.computed(item, max(taken - 1, 0))
        if sequence.prefilling:
            return
        output = EngineOutput(sequence.request.request_id, tokens, result.logprobs[: len(tokens)])
        if sequence.first_token_s is None:
            output = self._first(sequence, output, now)
        if reason is not None:
            self.end(sequence, reason, output)
        else:
            self.outbox.add(sequence.sink, output)

    def cancel(self, request_id: str, reason: FinishReason = "cancelled", error: str = "") -> None:
        """End a request; unknown ids are ignored."""
        sequence = self.scheduler.find(request_id)
        if sequence is not None:
            self.end(sequence, reason, error=error)

    def end(
        self, sequence: SequenceState, reason: FinishReason, output: EngineOutput | None = None, *, error: str = ""
    ) -> None:
        """End a request and free its blocks. ``output``: its last one, where it ended by generating."""
        request = sequence.request
        self.scheduler.remove(sequence)
        self.tier_loader.forget(request.request_id)
        self.adapters.unpin(request.scope.lora)
        self.live.remove(sequence)
        self.meters.finished[reason] += 1
        last = output or EngineOutput(request.request_id)
        self.outbox.add(sequence.sink, replace(last, finish_reason=reason, error=error))

    def _first(self, sequence: SequenceState, output: EngineOutput, now: float) -> EngineOutput:
        """Pin what a request asks to keep, and return its first output with what is said once."""
        assert sequence.scheduled_s is not None, "a token comes of a step"
        sequence.first_token_s = now
        self.meters.prefill_time.observe(now - sequence.scheduled_s)
        queue_s = sequence.scheduled_s - sequence.arrival_s
        return replace(output, cached_tokens=sequence.cached_tokens, queue_s=queue_s, save=self.pins.keep(sequence))
