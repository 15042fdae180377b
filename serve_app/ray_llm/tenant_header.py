"""The header that names a request's tenant: it must name one."""

from collections.abc import Callable, Iterable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose


class RepeatedTenant(ValueError):
    """A request names two tenants. ``status_code``: read by Ray's ingress."""

    status_code = 400


def only_value(headers: Iterable[tuple[str, str]], name: str) -> str:
    """Return a header's value, "" without it; ``name``: in lower case. Raises RepeatedTenant for two that differ.

    A gateway may add its header to one that the client sent, and which of both wins depends on the path.
    """
    values = {value for header, value in headers if header.lower() == name} if name else set()
    if len(values) > 1:
        raise RepeatedTenant(f"The header {name} is sent twice, and names the tenant; send one.")
    return next(iter(values), "")


class TenantMiddleware:
    """Notes each request's headers before vLLM's own application runs it."""

    def __init__(self, app: ASGIApp, note: Callable[[Iterable[tuple[str, str]]], None]) -> None:
        self._app = app
        self._note = note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a request, or refuse one that names two tenants."""
        if scope["type"] != "lifespan":
            try:
                self._note((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
            except RepeatedTenant as error:
                await _refusal(scope, str(error))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _refusal(scope: Scope, message: str) -> ASGIApp:
    """Return the answer to a request that names two tenants; a WebSocket is closed."""
    if scope["type"] == "websocket":
        return WebSocketClose(1008, message)
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": 400}
    return JSONResponse({"error": error}, RepeatedTenant.status_code)
