"""The results of a step become outputs; a request that ends is removed everywhere.

Owns the order in which everything lets go of a request that ends. In: a scheduled part and its result; out: tokens and
ends in the outbox, blocks published or free.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.engine.core.inbox import Inbox
from serve_app.engine.core.outbox import Outbox
from serve_app.engine.kv.prompt_saves import PromptSaves
from serve_app.engine.kv.tier_loader import TierLoader
from serve_app.engine.metrics import EngineMeters
from serve_app.engine.protocol import FinishReason, TokenLogprob
from serve_app.engine.scheduling.scheduler import Scheduled, Scheduler
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.speculative.meters import SpeculationMeters
from serve_app.engine.step import AdapterSlots, SegmentResult


@dataclass(frozen=True, slots=True)
class OutputProcessor:
    """Progress and ends of one engine's requests. Whatever ends one is called with the inbox's condition held."""

    scheduler: Scheduler
    saves: PromptSaves
    tier_loader: TierLoader | None
    adapters: AdapterSlots
    inbox: Inbox
    meters: EngineMeters
    caching: bool
    outbox: Outbox
    speculation: SpeculationMeters = field(default_factory=SpeculationMeters)

    def admitted(self, sequence: SequenceState, now: float) -> None:
        """Note that a sequence is in a step for the first time. Takes the condition itself."""
        sequence.scheduled_s = now
        with self.inbox.changed:
            self.inbox.stop_waiting(sequence)
        self.meters.queue_time.observe(now - sequence.arrival_s)
        self.meters.admitted(
            sequence.request.tenant, sequence.prompt_tokens, sequence.cached_tokens, caching=self.caching
        )

    def preempted(self, sequence: SequenceState) -> None:
        """Note that a sequence was preempted; the tiers are asked again when it restarts."""
        self.meters.preempted(sequence.request.tenant)
        if self.tier_loader is not None:
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
        if sequence.request.keep and sequence.first_token_s is None:
            self.saves.keep(sequence)
        if reason is not None:
            self.end(sequence, reason, tokens=tokens, logprobs=result.logprobs[: len(tokens)], now=now)
        else:
            self.outbox.progress(sequence, tokens, result.logprobs[: len(tokens)], now)

    def cancel(self, request_id: str, reason: FinishReason = "cancelled", error: str = "") -> None:
        """End a request, and the save that nobody else waits for; unknown ids are ignored."""
        found = self.scheduler.find(request_id)
        if found is None:
            return
        self.end(found, reason, error=error)
        unwanted = self.scheduler.find(self.saves.abandon(found) or "")
        if unwanted is not None:
            self.end(unwanted, "cancelled")

    def end(
        self,
        sequence: SequenceState,
        reason: FinishReason,
        *,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        error: str = "",
        now: float | None = None,
    ) -> None:
        """End a request and free its blocks. ``now``: when it ended by generating; None when it was cut short."""
        request_id = sequence.request.request_id
        is_save = self.saves.ended(sequence, reason)
        self.scheduler.remove(request_id)
        if self.tier_loader is not None:
            self.tier_loader.forget(request_id)
        self.adapters.unpin(sequence.request.scope.lora)
        self.inbox.remove_live(sequence)
        if not is_save:
            self.outbox.end(sequence, reason, tokens=tokens, logprobs=logprobs, error=error, now=now)
