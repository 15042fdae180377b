"""The way in: a request's body, read and parsed while it waits at the entrance, and the model that it chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from router.protocol.block_hash import TokenArray
from serve_app.api.agent_rules import by_rules
from serve_app.api.format import AnswerFormat
from serve_app.api.openai.tokens import parse_detokenize
from serve_app.api.request import ChatRequest, GenerateRequest
from serve_app.errors import InvalidRequest
from serve_app.fairness.front_door import Arrival
from serve_app.generation.prompt import most_values
from serve_app.ingress.address import Address, Chosen, Needs
from serve_app.ingress.client_headers import arrived_s
from serve_app.ingress.conversation import Conversation
from serve_app.ingress.http import read_body
from serve_app.ingress.model import Arrived, Model
from serve_app.tenants import Tenant

INLINE_BODY_BYTES, INLINE_VALUES = 64 << 10, 4096
"""Longer bodies, and those that may hold more values, are parsed outside the event loop."""

Parse = Callable[[bytes], GenerateRequest]
T = TypeVar("T")


async def generate(
    address: Address, http: Request, tenant: Tenant, parse: Parse, answer_format: AnswerFormat
) -> Response:
    """Return a whole or started answer. Raises a ``WarmpathError`` before its first piece, or ClientDisconnect."""
    at_s = arrived_s(http.scope)
    with arrive(address, tenant) as arrival:
        await address.workers.loop.turn(tenant.name)
        # Only a batch's lines say whether they wait for all others.
        needs: Needs = "replica later" if hasattr(http.state, "waits_for_all") else "replica"
        chosen, request = await _read_request(address, http, tenant, arrival, parse, answer_format, needs)
        http.state.counts = chosen.model
        note = ""
        if chosen.fallback is not None:
            named, cause = chosen.fallback
            note = str(chosen.fallback)
            address.metrics.add("warmpath_fallbacks_total", model=named, fallback=chosen.name, cause=cause)
        return await chosen.model.answer(http, Arrived(request, tenant, arrival, at_s, note), answer_format)


async def tokens(
    address: Address, http: Request, tenant: Tenant, parse: Parse, form: Conversation | None = None
) -> tuple[TokenArray, GenerateRequest, Model]:
    """Return the tokens of a request's prompt, the request, and its model. Raises a ``WarmpathError``."""
    with arrive(address, tenant) as arrival:
        chosen, request = await _read_request(address, http, tenant, arrival, parse, form, "tokenizer")
        return await chosen.model.preparer.prompts.token_ids(request, tenant), request, chosen.model


async def text_of(address: Address, http: Request, tenant: Tenant) -> str:
    """Return the text of a body's tokens. Raises a ``WarmpathError``."""
    with arrive(address, tenant) as arrival:
        body = await read_body(http, address.config.max_body_bytes, arrival.grow)
        parse = partial(parse_detokenize, model=address.default_model(http, tenant))
        request = await _parsed(address, body, tenant, arrival, parse)
        model, name, _ = address.choose(request.model, None, tenant, arrival, "tokenizer")
        model.adapters.choose(name, None, tenant.name, tenant.models)
        tokenizer = model.tokenizer

        def text() -> str:
            if max(request.tokens, default=0) >= tokenizer.vocab_size:
                raise InvalidRequest(f"tokens must be from 0 to {tokenizer.vocab_size - 1}.", param="tokens")
            return tokenizer.text_of(request.tokens)

        if len(request.tokens) <= INLINE_VALUES:
            return text()
        return await address.workers.run(tenant.name, arrival.body_bytes, text)


def arrive(address: Address, tenant: Tenant) -> Arrival:
    """Register a new request. Raises RateLimited."""
    return address.entrance.arrive(tenant.name)


async def _read_request(
    address: Address,
    http: Request,
    tenant: Tenant,
    arrival: Arrival,
    parse: Parse,
    form: AnswerFormat | None,
    needs: Needs,
) -> tuple[Chosen, GenerateRequest]:
    """Read and parse a request's body; return who answers it, and the request. Raises a ``WarmpathError``."""
    config = address.config
    body = await read_body(http, config.max_body_bytes, arrival.grow)
    if isinstance(form, Conversation):
        await _parsed(address, body, tenant, arrival, form.read)
        await form.go_on(config.max_body_bytes - len(body), arrival.grow)

    def with_rules(body: bytes) -> GenerateRequest:
        request = parse(body)
        return by_rules(request, follow=config.agent_prompt_rules) if isinstance(request, ChatRequest) else request

    request = await _parsed(address, body, tenant, arrival, with_rules)
    chosen = address.choose(request.model, request.lora_name, tenant, arrival, needs)
    if chosen.name != request.model:
        request = replace(request, model=chosen.name)
    return chosen, chosen.model.checked(request)


async def _parsed(address: Address, body: bytes, tenant: Tenant, arrival: Arrival, parse: Callable[[bytes], T]) -> T:
    """Return ``parse(body)``, done outside the event loop if that takes long."""
    inline = arrival.body_bytes <= INLINE_BODY_BYTES and most_values(body) <= INLINE_VALUES
    try:
        return parse(body) if inline else await address.workers.run(tenant.name, arrival.body_bytes, parse, body)
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply; send one that is flatter.") from None
