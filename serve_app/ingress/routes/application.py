"""The application of one ingress: all routes, errors for unknown paths, and the API's documentation.

Handlers read and check bodies by themselves, so FastAPI only describes the routes: a request goes straight to them.
"""

import asyncio
import functools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from serve_app.api.openai.response import openai_error
from serve_app.errors import MethodNotAllowed, NotFound, WarmpathError
from serve_app.ingress.address import Address
from serve_app.ingress.guard import Api, foreign_host
from serve_app.ingress.http import credentials, json_response
from serve_app.ingress.observe.tracing import TraceRequests
from serve_app.ingress.routes import admin, batches, events, generation, operations, page, responses, tenants, tokens
from serve_app.ingress.routes.api_page import api_page, api_page_file
from serve_app.ingress.routes.handler import ANTHROPIC, BODIES, OPENAI, Handler, speaks_anthropic

OPENAPI_PATH = "/openapi.json"
ALL_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "POST")
ROUTERS = tuple(
    each.router for each in (generation, responses, batches, tokens, operations, admin, tenants, events, page)
)
ROUTES = tuple(route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute))
PATHS = frozenset(route.path for route in ROUTES)

_POOLING = "the models here generate text; use a server of such a model (`vllm serve MODEL --runner pooling`)"
_CLASSIFYING = f"{_POOLING}, or ask a chat model, with a schema in response_format"
_MEDIA = "the models here read and write text alone; use a server of a model for this"
NOT_HERE = {
    "/v1/responses/compact": "ask for a summary in a message, and send that in place of the conversation",
    "/v1/realtime": "answers come over HTTP, with stream: true as events",
    "/v1/uploads": "POST /v1/files takes a whole file",
    **dict.fromkeys(("/v1/embeddings", "/v1/embed", "/v2/embed", "/pooling", "/v1/pooling"), _POOLING),
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/classify", "/v1/classify", "/v1/moderations"),
        _CLASSIFYING,
    ),
    **dict.fromkeys(("/v1/audio", "/v1/images", "/v1/videos", "/v1/ocr"), _MEDIA),
    "/v1/chat/completions/": "POST /v1/responses stores its answers, and chat completions are not stored",
    **dict.fromkeys(
        ("/v1/organization", "/v1/organizations", "/v1/projects"),
        "operators change tenants and keys at /v1/admin/tenants and /v1/admin/keys",
    ),
    **dict.fromkeys(
        (
            "/v1/agents", "/v1/chatkit", "/v1/deployments", "/v1/environments", "/v1/live", "/v1/memory_stores",
            "/v1/sessions", "/v1/skills", "/v1/user_profiles", "/v1/vaults",
        ),
        "this server answers requests to models; run agents, and keep what they know, in your application",
    ),
    **dict.fromkeys(
        (
            "/v1/vector_stores", "/v1/assistants", "/v1/threads", "/v1/conversations", "/v1/fine_tuning",
            "/v1/containers", "/v1/evals",
        ),
        "this server keeps responses, files and batches alone; send the conversation with each request",
    ),
}  # fmt: skip
"""Paths of OpenAI's, Anthropic's, Cohere's and vLLM's APIs that are not offered, and a sentence for each."""


def make_application(address: Address) -> Starlette:
    """Return the application; the settings turn ``/openapi.json`` and ``/docs`` on and off."""

    desk = address.batches

    @asynccontextmanager
    async def life(served: Starlette) -> AsyncIterator[None]:
        if desk is not None:
            desk.start(served)
        yield
        if desk is not None:
            await desk.worker.stop()
        if address.tracer is not None:
            await asyncio.to_thread(address.tracer.close)

    application = _Application(
        routes=[
            *(Route(each.path, Direct(each.endpoint), methods=[*(each.methods or ())]) for each in ROUTES),
            *_docs(address),
            WebSocketRoute("/{path:path}", _no_websocket),
        ],
        lifespan=life,
        exception_handlers={HTTPException: _no_such_route, WarmpathError: _refused_there},
    )
    application.router.redirect_slashes = False  # Starlette would redirect to any host that the client names
    if address.tracer is not None:
        application.add_middleware(TraceRequests, tracer=address.tracer)
    application.state.address = address
    return application


class Direct:
    """A route's handler as an ASGI application, which fails by the application's rules alone."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of this route."""
        response = await self._handler(Request(scope, receive, send), **scope["path_params"])
        await response(scope, receive, send)


@functools.cache
def openapi() -> dict[str, Any]:
    """Return the schema of the API: the routes, and the bodies that handlers parse themselves."""
    described = FastAPI(title="warmpath")
    for router in ROUTERS:
        described.include_router(router)
    schema = described.openapi()
    _, bodies = models_json_schema(
        [(body, "validation") for body in BODIES], ref_template="#/components/schemas/{model}"
    )
    components = schema.setdefault("components", {})
    components.setdefault("schemas", {}).update(bodies["$defs"])
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{}, {"key": []}]  # a server without tenants needs no key
    return schema


def _docs(address: Address) -> list[Route]:
    """Return the routes of the API's documentation, which the settings turn on and off."""

    def only_where_published(known: bool = False) -> None:
        if not address.config.documented and not (known and address.config.enable_docs is None):
            raise HTTPException(404)

    def known(request: Request) -> bool:
        """Return whether the caller has a key."""
        try:
            address.guard.viewer(request)
            return bool(credentials(request))
        except WarmpathError:
            return False

    async def schema(request: Request) -> Response:
        only_where_published(known(request))
        prefix = request.scope.get("root_path", "")
        return json_response(openapi() | ({"servers": [{"url": prefix}]} if prefix else {}))

    async def docs(request: Request) -> Response:
        only_where_published()
        return api_page(request.headers.get("if-none-match"))

    async def file(request: Request, name: str) -> Response:
        only_where_published()
        return api_page_file(name, request.headers.get("if-none-match"))

    routes: dict[str, Handler] = {OPENAPI_PATH: schema, "/docs": docs, "/docs/{name}": file}
    return [Route(path, Direct(handler), methods=["GET"]) for path, handler in routes.items()]


class _HeadSent(OSError):
    """A HEAD's answer is complete; for its route the client has left."""


async def _without_body(answer: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer HEAD as GET without the body (RFC 9110 9.3.2); a stream ends with its head."""
    complete = False

    async def head(message: Message) -> None:
        nonlocal complete
        if message["type"] == "http.response.start":
            await send(message)
        elif not complete:
            complete = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        if message.get("more_body"):
            raise _HeadSent

    try:
        await answer({**scope, "method": "GET"}, receive, head)
    except (_HeadSent, ClientDisconnect):
        if not complete:
            raise


class _Application(Starlette):
    """Counts HTTP requests until their whole answer is sent, and lets in those for this host."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        answer: ASGIApp = super().__call__
        if scope["method"] == "HEAD":
            answer = functools.partial(_without_body, answer)
        with self.state.address.drain.answering():
            await (self._refused(scope) or self._let_in(scope, answer))(scope, receive, send)

    def _let_in(self, scope: Scope, answer: ASGIApp) -> ASGIApp:
        """Return what also tells a browser that pages of some other sites may ask and read."""
        origins = self.state.address.guard.allowed_origins
        if not origins or not any(name == b"origin" for name, _ in scope["headers"]):
            return answer
        return CORSMiddleware(
            answer, tuple(origins), allow_methods=ALL_METHODS, allow_headers=("*",), expose_headers=("*",)
        )

    def _refused(self, scope: Scope) -> Response | None:
        """Return the refusal of a request for another host: no route answers it, so none can forget to check."""
        guard = self.state.address.guard
        if guard.allowed_hosts is None:
            return None
        error = foreign_host(request := Request(scope), guard.allowed_hosts)
        if error is None:
            return None
        guard.metrics.answered("refused_host", error.status, "none")
        return _api_of(_path(request)).refusal(error, request)


async def _no_such_route(request: Request, error: Exception) -> Response:
    path, prefix = _path(request), request.scope.get("root_path", "")
    if not path and request.method in ("GET", "HEAD"):
        # The page's paths are relative to a folder. So is this one: no client can name another host in it.
        return Response(status_code=307, headers={"location": f"{prefix.rpartition('/')[2]}/"})
    other_method = isinstance(error, HTTPException) and error.status_code == 405
    methods = _methods(path) or ["GET"]  # those of the documentation
    allowed = sorted({*methods, "OPTIONS", *(["HEAD"] if "GET" in methods else [])})
    if other_method and request.method == "OPTIONS":
        return Response(status_code=204, headers={"allow": ", ".join(allowed)})
    shown: WarmpathError
    if not other_method and (other := _meant(path, request.method)):
        shown = NotFound(f"There is no {path[:200]} here; did you mean {other[:200]}?")
    elif why := _not_here(path):
        shown = NotFound(f"There is no {path[:200]} here: {why}.")
    elif other_method:
        use = " or ".join(methods)
        shown = MethodNotAllowed(f"{request.method} is not allowed on {path[:200]}; use {use}.", allowed)
    else:
        shown = NotFound(f"There is no {path[:200]} here; GET /docs lists the routes.")
    api = ANTHROPIC if speaks_anthropic(request) else _api_of(path)
    return api.refusal(shown, request)


async def _refused_there(request: Request, error: Exception) -> Response:
    """Answer an error of a route without a guard."""
    assert isinstance(error, WarmpathError)
    return (ANTHROPIC if speaks_anthropic(request) else _api_of(_path(request))).refusal(error, request)


def _methods(path: str) -> list[str]:
    """Return the methods of a path."""
    return sorted({one for route in ROUTES if route.path_regex.match(path) for one in route.methods or ()} - {"HEAD"})


def _meant(path: str, method: str) -> str:
    """Return a similar path that there is, "" for none.

    Clients' base URLs lack /v1, repeat it, have it where the path has none, or end with a slash, as paths do.
    """
    plain = re.sub("//+", "/", path).rstrip("/")
    for other in (plain, f"/v1{plain}", plain.removeprefix("/v1")):
        if other != path and (other in PATHS or (other == plain and method in _methods(other))):
            return other
    return ""


def _path(request: Request) -> str:
    """Return a request's path below the prefix of an application that is not at /."""
    # Not request.url, which cannot be read with a query that is not in UTF-8.
    path: str = request.scope["path"]
    return path.removeprefix(request.scope.get("root_path", ""))


def _api_of(path: str) -> Api:
    of_anthropic = path == generation.MESSAGES_PATH or path.startswith(f"{generation.MESSAGES_PATH}/")
    return ANTHROPIC if of_anthropic else OPENAI


def _not_here(path: str) -> str:
    """Return why a known API's path is not offered, "" for another path. A client's base URL may lack /v1."""
    known = ((name, why) for name, why in NOT_HERE.items() for name in (name, name.removeprefix("/v1")))
    return next((why for name, why in known if path == name or path.startswith(f"{name.rstrip('/')}/")), "")


async def _no_websocket(websocket: WebSocket) -> None:
    """Refuse a WebSocket in OpenAI's shape, before it is accepted."""
    path = websocket.scope["path"]
    shown = openai_error(NotFound(f"There is no WebSocket at {path[:200]}; send POST requests, with stream: true."), "")
    try:
        await websocket.send_denial_response(json_response(shown.body, shown.status))
    except RuntimeError:  # a proxy that cannot pass an answer on
        await websocket.close(reason=shown.body["error"]["message"])
