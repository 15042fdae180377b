"""ASGI middleware that traces generation requests; the application uses it only if traces are exported."""

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.ingress.http import request_id_of
from serve_app.tracing import RequestTrace, Tracer

TRACED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})


class TraceRequests:
    """Traces requests. A span lasts until the whole answer was sent, or its client takes no more."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass every request on, and trace the generation requests."""
        route = str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or route not in TRACED:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        trace = RequestTrace(self._tracer, scope["method"], route, Headers(scope=scope), request_id_of(request))
        if not trace.traceparent:
            await self._app(scope, receive, send)
            return
        request.state.trace = trace
        status: int | None = None
        whole = False

        async def watch(message: Message) -> None:
            nonlocal status, whole
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                whole = not message.get("more_body", False)

        try:
            await self._app(scope, receive, watch)
        finally:
            tenant = getattr(request.state, "tenant", None)
            trace.end(tenant.name if tenant is not None else None, status, whole=whole)
