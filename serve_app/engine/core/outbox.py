"""Outputs of a step, grouped by submitter, and their latencies.

Owns the outputs between the step that made them and their delivery. A sink that fails harms nobody else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from router.protocol.events import Event
from serve_app.engine.metrics import EngineMeters
from serve_app.engine.protocol import EngineOutput, EventSink, FinishReason, OutputSink, TokenLogprob
from serve_app.engine.scheduling.sequence import SequenceState

_log = logging.getLogger(__name__)


class Outbox:
    """Outputs waiting to be delivered, one batch a sink."""

    def __init__(self, meters: EngineMeters) -> None:
        self._meters = meters
        self._batches: dict[OutputSink, list[EngineOutput]] = {}

    def progress(
        self, sequence: SequenceState, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...], now: float
    ) -> None:
        """Add tokens of a request that goes on."""
        self._add(sequence, self._timed(sequence, EngineOutput(sequence.request.request_id, tokens, logprobs), now))

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
        """Add a request's last output. ``now``: when it ended by generating; None when it was cut short."""
        output = EngineOutput(sequence.request.request_id, tokens, logprobs, finish_reason=reason, error=error)
        self._add(sequence, output if now is None else self._timed(sequence, output, now))
        self._meters.finished[reason] += 1

    def deliver(self, events: Sequence[Event], event_sink: EventSink) -> None:
        """Send cache events, then outputs: a follow-up request finds the routers already told. Empties the box."""
        batches, self._batches = self._batches, {}
        if events:
            try:
                event_sink(events)
            except Exception:
                _log.exception("the event sink failed; %d cache events are lost", len(events))
        for sink, batch in batches.items():
            try:
                sink(batch)
            except Exception:
                _log.exception("an output sink failed for %s", ", ".join(output.request_id for output in batch))

    def _add(self, sequence: SequenceState, output: EngineOutput) -> None:
        self._batches.setdefault(sequence.sink, []).append(output)

    def _timed(self, sequence: SequenceState, output: EngineOutput, now: float) -> EngineOutput:
        """Measure; a request's first output also says what was cached and how long it queued."""
        if sequence.first_token_s is None:
            sequence.first_token_s = now
            scheduled_s = sequence.arrival_s if sequence.scheduled_s is None else sequence.scheduled_s
            self._meters.prefill_time.observe(now - scheduled_s)
            queue_s = scheduled_s - sequence.arrival_s
            output = replace(output, cached_tokens=sequence.cached_tokens, queue_s=queue_s, save=sequence.save_result)
        return output
