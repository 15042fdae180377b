"""How busy vLLM is, told from what was submitted and what each of its steps computed.

vLLM serves first come, first served, so a step's prompt tokens belong to the oldest prefills: what is queued is known
to the token without asking. Not thread-safe: the engine's lock guards it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from router.protocol.events import LoadReport
from serve_app.engine.metrics import EngineMeters
from serve_app.engine.reservations import RouterReservations, retry_after_s


@dataclass(frozen=True, slots=True)
class StepStats:
    """What vLLM says of one step. ``running``: sequences after it; ``kv_usage``: part of the pool in use.

    Of a step that computed nothing, ``duration_s`` is 0.0.
    """

    running: int
    kv_usage: float
    prompt_tokens: int = 0
    generation_tokens: int = 0
    duration_s: float = 0.0


@dataclass(slots=True)
class _Prefill:
    router_id: str
    tokens: int


class LoadMirror:
    """Queued prefill tokens in all and by router. A request counts from its submission to its first token."""

    def __init__(self, max_num_seqs: int, max_waiting_requests: int, meters: EngineMeters) -> None:
        self._max_running = max_num_seqs
        self._max_waiting = max_waiting_requests
        self._meters = meters
        self._prefills: OrderedDict[str, _Prefill] = OrderedDict()
        self._reservations = RouterReservations()
        self._running = 0
        self._live = 0
        self._copies = 0
        self.kv_usage = 0.0

    @property
    def running(self) -> int:
        """Sequences that run, as of the last step."""
        return min(self._running, self._live)

    @property
    def waiting(self) -> int:
        """Live requests that did not run in the last step."""
        return self._live - self.running

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens still to be computed."""
        return sum(prefill.tokens for prefill in self._prefills.values())

    def arrived(self, request_id: str, router_id: str, reservation: int, uncached_tokens: int) -> None:
        """Count a request that is submitted. ``uncached_tokens``: of its prompt, by what is known to be cached."""
        self._live += 1
        self._prefills[request_id] = _Prefill(router_id, uncached_tokens)
        self._reservations.arrived(router_id, reservation)

    def recount(self, request_id: str, uncached_tokens: int) -> None:
        """Note how much of a live request's prompt is to be computed after all, once a copy has come or failed."""
        if request_id in self._prefills:
            self._prefills[request_id].tokens = uncached_tokens

    def copies(self) -> None:
        """Note that a copy of KV is about to be submitted: a request of one token, which is nobody's prompt."""
        self._copies += 1

    def stepped(self, step: StepStats) -> None:
        """Take a step's prompt tokens off the oldest prefills. What none of them has left was computed again."""
        self._running, self.kv_usage = step.running, step.kv_usage
        if not step.duration_s:
            return
        copies = min(step.prompt_tokens, self._copies)
        self._copies -= copies
        left = prompt_tokens = step.prompt_tokens - copies
        for prefill in self._prefills.values():
            taken = min(left, prefill.tokens)
            prefill.tokens -= taken
            left -= taken
            if not left:
                break
        self._meters.computed_prompt_tokens += prompt_tokens - left
        self._meters.recomputed_tokens += left
        if prompt_tokens or not copies:  # a copy's step says nothing of how fast this machine computes
            self._meters.stepped(prompt_tokens, step.duration_s)

    def begun(self, request_id: str) -> None:
        """Note that a request has its first token: nothing of its prompt is left."""
        self._prefills.pop(request_id, None)

    def ended(self, request_id: str) -> None:
        """Note that a live request is live no more."""
        self._prefills.pop(request_id, None)
        self._live -= 1

    def report(self, now_s: float) -> LoadReport:
        """Return the load as one message. Nobody overtakes what is queued, so all of it is committed."""
        queued = self.queued_tokens
        return LoadReport(
            queued_prefill_tokens=queued,
            running_sequences=self.running,
            waiting_sequences=self.waiting,
            max_running_sequences=self._max_running,
            max_waiting_sequences=self._max_waiting,
            prefill_tokens_per_s=self._meters.prefill_tokens_per_s,
            prefill_rate_tokens=self._meters.prefill_rate_tokens,
            decode_step_s=self._meters.decode_step_s,
            shares=self._reservations.shares(
                (prefill.router_id, prefill.tokens) for prefill in self._prefills.values()
            ),
            committed_prefill_tokens=queued,
            committed_sequences=self.waiting,
            taken_at_s=now_s,
        )

    def retry_after_s(self) -> float:
        """Return when a refused request might fit."""
        return retry_after_s(self.queued_tokens, self._meters.prefill_tokens_per_s)
