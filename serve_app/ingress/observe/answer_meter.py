"""Measures one answer's cost and speed, and reports them to all counters, during the answer and at its end."""

import time
from dataclasses import dataclass, field

from serve_app.api.request import ChatRequest, GenerateRequest
from serve_app.cache_diagnostics.detector import MissDetector
from serve_app.engine.protocol import EngineRequest, Prefilled
from serve_app.errors import WarmpathError
from serve_app.fairness.front_door import FrontDoor
from serve_app.fairness.rate_limits import Allowance
from serve_app.generation.answer import Piece
from serve_app.generation.request_usage import RequestUsage
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.prompts.traffic import PromptTraffic, Use
from serve_app.tracing.request import RequestTrace
from serve_app.usage.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Counters:
    """The receivers of reports about answers: this ingress' metrics, the ledger, registered prompts, cache misses."""

    metrics: IngressMetrics
    front_door: FrontDoor
    ledger: Ledger
    prompts: PromptTraffic
    misses: MissDetector | None = None


@dataclass(eq=False)
class AnswerMeter:
    """Counts one answer. ``body_bytes``: its request's size; ``allowance``: its part of its tenant's limits."""

    counters: Counters
    request: GenerateRequest
    generations: list[EngineRequest]
    arrived_s: float
    body_bytes: int
    allowance: Allowance
    trace: RequestTrace | None
    _uncached_tokens: int = 0
    _last_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.usage = RequestUsage(self.request.n, self.generations)
        self._tenant = self.generations[0].tenant
        self._inter_token_s = self.counters.metrics.inter_token_s[self._tenant]
        self._tokens = "warmpath_tenant_completion_tokens_total", (("tenant", self._tenant),)
        self.counters.metrics.add("warmpath_requests_in_flight")

    def add(self, piece: Piece) -> None:
        """Count a piece that is about to be sent."""
        now_s = time.perf_counter()
        new_tokens, index = piece.new_tokens, piece.index
        self.usage.add(piece)
        if new_tokens:
            self.allowance.generated(new_tokens)
            self.counters.metrics.values[self._tokens] += new_tokens
        if piece.first is not None:
            self._first_token(self.generations[index], index, piece.first.cached_tokens, now_s)
            if new_tokens > 1:
                self._inter_token_s.observe(0.0, new_tokens - 1)
        elif new_tokens and index in self._last_s:
            self._inter_token_s.observe((now_s - self._last_s[index]) / new_tokens, new_tokens)
        if new_tokens or index not in self._last_s:  # an end without a token is no arrival of one
            self._last_s[index] = now_s

    def sent(self, piece: Piece) -> None:
        """Explain a cache miss after the first piece was sent, so that no first token waits for the explanation."""
        misses, request = self.counters.misses, self.request
        if misses is None or piece.first is None or piece.index % request.n:
            return
        generation = self.generations[piece.index]
        cached_tokens, now_s = piece.first.cached_tokens, self._last_s[piece.index]
        miss = misses.observe(generation, cached_tokens, self.arrived_s, now_s, self.usage)
        if miss is not None and request.cache_diagnostics and piece.index == 0:
            self.usage.miss = miss

    def client_left(self) -> None:
        """Count a client that disconnected before the end."""
        self.counters.metrics.add("warmpath_client_disconnects_total")

    def end(self, error: BaseException | None) -> None:
        """Finish the answer; a tenant pays nothing for one that was refused before its first piece.

        What was computed for one that was left before is charged once its replica tells (``charge_unanswered``).
        """
        counters, answered = self.counters, bool(self._last_s)
        counters.metrics.add("warmpath_requests_in_flight", -1.0)
        refusal = error if isinstance(error, WarmpathError) else None
        if answered and self.request.stream and refusal is not None:  # its HTTP status was a good one
            counters.metrics.add("warmpath_broken_streams_total", status=str(refusal.status), tenant=self._tenant)
        used = self.usage.total()
        if self.trace is not None:
            if refusal is not None:
                self.trace.failed(refusal.code or type(refusal).__name__)
            self.trace.used(self.request.answering_model, used)
        self.allowance.end(refused=refusal is not None and not answered)
        if answered:  # without an answer, the cost is unknown, though not zero
            model, ref = self.request.answering_model, self.generations[0].prompt_ref
            counters.ledger.answer(self._tenant, model, ref, used.completion_tokens)
            counters.front_door.learn(self._tenant, self.body_bytes, self._uncached_tokens)

    def _first_token(self, generation: EngineRequest, index: int, cached_tokens: int, now_s: float) -> None:
        counters, request, tenant = self.counters, self.request, self._tenant
        metrics, prompt_tokens = counters.metrics, len(generation.token_ids)
        ref = generation.prompt_ref
        self._uncached_tokens += prompt_tokens - cached_tokens
        metrics.first_token(tenant, now_s - self.arrived_s, prompt_tokens, cached_tokens)
        if index % request.n:
            return
        written_tokens = counters.ledger.prompt(
            tenant, request.answering_model, ref, prompt_tokens, cached_tokens, stored=generation.store_kv
        )
        metrics.add("warmpath_tenant_written_prompt_tokens_total", written_tokens, tenant=tenant)
        if ref:
            counters.prompts.add(ref, prompt_tokens, cached_tokens)
            if generation.store_kv:
                counters.prompts.add_use(ref, use_of(request, tenant), public=generation.scope.public_blocks > 0)


def charge_unanswered(ledger: Ledger, generation: EngineRequest, prefilled: Prefilled) -> None:
    """Count what a replica computed for a prompt whose client left before the first token."""
    if generation.charged and prefilled.tokens > prefilled.cached_tokens:
        tenant, model, ref = generation.tenant, generation.model, generation.prompt_ref
        ledger.prompt(tenant, model, ref, *prefilled, stored=generation.store_kv, answered=False)


def use_of(request: GenerateRequest, tenant: str) -> Use:
    """Return the form in which a request uses its prompt."""
    chat = isinstance(request, ChatRequest) and request.apply_chat_template
    return Use(tenant, request.model, request.lora_name, request.cache_salt, chat)
