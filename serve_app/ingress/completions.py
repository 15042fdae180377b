"""The path of a generation request: its body, its turn in the queue, its generations, its answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Literal, NamedTuple, TypeVar

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from router.protocol.block_hash import TokenArray
from serve_app.api.agent_rules import by_rules
from serve_app.api.format import AnswerFormat, AnswerHead
from serve_app.api.openai.tokens import parse_detokenize
from serve_app.api.request import (
    ChatRequest,
    GenerateRequest,
    UnknownField,
    reasoning_fields,
    require_none,
    unknown_fields,
)
from serve_app.config.app import AppConfig
from serve_app.errors import InvalidRequest
from serve_app.fairness.front_door import Arrival, FrontDoor
from serve_app.fairness.queue import FairWorkers
from serve_app.generation.answer import PieceSink, TokenSource, answer_pieces, told_ids
from serve_app.generation.prepare import Preparer
from serve_app.generation.prompt import most_values
from serve_app.generation.tool_calls.reader import AnswerReaders
from serve_app.ingress.answers import Answer, request_headers, streamed, whole
from serve_app.ingress.client_headers import arrived_s, with_session
from serve_app.ingress.conversation import Conversation
from serve_app.ingress.drain import Deadline, Drain
from serve_app.ingress.http import read_body, until_disconnect
from serve_app.ingress.lifeline import HEAD_AFTER_S, NEAR_REFUSAL_S, Lifeline
from serve_app.ingress.observe.answer_meter import AnswerMeter, Observers
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.tenants import Tenant
from serve_app.tokenization.tokenizer import PromptTokenizer
from serve_app.tracing import RequestTrace

INLINE_BODY_BYTES, INLINE_VALUES = 64 << 10, 4096
"""Longer bodies, and those that may hold more values, are parsed outside the event loop."""

Parse = Callable[[bytes], GenerateRequest]
T = TypeVar("T")


class Chosen(NamedTuple):
    """Who answers a request for a model, and under which name. ``note``: what the client is told, "" for nothing."""

    completions: Completions
    model: str
    note: str = ""


Needs = Literal["replica", "replica later", "tokenizer"]
"""What of a model a request needs."""

Choose = Callable[[str, str | None, Tenant, Arrival, Needs], Chosen]
"""Returns the answerer of a tenant's request for a model, or for an adapter of it; its arrival waits there then.

Raises a ``WarmpathError``.
"""


@dataclass(slots=True)
class Completions:
    """Answers generation requests in any API's format. ``config``: the settings in force.

    ``choose``: among several models, or None: there is one. ``entrance``: where requests of all models arrive.
    ``no_replica``: whether there is none now.
    """

    config: AppConfig
    preparer: Preparer
    source: TokenSource
    tokenizer: PromptTokenizer
    readers: AnswerReaders
    observers: Observers
    metrics: IngressMetrics
    front_door: FrontDoor
    workers: FairWorkers
    drain: Drain
    entrance: FrontDoor | None = None
    choose: Choose | None = None
    no_replica: Callable[[], bool] = lambda: False

    def configure(self, config: AppConfig) -> None:
        """Use other settings from the next request on."""
        self.config = config

    async def generate(self, request: Request, tenant: Tenant, parse: Parse, answer_format: AnswerFormat) -> Response:
        """Return a whole or started answer. Raises a ``WarmpathError`` before its first piece, or ClientDisconnect."""
        arrived = arrived_s(request.scope)
        with self.arrive(tenant) as arrival:
            await self.workers.loop.turn(tenant.name)
            # Only a batch's lines say whether they wait for all others.
            needs: Needs = "replica later" if hasattr(request.state, "waits_for_all") else "replica"
            chosen, wanted, note = await self._wanted(request, tenant, arrival, parse, answer_format, needs)
            request.state.counts = chosen
            return await chosen._answer(request, tenant, arrival, arrived, wanted, answer_format, note)

    async def _answer(
        self,
        request: Request,
        tenant: Tenant,
        arrival: Arrival,
        arrived: float,
        wanted: GenerateRequest,
        answer_format: AnswerFormat,
        note: str,
    ) -> Response:
        wanted = self.readers.checked(wanted)
        wanted = with_session(wanted, request.headers)
        if getattr(request.state, "waits_for_all", False):  # most lines of a batch
            wanted = replace(wanted, service_tier="flex")
        # The internal id is random: two clients may send the same x-request-id.
        answer_id = request_id = secrets.token_hex(16)
        if isinstance(answer_format, Conversation):
            # A stored response's id opens its text, and events and logs show this request's id.
            request_id = sha256(answer_id.encode()).hexdigest()[:32]
        timeout_s = self.config.request_timeout_s
        deadline = Deadline(self.drain, arrived + timeout_s, timeout_s)
        body_bytes, allowance = arrival.body_bytes, arrival.allowance
        trace: RequestTrace | None = getattr(request.state, "trace", None)
        stage: Callable[[str], None] = trace.stage if trace is not None else lambda _: None
        stage("read")
        lifeline: Lifeline | None = None
        if wanted.stream:
            lifeline = request.state.lifeline = self._lifeline(request, wanted, answer_format, note)
        async with until_disconnect(request):
            async with deadline.limit():
                await arrival.turn(wanted.choices, wanted.order, flex=wanted.service_tier == "flex")
                stage("wait")
                generations = await self.preparer.prepare(wanted, tenant, request_id, deadline_s=deadline.at_s)
                generations = self.readers.after_reasoning(wanted, generations)
                prompts = generations[:: wanted.n]
                prompt_tokens = sum(prompt.prompt_tokens for prompt in prompts)
                output_tokens = sum(generation.sampling.max_tokens for generation in generations)
                allowance.reserve(prompt_tokens, output_tokens, wanted.answering_model)
                await allowance.prepared(prompts)
                stage("prepare")
            if trace is not None:
                generations = [structs.replace(made, traceparent=trace.traceparent) for made in generations]
            meter = AnswerMeter(
                self.observers, self.metrics, wanted, generations, arrived, body_bytes, allowance, trace
            )
            place = arrival.hand_over()
            sink = PieceSink()
            pieces = answer_pieces(generations, self.source, self.readers.of(wanted), place, self.workers.loop, sink)
            head = AnswerHead(
                answer_id,
                int(time.time()),
                wanted.answering_model,
                wanted.include_usage,
                wanted.repeated,
                meter.usage.total if wanted.continuous_usage else None,
                told_ids(wanted, generations),
                wanted.include_reasoning,
                note,
            )
            answer = Answer(answer_format, head, pieces, sink, place, meter, deadline)
            return await (streamed(answer, lifeline) if wanted.stream else whole(answer))

    def _lifeline(self, request: Request, wanted: GenerateRequest, form: AnswerFormat, note: str) -> Lifeline:
        """Return what shows the client of an accepted stream that it lives."""

        def near_refusal() -> bool:
            # That there is no replica is a status of its own, which clients act on.
            return self.no_replica() and self.config.no_replica_wait_s < HEAD_AFTER_S + NEAR_REFUSAL_S

        return Lifeline(
            request.scope,
            request._send,
            form.sign,
            lambda: request_headers(wanted, note),
            getattr(request.state, "dress", lambda response: response),
            lambda error: form.stream(AnswerHead("", 0, "")).error(error),
            near_refusal,
        )

    async def tokens(
        self, request: Request, tenant: Tenant, parse: Parse, form: Conversation | None = None
    ) -> tuple[TokenArray, GenerateRequest, Preparer]:
        """Return the tokens of a request's prompt, the request, and who made it. Raises a ``WarmpathError``."""
        with self.arrive(tenant) as arrival:
            chosen, wanted, _ = await self._wanted(request, tenant, arrival, parse, form, "tokenizer")
            return await chosen.preparer.prompts.token_ids(wanted, tenant), wanted, chosen.preparer

    async def text_of(self, request: Request, tenant: Tenant, model: str) -> str:
        """Return the text of a body's tokens; ``model``: that of a body without one. Raises a ``WarmpathError``."""
        with self.arrive(tenant) as arrival:
            body = await read_body(request, self.config.max_body_bytes, arrival.grow)
            asked = await self._read(body, tenant, arrival, partial(parse_detokenize, model=model))
            chosen, name, _ = self._chosen(asked.model, None, tenant, arrival, "tokenizer")
            chosen.preparer.adapters.choose(name, None, tenant.name, tenant.models)
            tokenizer = chosen.tokenizer

            def text() -> str:
                if max(asked.tokens, default=0) >= tokenizer.vocab_size:
                    message = f"tokens must be from 0 to {tokenizer.vocab_size - 1}."
                    raise InvalidRequest(message, param="tokens")
                return tokenizer.text_of(asked.tokens)

            if len(asked.tokens) <= INLINE_VALUES:
                return text()
            return await self.workers.run(tenant.name, arrival.body_bytes, text)

    async def _read(self, body: bytes, tenant: Tenant, arrival: Arrival, work: Callable[[bytes], T]) -> T:
        """Return ``work(body)``, done outside the event loop if that takes long."""
        inline = arrival.body_bytes <= INLINE_BODY_BYTES and most_values(body) <= INLINE_VALUES
        try:
            return work(body) if inline else await self.workers.run(tenant.name, arrival.body_bytes, work, body)
        except RecursionError:
            raise InvalidRequest("The body is nested too deeply; send one that is flatter.") from None

    def arrive(self, tenant: Tenant) -> Arrival:
        """Register a new request. Raises RateLimited."""
        return (self.entrance or self.front_door).arrive(tenant.name)

    def _chosen(self, name: str, adapter: str | None, tenant: Tenant, arrival: Arrival, needs: Needs) -> Chosen:
        """Return who answers for a model or one of its other names. Raises a ``WarmpathError``."""
        if self.choose is not None:
            return self.choose(name, adapter, tenant, arrival, needs)
        return Chosen(self, self.config.aliases.get(name, name))

    async def _wanted(
        self,
        request: Request,
        tenant: Tenant,
        arrival: Arrival,
        parse: Parse,
        form: AnswerFormat | None,
        needs: Needs,
    ) -> tuple[Completions, GenerateRequest, str]:
        """Read and parse a request's body; return who answers it, the request, a note. Raises a ``WarmpathError``."""
        body = await read_body(request, self.config.max_body_bytes, arrival.grow)

        async def read(work: Callable[[bytes], T]) -> T:
            return await self._read(body, tenant, arrival, work)

        if isinstance(form, Conversation):
            await read(form.read)
            await form.go_on(self.config.max_body_bytes - len(body), arrival.grow)
        rules = self.config.agent_prompt_rules

        def parsed(body: bytes) -> GenerateRequest:
            wanted = parse(body)
            return by_rules(wanted, follow=rules) if isinstance(wanted, ChatRequest) else wanted

        wanted = await read(parsed)
        chosen, name, note = self._chosen(wanted.model, wanted.lora_name, tenant, arrival, needs)
        if name != wanted.model:
            wanted = replace(wanted, model=name)
        return chosen, chosen._noted(wanted), note

    def _noted(self, wanted: GenerateRequest) -> GenerateRequest:
        """Return a request with its fields that this model ignores. Raises InvalidRequest."""
        if isinstance(wanted, ChatRequest) and wanted.chat_template_kwargs:
            unread = self.tokenizer.template.unread(wanted.chat_template_kwargs)
            more = unknown_fields((f"chat_template_kwargs.{name}" for name in unread), ())
            wanted = replace(wanted, unknown=(*wanted.unknown, *more))
        if isinstance(wanted, ChatRequest) and wanted.thinking.get("thinking") and not self.readers.thinks:
            wanted = replace(wanted, unknown=(*wanted.unknown, UnknownField("thinking")))
        if self.config.strict:
            require_none(wanted.unknown)
        if isinstance(wanted, ChatRequest) and any("reasoning" in message for message in wanted.messages):
            names = reasoning_fields("")
            if len([*self.tokenizer.template.unread(names)]) == len(names):  # no fault of the client's
                wanted = replace(wanted, unknown=(*wanted.unknown, UnknownField("reasoning")))
        if (
            isinstance(wanted, ChatRequest)
            and not self.tokenizer.template.repairs.shows_names
            and any("name" in message and message["role"] != "tool" for message in wanted.messages)
        ):
            wanted = replace(wanted, unknown=(*wanted.unknown, UnknownField("messages[].name")))
        return wanted
