"""What a route's handler is made of: the services it is given, and the guard around it."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Depends
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.format import RenderError, RenderLimits
from serve_app.api.openai.response import openai_limits
from serve_app.ingress.services import Services


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Front = Annotated[Services, Depends(_services)]
Handler = Callable[..., Awaitable[Response]]


def guarded(
    endpoint: str, render_error: RenderError, render_limits: RenderLimits = openai_limits
) -> Callable[[Handler], Handler]:
    """Let whatever goes wrong in a handler leave as an error of its API, and count its answers as ``endpoint``'s.

    ``render_limits``: how the API tells what is left of a tenant's limits.
    """

    def wrap(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def run(request: Request, services: Services, **path: str) -> Response:
            work = functools.partial(handler, request, services, **path)
            return await services.guard.answer(request, endpoint, render_error, work, render_limits)

        return run

    return wrap


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """Return the options of a route whose handler reads this body itself: FastAPI is to describe it, not to parse it.

    FastAPI's errors would not be in the API's shape, and it would parse a body before its size is bounded.
    """
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    content = {"application/json": {"schema": schema}}
    return {"openapi_extra": {"requestBody": {"content": content, "required": True}}}
