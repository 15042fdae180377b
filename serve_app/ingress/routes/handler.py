"""Tools for route handlers: access to the address, and the guard around a handler."""

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.anthropic.response import anthropic_error, anthropic_limits
from serve_app.api.openai.response import openai_error, openai_limits
from serve_app.api.request import GenerateRequest, ignored_fields
from serve_app.ingress.address import Address
from serve_app.ingress.guard import Api
from serve_app.ingress.http import PROMPT_RULES, WARNING, read_body

OPENAI = Api(openai_error, openai_limits)
ANTHROPIC = Api(anthropic_error, anthropic_limits, "request-id")


Handler = Callable[..., Awaitable[Response]]

SMALL_BODY_BYTES = 1 << 20
"""The most of a body that holds names and numbers, read in the event loop."""

BODIES: list[type[BaseModel]] = []
"""The bodies of all routes, registered by ``takes``."""


def speaks_anthropic(request: Request) -> bool:
    """Return whether a request's headers are those of Anthropic's clients."""
    return "anthropic-version" in request.headers or "x-api-key" in request.headers


def guarded(endpoint: str, api: Api | None = OPENAI, *, operator: bool = False) -> Callable[[Handler], Handler]:
    """Convert a handler's failures to errors of its API, and count its answers under ``endpoint``.

    ``api`` None: the request's headers decide. ``operator``: only operators may call it. The result takes a request
    and the parts of its path; the handler gets the address beside the request.
    """

    def wrap(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def run(request: Request, **path: str) -> Response:
            address: Address = request.app.state.address

            async def work() -> Response:
                if operator:
                    address.guard.require_operator(request)
                return await handler(request, address, **path)

            shown = api or (ANTHROPIC if speaks_anthropic(request) else OPENAI)
            return await address.guard.answer(request, endpoint, shown, work)

        # What the schema tells of: the parts of the path.
        taken = inspect.signature(run)
        told = [each for each in taken.parameters.values() if each.name != "address"]
        del run.__wrapped__
        run.__signature__ = taken.replace(parameters=told)  # type: ignore[attr-defined]
        return run

    return wrap


async def small_body(request: Request, address: Address) -> bytes:
    """Return a body that holds names and numbers. Raises RequestTooLarge and RequestTimeout."""
    return await read_body(request, min(SMALL_BODY_BYTES, address.config.max_body_bytes))


def warnings(request: GenerateRequest) -> dict[str, str]:
    """Return the headers that name a request's ignored fields and the rules for its prompt, if there are any."""
    headers = {WARNING: ignored_fields(request.unknown), PROMPT_RULES: ", ".join(request.prompt_rules)}
    return {name: value for name, value in headers.items() if value}


def takes(*bodies: type[BaseModel]) -> dict[str, Any]:
    """Return a route's options: FastAPI describes the body, but the handler parses it, for bounds and API errors.

    ``bodies``: the forms that it may have.
    """
    BODIES.extend(bodies)
    forms = [{"$ref": f"#/components/schemas/{body.__name__}"} for body in bodies]
    content = {"application/json": {"schema": forms[0] if len(forms) == 1 else {"anyOf": forms}}}
    return {"openapi_extra": {"requestBody": {"content": content, "required": True}}}
