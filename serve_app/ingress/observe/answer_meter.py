"""Measures one answer's cost and speed, and tells the observers of its events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from router.protocol.request import Decision
from serve_app.api.format import ApiFinishReason
from serve_app.api.request import ChatRequest, GenerateRequest
from serve_app.cache_misses.advice import AdviceBook, advice_on
from serve_app.cache_misses.detector import MissDetector
from serve_app.cache_misses.reasons import Miss
from serve_app.engine.protocol import EngineRequest, FirstToken, Prefilled
from serve_app.errors import LimitReason, WarmpathError
from serve_app.fairness.front_door import FrontDoor
from serve_app.fairness.rate_limits import Allowance
from serve_app.generation.answer import Piece
from serve_app.generation.prepare import session_key
from serve_app.generation.request_usage import RequestUsage
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.live.tally import CACHED_TOKENS
from serve_app.prompts.registry import PromptTraffic, Use
from serve_app.tracing import RequestTrace
from serve_app.usage import Ledger


@dataclass(frozen=True, slots=True)
class Observers:
    """Who hears of requests: functions for each event. A part that is off is in none of them.

    ``delivered``: a call has its first token (request, decision, facts, seconds since the call). ``first_token``: a
    sequence of an answer has its first token (answer, index, cached tokens). ``sent``: so has its client, and no token
    waits for the function (the same arguments); or the sequence's end is about to be sent, if those were only expected.
    ``ended``: an answer (answer, the error that ended it).
    ``corrected``: a prompt had other cached tokens than told (answer, index, told, true).
    ``refused``: a request (tenant, reason). ``finished``: a request to generate has its HTTP status, and its client all
    or has left. ``advises`` answer: with advice that waits for the session's answer, "" for none.
    """

    delivered: Sequence[Callable[[EngineRequest, Decision, FirstToken, float], None]] = ()
    first_token: Sequence[Callable[[AnswerMeter, int, int], None]] = ()
    sent: Sequence[Callable[[AnswerMeter, int, int], None]] = ()
    ended: Sequence[Callable[[AnswerMeter, WarmpathError | None], None]] = ()
    corrected: Sequence[Callable[[AnswerMeter, int, int, int], None]] = ()
    refused: Sequence[Callable[[str, LimitReason], None]] = ()
    advises: Sequence[Callable[[AnswerMeter], str]] = ()
    finished: Sequence[Callable[[RequestEnd], None]] = ()

    def __add__(self, more: Observers) -> Observers:
        """Return the observers of both."""
        return Observers(*((*getattr(self, name), *getattr(more, name)) for name in self.__slots__))


class RequestEnd(NamedTuple):
    """A request's end. ``status``: as its client saw it. ``answer``: None if it did not come so far.

    ``error``: what it was refused with, unless its ``answer`` has one. ``arrived_s``: by ``time.perf_counter``.
    """

    tenant: str
    arrived_s: float
    status: int
    answer: AnswerMeter | None
    error: WarmpathError | None


@dataclass(eq=False)
class AnswerMeter:
    """Counts one answer while it is sent. ``body_bytes``: its request's size; ``allowance``: its part of its tenant's
    limits; ``cached_tokens``: those told of each sequence's prompt; ``first_s``, ``last_s``: the times of its first and
    last tokens; ``reasons``: why sequences ended; ``error``: what ended it.
    """

    observers: Observers
    metrics: IngressMetrics
    request: GenerateRequest
    generations: list[EngineRequest]
    arrived_s: float
    body_bytes: int
    allowance: Allowance
    trace: RequestTrace | None = None
    uncached_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)
    last_s: dict[int, float] = field(default_factory=dict)
    first_s: dict[int, float] = field(default_factory=dict)
    reasons: dict[int, ApiFinishReason] = field(default_factory=dict)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._expected: set[int] = set()
        self.usage = RequestUsage(self.request, self.generations)
        self.tenant = self.generations[0].tenant
        self._inter_token_s = self.metrics.inter_token_s[self.tenant]
        self._tokens = "warmpath_tenant_completion_tokens_total", (("tenant", self.tenant),)
        self.metrics.add("warmpath_requests_in_flight")

    @property
    def session(self) -> str:
        """A short key of the session, or else of the user, that the client names, "" for none."""
        return session_key(self.tenant, self.request.session or self.request.user)

    def advice(self) -> str:
        """Return advice that waits for the session's answer, "" for none. It is told once."""
        return next(filter(None, (advise(self) for advise in self.observers.advises)), "")

    def add(self, piece: Piece) -> None:
        """Count a piece that is about to be sent."""
        now_s = time.perf_counter()
        new_tokens, index = piece.new_tokens, piece.index
        self.usage.add(piece)
        if new_tokens:
            self.allowance.generated(new_tokens)
            self.metrics.values[self._tokens] += new_tokens
        if piece.first is not None and piece.first.correction:
            self._correct(index, piece.first.cached_tokens)
        if piece.first is not None and not piece.first.correction:
            cached_tokens, prompt_tokens = piece.first.cached_tokens, self.generations[index].prompt_tokens
            self.uncached_tokens += prompt_tokens - cached_tokens
            self.cached_tokens[index] = cached_tokens
            self.first_s[index] = now_s
            self.metrics.first_token(self.tenant, now_s - self.arrived_s, prompt_tokens, cached_tokens)
            for tell in self.observers.first_token:
                tell(self, index, cached_tokens)
            if new_tokens > 1:
                self._inter_token_s.observe(0.0, new_tokens - 1)
        elif new_tokens and index in self.last_s:
            self._inter_token_s.observe((now_s - self.last_s[index]) / new_tokens, new_tokens)
        if new_tokens or index not in self.last_s:  # an end without a token is no arrival of one
            self.last_s[index] = now_s
        if piece.finish_reason is not None:
            self.reasons[index] = piece.finish_reason
            if index in self._expected:
                self._expected.discard(index)
                for tell in self.observers.sent:
                    tell(self, index, self.cached_tokens[index])

    def _correct(self, index: int, more_tokens: int) -> None:
        told = self.cached_tokens.get(index, 0)
        self.cached_tokens[index] = told + more_tokens
        self.uncached_tokens -= more_tokens
        self.metrics.add_tokens(CACHED_TOKENS, more_tokens, self.tenant)
        for tell in self.observers.corrected:
            tell(self, index, told, told + more_tokens)

    def sent(self, piece: Piece) -> None:
        """Note that a piece was sent."""
        if piece.first is None or piece.first.correction:
            return
        if piece.first.expected and piece.finish_reason is None:
            self._expected.add(piece.index)
            return
        for tell in self.observers.sent:
            tell(self, piece.index, piece.first.cached_tokens)

    def end(self, error: BaseException | None) -> None:
        """Finish the answer; a tenant pays nothing for one that was refused before its first piece.

        What was computed for one that was left before is charged once its replica tells (``charge_unanswered``).
        """
        self.error = error
        self.metrics.add("warmpath_requests_in_flight", -1.0)
        refusal = error if isinstance(error, WarmpathError) else None
        if self.last_s and self.request.stream and refusal is not None:  # its HTTP status was a good one
            self.metrics.add("warmpath_broken_streams_total", status=str(refusal.status), tenant=self.tenant)
        if error is None and self.last_s:
            self.metrics.answered_whole(self.tenant, time.perf_counter() - self.arrived_s)
        self.allowance.end(refused=refusal is not None and not self.last_s)
        for tell in self.observers.ended:
            tell(self, refusal)


def usage_observers(ledger: Ledger, metrics: IngressMetrics, block_size: int | None = None) -> Observers:
    """Charge prompts, once for all choices, and answers, to their tenants. ``block_size``: see ``Ledger.prompt``."""

    def prompt(answer: AnswerMeter, index: int, cached_tokens: int) -> None:
        charge(answer, index, None, cached_tokens)

    def charge(answer: AnswerMeter, index: int, told_tokens: int | None, cached_tokens: int) -> None:
        request, generation = answer.request, answer.generations[index]
        if index % request.n == 0:
            written_tokens = ledger.prompt(
                answer.tenant, request.answering_model, generation.prompt_ref, generation.prompt_tokens, cached_tokens,
                stored=generation.store_kv, block_size=block_size, instead_of=told_tokens,
            )  # fmt: skip
            answer.usage.written_tokens += written_tokens
            metrics.add_tokens("warmpath_tenant_written_prompt_tokens_total", written_tokens, answer.tenant)

    def answered(answer: AnswerMeter, _: WarmpathError | None) -> None:
        if answer.last_s:  # without a token, the cost is unknown, though not zero
            model, ref = answer.request.answering_model, answer.generations[0].prompt_ref
            ledger.answer(answer.tenant, model, ref, answer.usage.total().completion_tokens)

    return Observers(first_token=[prompt], corrected=[charge], ended=[answered])


def prompt_observers(traffic: PromptTraffic) -> Observers:
    """Count the requests of registered prompts."""

    def used(answer: AnswerMeter, index: int, cached_tokens: int) -> None:
        request, generation = answer.request, answer.generations[index]
        if generation.prompt_ref and index % request.n == 0:
            ttft_s = time.perf_counter() - answer.arrived_s
            traffic.add(generation.prompt_ref, generation.prompt_tokens, cached_tokens, ttft_s)
            if generation.store_kv:
                use = use_of(request, answer.tenant)
                traffic.add_use(generation.prompt_ref, use, public=generation.scope.public_blocks > 0)

    def corrected(answer: AnswerMeter, index: int, told_tokens: int, cached_tokens: int) -> None:
        generation = answer.generations[index]
        if generation.prompt_ref and index % answer.request.n == 0:
            traffic.correct(generation.prompt_ref, told_tokens, cached_tokens)

    return Observers(first_token=[used], corrected=[corrected])


def miss_observers(
    misses: MissDetector, book: AdviceBook, advised: Callable[[EngineRequest, Mapping[str, Any]], None] | None = None
) -> Observers:
    """Explain cache misses, after a prompt's first piece was sent. ``book`` keeps advice for the next answer.

    ``advised``: told of a session's first miss that its client can avoid (request, facts).
    """

    def explain(answer: AnswerMeter, index: int, cached_tokens: int) -> None:
        if index % answer.request.n == 0:
            now_s = answer.last_s[index]
            request, generation = answer.request, answer.generations[index]
            messages = request.messages if isinstance(request, ChatRequest) else ()
            miss = misses.observe(generation, cached_tokens, answer.arrived_s, now_s, answer.usage.total, messages)
            if miss is not None:
                miss.add_done_callback(partial(explained, answer, index))
            if miss is not None and answer.request.cache_diagnostics and index == 0:
                answer.usage.miss = miss

    def explained(answer: AnswerMeter, index: int, task: asyncio.Task[Miss]) -> None:
        if task.cancelled():
            return
        miss = task.result()
        advice = advice_on(miss, answer.request.rules_off)
        if advice and book.note(answer.tenant, answer.session, miss.reason, advice) and advised is not None:
            place = miss.first_difference
            facts = {"part": place.part if place else None, "line": place.line if place else None, "advice": advice}
            advised(answer.generations[index], {"reason": miss.reason, "lost_tokens": miss.lost_tokens, **facts})

    return Observers(sent=[explain], advises=[lambda answer: book.take(answer.tenant, answer.session)])


def cost_observers(front_door: FrontDoor) -> Observers:
    """Teach the front door what a tenant's bodies cost."""

    def learn(answer: AnswerMeter, _: WarmpathError | None) -> None:
        if answer.last_s:
            front_door.learn(answer.tenant, answer.body_bytes, answer.uncached_tokens)

    return Observers(ended=[learn])


def trace_answer(answer: AnswerMeter, refusal: WarmpathError | None) -> None:
    """End a sampled request's trace."""
    if answer.trace is not None:
        if refusal is not None:
            answer.trace.failed(refusal.code or type(refusal).__name__)
        answer.trace.used(answer.request.answering_model, answer.usage.total())


def charge_unanswered(
    ledger: Ledger, generation: EngineRequest, prefilled: Prefilled, block_size: int | None = None
) -> None:
    """Count what a replica computed for a prompt whose client left before the first token."""
    if generation.charged and prefilled.tokens > prefilled.cached_tokens:
        tenant, model, ref = generation.tenant, generation.model, generation.prompt_ref
        stored = generation.store_kv
        ledger.prompt(tenant, model, ref, *prefilled, stored=stored, answered=False, block_size=block_size)


def use_of(request: GenerateRequest, tenant: str) -> Use:
    """Return the form in which a request uses its prompt."""
    chat = isinstance(request, ChatRequest) and request.apply_chat_template
    return Use(tenant, request.model, request.lora_name, request.cache_salt, chat)
