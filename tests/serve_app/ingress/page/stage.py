"""A small server that serves the page and simulates the rest of an ingress: models, chats, and a test's events."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from serve_app.ingress.routes.page import page_response
from tests.serve_app.ingress.scripted import Loopback

Event = dict[str, Any]
REFUSED = JSONResponse({"error": {"message": "Incorrect API key provided."}}, 401)


class Stage:
    """The server's answers. ``snapshots``: the beginning of a stream of events, by key; no entry: 401.

    ``words``: an answer; it waits before its last word while ``held``, and before its first while ``reading``.
    ``thoughts``: before it; ``ends``: its finish reason. ``bodies``: the chats received. ``busy``: the reason to refuse
    listeners now, with 429. ``mute``: streams send nothing, as if the network were gone. ``sessions``: by key;
    ``asked_sessions``: the keys of requests for them; ``no_sessions``: 404. ``models``: by name, whose adapter or alias
    each is; ``asked_models``: those of streams of events, "" for none. ``tables``: of tenants, by key; ``requests``: by
    tenant; ``asked_tables``: the keys and spans of requests for tables. ``apis``: the keys that may read the API.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.snapshots: dict[str, list[Event]] = {"": []}
        self.words = ["Yes", ", ", "you", " may."]
        self.thoughts: list[str] = []
        self.ends = "stop"
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.sessions: dict[str, list[Event]] = {}
        self.asked_sessions: list[str] = []
        self.no_sessions = False
        self.models = {"demo": "demo"}
        self.asked_models: list[str] = []
        self.tables: dict[str, Event] = {}
        self.asked_tables: list[tuple[str, str]] = []
        self.requests: dict[str, list[Event]] = {}
        self.apis: list[str] = []
        self.held = threading.Event()
        self.held.set()
        self.reading = threading.Event()
        self.mute = False
        self.fails = ""
        self.busy = ""
        self.left = threading.Event()
        self._listeners: list[tuple[str, asyncio.Queue[Event | None]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def send(self, *events: Event, key: str = "") -> None:
        for event in events:
            for listener, queue in self._listeners:
                if listener == key and self._loop is not None:
                    self._loop.call_soon_threadsafe(queue.put_nowait, event)

    def hang_up(self) -> None:
        for _, queue in self._listeners:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(queue.put_nowait, None)
        self._listeners.clear()

    async def events(self, request: Request) -> Response:
        """Answer like ``GET /v1/cache/events``."""
        key = _key(request)
        if key not in self.snapshots:
            return REFUSED
        if self.busy:
            return JSONResponse({"error": {"message": self.busy}}, 429, {"retry-after": "1"})
        if "once" in request.query_params:
            return JSONResponse(self.snapshots[key][0])
        self.asked_models.append(request.query_params.get("model", ""))
        self._loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        for event in self.snapshots[key]:
            queue.put_nowait(event)
        self._listeners.append((key, queue))

        async def stream() -> AsyncGenerator[bytes, None]:
            yield b": here\n\n"
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), 1)
                except TimeoutError:
                    if not self.mute:
                        yield b": here\n\n"
                    continue
                if event is None:
                    return
                yield b"event: %b\ndata: %b\n\n" % (
                    event["type"].encode(),
                    json.dumps(event, ensure_ascii=False).encode(),
                )

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def told_sessions(self, request: Request) -> Response:
        """Answer like ``GET /v1/cache/sessions``."""
        key = _key(request)
        self.asked_sessions.append(key)
        if self.no_sessions:
            return JSONResponse({"detail": "there are others"}, 404)
        tenant = request.query_params.get("tenant")
        if key not in self.sessions:
            return REFUSED
        return JSONResponse({"sessions": [row for row in self.sessions[key] if tenant in (None, row["tenant"])]})

    async def table(self, request: Request) -> Response:
        """Answer like ``GET /v1/tenants/stats``."""
        key = _key(request)
        self.asked_tables.append((key, request.query_params["window_s"]))
        return JSONResponse(self.tables[key]) if key in self.tables else JSONResponse({"detail": "none"}, 404)

    async def told_requests(self, request: Request) -> Response:
        """Answer like ``GET /v1/tenants/TENANT/requests``."""
        return JSONResponse({"data": self.requests.get(request.path_params["tenant"], [])})

    async def api(self, request: Request) -> Response:
        """Answer like ``GET /openapi.json``, where it needs a key."""
        if _key(request) not in self.apis:
            return REFUSED
        post = {"post": {"summary": "Chat", "description": "A chat's answer.\n\nMore."}}
        return JSONResponse({"info": {"title": "warmpath"}, "paths": {"/v1/chat/completions": post}})

    async def listed(self, request: Request) -> Response:
        """Answer like ``GET /v1/models``."""
        if _key(request) not in self.snapshots:
            return REFUSED
        data = [{"id": name, "object": "model", "root": of, "parent": None} for name, of in self.models.items()]
        return JSONResponse({"object": "list", "data": data})

    async def chat(self, request: Request) -> Response:
        """Answer like a streamed chat; tokens of the previous prompt count as cached."""
        body = await request.json()
        self.keys.append(_key(request))
        if self.fails:
            return JSONResponse({"error": {"message": self.fails}}, 429)
        warm = len(json.dumps(self.bodies[-1]["messages"])) // 4 if self.bodies else 0
        self.bodies.append(body)
        prompt = len(json.dumps(body["messages"])) // 4
        usage = {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": min(prompt, warm)}}
        usage["completion_tokens"] = len(self.words)
        head = {"id": f"chatcmpl-answer{len(self.bodies)}", "object": "chat.completion.chunk"}

        async def stream() -> AsyncGenerator[bytes, None]:
            try:
                while self.reading.is_set():  # noqa: ASYNC110 - a test's thread clears it
                    await asyncio.sleep(0.01)
                for thought in self.thoughts:
                    yield _chunk({**head, "choices": [{"index": 0, "delta": {"reasoning_content": thought}}]})
                for at, word in enumerate(self.words):
                    if at == len(self.words) - 1:
                        while not self.held.is_set():  # noqa: ASYNC110 - a test's thread sets it
                            await asyncio.sleep(0.01)
                    yield _chunk({**head, "choices": [{"index": 0, "delta": {"content": word}}]})
                yield _chunk({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": self.ends}]})
                yield _chunk({**head, "choices": [], "usage": usage})
                yield b"data: [DONE]\n\n"
            except asyncio.CancelledError:
                self.left.set()
                raise

        return StreamingResponse(stream(), media_type="text/event-stream")


async def _count(request: Request) -> Response:
    body = await request.json()
    assert all(message["role"] != "system" for message in body["messages"])
    return JSONResponse({"input_tokens": 2247})


def _key(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


def _chunk(body: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(body).encode()


async def _page(request: Request) -> Response:
    return page_response(request.path_params.get("path", "index.html"))


@contextmanager
def staged() -> Iterator[tuple[str, Stage]]:
    """Serve the page on loopback; yield the base URL and the stage."""
    stage = Stage()
    routes = [
        Route("/", _page),
        Route("/page/{path:path}", _page),
        Route("/v1/models", stage.listed),
        Route("/v1/chat/completions", stage.chat, methods=["POST"]),
        Route("/v1/messages/count_tokens", _count, methods=["POST"]),
        Route("/v1/cache/events", stage.events),
        Route("/v1/tenants/stats", stage.table),
        Route("/v1/tenants/{tenant}/requests", stage.told_requests),
        Route("/openapi.json", stage.api),
        Route("/v1/cache/sessions", stage.told_sessions),
    ]
    with Loopback(lambda: Starlette(routes=routes)) as running:
        yield running.url, stage
