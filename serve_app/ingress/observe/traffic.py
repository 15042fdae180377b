"""Makes lines of recorded traffic of what observers of requests hear. It knows names, and neither keys nor files."""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import partial
from typing import NamedTuple

from router.protocol.request import Decision
from serve_app.engine.protocol import EngineRequest, FirstToken
from serve_app.errors import WarmpathError
from serve_app.ingress.http import CLIENT_LEFT
from serve_app.ingress.observe.answer_meter import AnswerMeter, Observers, RequestEnd
from serve_app.traffic.record import ShadowChoice, TrafficRequest
from serve_app.traffic.recorder import Recording, TrafficCounts, TrafficLine

MOST_RUNNING = 16_384
"""Decisions whose requests have not ended. Those that warm prompts never do."""

_REFUSALS = frozenset({429, CLIENT_LEFT})
"""The statuses of requests without an answer that are recorded, beside those from 500 on."""


class _Sent(NamedTuple):
    decision: Decision
    retries: int


class TrafficObserver:
    """Hears of requests at one ingress, and adds them to its ``recording``, None while that is off.

    ``left_out``: names of tenants whose requests are not recorded.
    """

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.left_out: Collection[str] = ()
        self.counts = TrafficCounts()
        self._sent: dict[str, _Sent] = {}

    def use(self, recording: Recording | None) -> None:
        """Add to another recording, or to none."""
        self.recording = recording
        self._sent.clear()

    def observers(self, model: str = "") -> Observers:
        """Return who hears of a model's requests, or of those that chose none."""
        return Observers(delivered=[self._delivered], finished=[partial(self._finished, model)])

    def _delivered(self, generation: EngineRequest, decision: Decision, first: FirstToken, ttft_s: float) -> None:
        """Note where a prompt's first choice went. Its id is followed by the number of earlier attempts."""
        if self.recording is None or not generation.charged:
            return
        request_id, _, attempt = generation.request_id.rpartition(".")
        known = self._sent.get(request_id)
        self._sent[request_id] = _Sent(decision if known is None else known.decision, int(attempt))
        if len(self._sent) > MOST_RUNNING:
            del self._sent[next(iter(self._sent))]

    def _finished(self, model: str, end: RequestEnd) -> None:
        """Record a request. Never raises."""
        recording, answer = self.recording, end.answer
        if recording is None:
            return
        now_s = time.perf_counter()
        if answer is not None:
            prompts = range(0, len(answer.generations), answer.request.n)
            sent = [self._sent.pop(answer.generations[index].request_id, None) for index in prompts]
            if end.tenant not in self.left_out and end.arrived_s >= recording.began_s:
                for index, where in zip(prompts, sent, strict=True):
                    recording.add(_line(model, end, answer, index, where, now_s))
        elif (end.status in _REFUSALS or end.status >= 500) and end.tenant not in self.left_out:
            request = TrafficRequest(
                timestamp=0.0,
                input_length=0,
                tenant=end.tenant,
                model=model,
                status=end.status,
                end="cancelled" if end.error is None else _reason(end.error),
            )
            recording.add(TrafficLine(request, b"", max(end.arrived_s, recording.began_s), now_s))


def _line(
    model: str, end: RequestEnd, answer: AnswerMeter, index: int, sent: _Sent | None, now_s: float
) -> TrafficLine:
    """Return the line of a prompt. ``index``: of its first choice, whose times are told."""
    generation, choices, arrived_s = answer.generations[index], answer.request.n, answer.arrived_s
    request = TrafficRequest(
        timestamp=0.0,
        input_length=len(generation.token_ids),
        output_length=sum(answer.usage.completion_tokens[index : index + choices]),
        id=generation.request_id,
        tenant=end.tenant,
        model=model,
        adapter=generation.scope.lora,
        session=generation.session,
        choices=choices,
        cached_tokens=answer.cached_tokens.get(index, 0),
        status=end.status,
        end=_end(end, answer, index),
    )
    first_s = answer.first_s.get(index)
    if first_s is not None:
        request.ttft_ms = round((first_s - arrived_s) * 1e3, 3)
        if answer.error is None:
            now_s = max(answer.last_s.get(choice, 0.0) for choice in range(index, index + choices))
    if sent is not None:
        decision, request.retries = sent
        request.replica = decision.replica_id
        request.predicted_tokens = max(decision.selected_cached_tokens, decision.pull_tokens)
        if decision.shadow is not None:
            request.shadow = ShadowChoice(
                decision.shadow.policy,
                decision.shadow.same,
                decision.shadow.predicted_tokens,
                round(decision.shadow.estimated_ttft_s * 1e3, 3),
            )
    return TrafficLine(request, generation.block_hashes, arrived_s, now_s)


def _end(end: RequestEnd, answer: AnswerMeter, index: int) -> str:
    error = answer.error or end.error
    if isinstance(error, WarmpathError):
        return _reason(error)
    reason = answer.reasons.get(index)
    if reason is not None and end.status != CLIENT_LEFT:
        return reason
    return "cancelled" if end.status == CLIENT_LEFT else "error"


def _reason(error: WarmpathError) -> str:
    """Return the limit that refused a request, else the error's code or kind."""
    return error.reason.limit if error.reason is not None else error.code or type(error).__name__
