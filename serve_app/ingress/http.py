"""HTTP helpers of the ingress: bounded bodies, request ids, errors in the API's shape, disconnect detection."""

import asyncio
import hmac
import math
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from serve_app.errors import (
    AuthenticationFailed,
    BudgetSpent,
    InvalidRequest,
    MethodNotAllowed,
    RequestTimeout,
    RequestTooLarge,
    UnsupportedEncoding,
    WarmpathError,
)
from serve_app.ray_compat import serve_request_id

BODY_TIMEOUT_S = 30.0
CLIENT_LEFT = 499
"""The status under which a request is counted whose client left before the end of its answer. Source: nginx."""
WARNING = "x-warmpath-warning"
"""The header that names what was ignored."""
PROMPT_RULES = "x-warmpath-prompt-rules"
"""The header that names the rules by which a prompt differs from what was sent (`agent_prompt_rules`)."""
ADVICE = "x-warmpath-advice"
"""The header that names, once a session, what would have kept its prefix."""
MIN_BODY_BYTES_PER_S = 65_536
"""A body may take ``BODY_TIMEOUT_S``, plus the time that its received bytes need at this rate."""
_MOST_DIGITS = 32
GZIP_STEP_BYTES = 64 << 10
"""How much of a compressed body is expanded at once, before other requests have their turn."""


def request_id_of(request: Request) -> str:
    """Return the id that Serve returns as ``x-request-id``: the client's own, or a generated one."""
    return (serve_request_id() or request.headers.get("x-request-id", ""))[:128]


def credentials(request: Request) -> str | None:
    """Return the Authorization header, or its equivalent for a key in ``x-api-key``, Anthropic's header.

    Raises AuthenticationFailed if both exist and differ.
    """
    authorization, key = request.headers.get("authorization"), request.headers.get("x-api-key")
    if key is None:
        return authorization
    scheme, _, other = (authorization or "").strip().partition(" ")
    if authorization and (scheme.lower() != "bearer" or not hmac.compare_digest(other.strip().encode(), key.encode())):
        raise AuthenticationFailed("Authorization and x-api-key hold different keys; send one of them.")
    return f"Bearer {key}"


async def read_body(
    request: Request, max_bytes: int, grow: Callable[[int], None] = lambda _: None, timeout_s: float = BODY_TIMEOUT_S
) -> bytes:
    """Return the body, expanded. ``grow`` gets byte counts before bytes are stored: the announced size, or each part.

    Raises like ``body_parts``.
    """
    too_large = f"The request body is over the limit of {max_bytes} bytes; send a shorter prompt."
    body, announced = bytearray(), _announced(request)
    if 0 < announced <= max_bytes:
        grow(announced)
    counted = announced
    async for part in body_parts(request, max_bytes, too_large, timeout_s):
        body += part
        if len(body) > counted:
            grow(len(body) - counted)
            counted = len(body)
    return bytes(body)


async def body_parts(
    request: Request, max_bytes: int, too_large: str, timeout_s: float = BODY_TIMEOUT_S
) -> AsyncIterator[bytes]:
    """Yield the parts of the body as they arrive; of one in gzip, as they are expanded: ``max_bytes`` bounds both.

    Raises RequestTooLarge as soon as possible, and RequestTimeout if the body stops for ``timeout_s``, or falls
    behind ``MIN_BODY_BYTES_PER_S`` by as much. The caller's own time does not count. Raises UnsupportedEncoding, and
    InvalidRequest for a body that is not what its header says.
    """
    if _announced(request) > max_bytes:
        raise RequestTooLarge(too_large)
    encoding = request.headers.get("content-encoding", "").strip().lower()
    parts = _received(request, max_bytes, too_large, timeout_s)
    if encoding in ("gzip", "x-gzip"):
        parts = _expanded(parts, max_bytes, too_large)
    elif encoding not in ("", "identity"):
        message = f"Content-Encoding {encoding[:32]!r} is not supported; send the body uncompressed, or in gzip."
        raise UnsupportedEncoding(message)
    async for part in parts:
        yield part


async def _received(request: Request, max_bytes: int, too_large: str, timeout_s: float) -> AsyncIterator[bytes]:
    """Yield the parts of the body as they were sent. Raises ClientDisconnect."""
    receive, clock, size, waited_s, more = request.receive, asyncio.get_running_loop().time, 0, 0.0, True
    while more:
        begun_s = clock()
        try:
            async with asyncio.timeout(timeout_s + size / MIN_BODY_BYTES_PER_S - waited_s):
                message = await receive()
        except TimeoutError as error:
            raise RequestTimeout(f"Only {size} bytes of the request body arrived in time; send it again.") from error
        waited_s += clock() - begun_s
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > max_bytes:
            raise RequestTooLarge(too_large)
        if part:
            yield part


async def _expanded(parts: AsyncIterator[bytes], max_bytes: int, too_large: str) -> AsyncIterator[bytes]:
    """Yield the content of a body in gzip. A small one may stand for gigabytes, so it is expanded in steps."""
    gzip, size = zlib.decompressobj(zlib.MAX_WBITS | 16), 0
    async for part in parts:
        left = part
        while left:
            try:
                expanded = gzip.decompress(left, GZIP_STEP_BYTES)
            except zlib.error as error:
                raise InvalidRequest("The body is not gzip, as its Content-Encoding says.") from error
            if gzip.unused_data:
                raise InvalidRequest("Something follows the body's gzip stream; send one stream.")
            left = gzip.unconsumed_tail
            size += len(expanded)
            if size > max_bytes:
                raise RequestTooLarge(too_large)
            if expanded:
                yield expanded
            if left:
                await asyncio.sleep(0)
    if not gzip.eof:
        raise InvalidRequest("The body's gzip stream breaks off; send it again.")


def _announced(request: Request) -> int:
    announced = request.headers.get("content-length", "")
    # Python converts no more than 4,300 digits.
    return int(announced[:_MOST_DIGITS]) if announced.isdecimal() else 0


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response, encoded by msgspec, which is several times faster than json."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def error_headers(error: WarmpathError) -> dict[str, str]:
    """Return the headers that belong to an error's status (RFC 9110).

    ``Retry-After`` is in whole seconds, at least 1; a request timeout also closes its connection.
    """
    headers: dict[str, str] = {}
    match error:
        case RequestTimeout():
            headers["connection"] = "close"
        case AuthenticationFailed():
            headers["www-authenticate"] = "Bearer"
        case MethodNotAllowed():
            headers["allow"] = ", ".join(error.allowed)
        case UnsupportedEncoding():
            headers["accept-encoding"] = "gzip"
    if error.retry_after_s is not None:
        if isinstance(error, BudgetSpent):  # clients of OpenAI and Anthropic would wait for it
            headers["x-should-retry"] = "false"
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return headers


@asynccontextmanager
async def until_disconnect(request: Request) -> AsyncIterator[None]:
    """Cancel the block when the client disconnects, and raise ClientDisconnect. The body must be read before.

    The block runs in the caller's own task, so the caller can still close all objects that the block made.
    """
    task = asyncio.current_task()
    assert task is not None
    before, left, over = task.cancelling(), False, False

    def leave(watcher: asyncio.Future[None]) -> None:
        nonlocal left
        if not watcher.cancelled() and not over:
            watcher.exception()  # an error in receiving counts as a disconnect
            left = True
            task.cancel()

    watcher = asyncio.ensure_future(until_gone(request.receive))
    watcher.add_done_callback(leave)
    try:
        yield
    except asyncio.CancelledError as error:
        if left and task.uncancel() <= before:
            raise ClientDisconnect from error
        raise
    finally:
        over = True
        # It ends in the loop's next round, before another task begins to receive.
        watcher.cancel()


async def has_left(request: Request) -> bool:
    """Return whether the client has disconnected, as far as is known. The body must be read, or of no use."""
    try:
        async with asyncio.timeout(0):
            await until_gone(request.receive)
    except TimeoutError:
        return False
    except Exception:  # an error in receiving counts as a disconnect
        return True
    return True


async def until_gone(receive: Callable[[], Awaitable[Any]]) -> None:
    """Return when the client has disconnected; ignore its other messages."""
    while (await receive())["type"] != "http.disconnect":
        pass
