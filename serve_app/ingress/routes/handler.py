"""What a route's handler is made of: the services it is given, and the guard around it."""

import functools
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Depends
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.anthropic.response import anthropic_error, anthropic_limits
from serve_app.api.openai.response import openai_error, openai_limits
from serve_app.ingress.guard import Api
from serve_app.ingress.services import Services

OPENAI = Api(openai_error, openai_limits)
ANTHROPIC = Api(anthropic_error, anthropic_limits, "request-id")


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Front = Annotated[Services, Depends(_services)]
Handler = Callable[..., Awaitable[Response]]

BODIES: list[type[BaseModel]] = []
"""Of all routes, as ``takes`` was told of them."""


def speaks_anthropic(request: Request) -> bool:
    """Whether a request's headers are those of Anthropic's clients."""
    return "anthropic-version" in request.headers or "x-api-key" in request.headers


def guarded(endpoint: str, api: Api | None = OPENAI, *, operator: bool = False) -> Callable[[Handler], Handler]:
    """Let failures of a handler leave as errors of its API, and count its answers as ``endpoint``'s.

    ``api`` None: the one that a request's headers tell. ``operator``: nobody else may call it.
    """

    def wrap(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def run(request: Request, services: Services, **path: str) -> Response:
            async def work() -> Response:
                if operator:
                    services.guard.require_operator(request)
                return await handler(request, services, **path)

            shown = api or (ANTHROPIC if speaks_anthropic(request) else OPENAI)
            return await services.guard.answer(request, endpoint, shown, work)

        return run

    return wrap


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """Return a route's options: FastAPI describes the body; the handler reads it, bounded, with the API's errors."""
    BODIES.append(body)
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    content = {"application/json": {"schema": schema}}
    return {"openapi_extra": {"requestBody": {"content": content, "required": True}}}
