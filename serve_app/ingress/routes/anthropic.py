"""Anthropic's messages."""

from __future__ import annotations

import functools
from collections.abc import Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.anthropic.request import CountTokensBody, MessagesBody, parse_count, parse_messages
from serve_app.api.anthropic.response import MessagesFormat, anthropic_error, anthropic_limits
from serve_app.ingress.http import json_response, request_id_of
from serve_app.ingress.routes.handler import Front, Handler, guarded, takes
from serve_app.ingress.services import Services

router = APIRouter(tags=["messages"])

PATH = "/v1/messages"


def speaks_anthropic(request: Request) -> bool:
    """Whether a request's headers are those of Anthropic's clients."""
    return "anthropic-version" in request.headers or "x-api-key" in request.headers


def anthropic_guarded(endpoint: str) -> Callable[[Handler], Handler]:
    """Guard a handler as ``guarded`` does; every answer has Anthropic's header with the request's id."""

    def wrap(handler: Handler) -> Handler:
        run = guarded(endpoint, anthropic_error, anthropic_limits)(handler)

        @functools.wraps(handler)
        async def named(request: Request, services: Services, **path: str) -> Response:
            response = await run(request, services, **path)
            response.headers["request-id"] = request_id_of(request)
            return response

        return named

    return wrap


@router.post(PATH, **takes(MessagesBody))
@anthropic_guarded("messages")
async def messages(request: Request, services: Front) -> Response:
    """Anthropic's messages."""
    compare = functools.partial(services.history.compare, services.guard.tenant(request).name)
    return await services.generate(request, parse_messages, MessagesFormat(compare))


@router.post(f"{PATH}/count_tokens", **takes(CountTokensBody))
@anthropic_guarded("count_tokens")
async def count_tokens(request: Request, services: Front) -> Response:
    """How many tokens a message's prompt has; nothing is generated."""
    return json_response({"input_tokens": await services.count_tokens(request, parse_count)})
