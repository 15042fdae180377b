"""HTTP plumbing of the ingress: bounded bodies, request ids, errors in the API's shape, watching for disconnects."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from ray.serve.context import _get_serve_request_context
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from serve_app.errors import InvalidRequest, RequestTooLarge, WarmpathError

T = TypeVar("T")


def request_id_of(request: Request) -> str:
    """Return the id that Serve answers with as ``x-request-id``: the client's own, or one Serve made."""
    context = _get_serve_request_context()
    return str(context.request_id or request.headers.get("x-request-id", ""))[:128]


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body. Raises RequestTooLarge as soon as more than ``max_bytes`` are announced or seen."""
    too_large = RequestTooLarge(f"The request body is over the limit of {max_bytes} bytes; send a shorter prompt.")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("", "identity"):
        raise InvalidRequest(f"Content-Encoding {encoding[:32]!r} is not supported; send the body uncompressed.")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response (msgspec encodes several times faster than json)."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def error_headers(error: WarmpathError) -> dict[str, str]:
    """Return ``Retry-After`` (whole seconds, at least 1) where the error has one."""
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Await ``work``, but cancel it when the client goes away first. Raises ClientDisconnect then.

    The body must have been read: afterwards the only message a server sends is the disconnect.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
