"""An ingress on a real socket, in this process, with scripted replicas: the test defines the model's text."""

import asyncio
import inspect
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.protocol.block_hash import PrefixScope
from serve_app.api.anthropic.history import MessageHistory
from serve_app.api.openai.response import model_body
from serve_app.cache_misses.advice import AdviceBook
from serve_app.cache_misses.detector import MissDetector, PromptMemory
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.config.app import AppConfig
from serve_app.config.tenants import TenantConfig
from serve_app.engine.protocol import EngineOutput, EngineRequest, FinishReason, FirstToken, SamplingParams, TakeAtOnce
from serve_app.fairness.front_door import FrontDoor
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares
from serve_app.generation.prepare import Limits, Preparer
from serve_app.generation.tool_calls.reader import AnswerReaders
from serve_app.ingress.batches import BatchDesk, ModelGate
from serve_app.ingress.client_headers import ClientHeaders
from serve_app.ingress.completions import Completions
from serve_app.ingress.drain import Drain
from serve_app.ingress.guard import RouteGuard
from serve_app.ingress.models import Models
from serve_app.ingress.observe.answer_meter import (
    Observers,
    observe_costs,
    observe_misses,
    observe_prompts,
    observe_usage,
    trace_answer,
)
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.ingress.routes.application import make_application
from serve_app.ingress.services import Access, Catalog, Fleet, Records, Services
from serve_app.prompts.registry import PromptTraffic
from serve_app.stored.database import Database, StorageLimits
from serve_app.stored.objects import StoredObjects
from serve_app.stored.responses import StoredResponses
from serve_app.tenants import Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer
from serve_app.tracing import Tracer
from serve_app.usage import Ledger
from tests.serve_app.generation.outputs import output

PATIENCE_S = 30
BOUNDS = StorageLimits(ttl_s=86_400, max_bytes=1 << 30)
"""The bounds of stored responses."""

Place = Literal["alone", "first", "second"]
"""Of the model that a test asks for: the only one of its address, or with another one."""
PLACES: tuple[Place, ...] = ("alone", "first", "second")
OTHER = "another"

GENERATION = EngineRequest(
    request_id="r",
    token_ids=np.arange(100, dtype=np.int32),
    block_hashes=b"",
    scope=PrefixScope("m", "", b"salt"),
    root=b"r" * 32,
    placement_key=b"k" * 16,
    tenant="acme",
    sampling=SamplingParams(max_tokens=1),
)
"""A generation with a prompt of 100 tokens."""


@dataclass
class Script:
    """A source of tokens that generates ``text``, ``step`` tokens at a time; ``asked``: the generations requested.

    ``offers``: whether tokens in the middle are offered to ``at_once``; ``taken``: the number accepted. ``ends``: an
    answer waits for one release by ``end``, and if it ``holds``, for one more before its end; None: no waiting.
    ``door``: that of the ingress. ``end_token``: ends the text, None: nobody sees it; like an engine's it is sent only
    if it is to be shown.
    """

    tokenizer: PromptTokenizer
    text: str = ""
    step: int = 3
    reason: FinishReason = "stop"
    fails: Exception | None = None
    asked: list[EngineRequest] = field(default_factory=list)
    cancelled: int = 0
    offers: bool = True
    taken: int = 0
    ends: asyncio.Semaphore | None = None
    holds: bool = False
    loop: asyncio.AbstractEventLoop | None = None
    door: FrontDoor | None = None
    metrics: IngressMetrics = field(default_factory=IngressMetrics)
    desk: BatchDesk | None = None
    end_token: int | None = None

    def clear(self) -> None:
        self.end_token = None
        self.text, self.step, self.reason, self.fails, self.offers, self.ends = "", 3, "stop", None, True, None
        self.holds = False
        if self.door is not None:
            self.door._others_s = -inf  # a batch has not to wait for the requests of the test before

    async def generate(
        self, generation: EngineRequest, *, at_once: TakeAtOnce | None = None
    ) -> AsyncGenerator[EngineOutput, None]:
        self.asked.append(generation)
        if self.ends is not None:
            self.loop = asyncio.get_running_loop()
            await self.ends.acquire()
        ids = self.tokenizer.encode(self.text, b"r" * 16).token_ids.tolist()
        if self.end_token in generation.sampling.shown_stop_token_ids:
            ids.append(self.end_token)
        try:
            for at in range(0, len(ids), self.step):
                last = at + self.step >= len(ids) and self.fails is None
                first = FirstToken(16) if at == 0 else None
                if last and self.holds and self.ends is not None:
                    await self.ends.acquire()
                tokens = output(tuple(ids[at : at + self.step]), first, self.reason if last else None)
                if self.offers and at_once is not None and at and not last and at_once(tokens):
                    self.taken += 1
                else:
                    yield tokens
            if self.fails is not None:
                raise self.fails
        except GeneratorExit:
            self.cancelled += 1
            raise

    def end(self, answers: int = 1) -> None:
        """Let waiting answers continue (any thread)."""
        assert self.loop is not None and self.ends is not None
        for _ in range(answers):
            self.loop.call_soon_threadsafe(self.ends.release)

    def prompt(self) -> str:
        """Return the last prompt, special tokens included."""
        return str(self.tokenizer.pretrained.decode(self.asked[-1].token_ids.tolist()))


def partial_services(**parts: Any) -> Services:
    """Return an ingress that has these parts and no others."""
    given: dict[str, Any] = {"drain": Drain(), **parts}

    def group(kind: Any) -> Any:
        return kind(**{field.name: given.get(field.name) for field in fields(kind)})

    return Services(
        given.get("config"),  # type: ignore[arg-type]
        "app", "ingress", group(Access), group(Catalog), group(Fleet), group(Records),
        given.get("completions"),  # type: ignore[arg-type]
        several=given.get("several"),
    )  # fmt: skip


def observed(
    metrics: IngressMetrics, front_door: FrontDoor, misses: MissDetector | None = None, ledger: Ledger | None = None
) -> Observers:
    """Return an ingress' observers, as it has them."""
    observers = Observers(refused=[metrics.refused], missed=[metrics.missed], ended=[trace_answer])
    observe_usage(observers, ledger or Ledger(None, 16), metrics)
    observe_prompts(observers, PromptTraffic())
    observe_costs(observers, front_door)
    if misses is not None:
        observe_misses(observers, misses, AdviceBook(lambda: 8))
    return observers


def cancelling(application: ASGIApp) -> ASGIApp:
    """Return an application whose requests are cancelled when their clients leave, as Ray Serve does it."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await application(scope, receive, send)
            return
        messages, last = asyncio.Queue[Any](), None

        async def listen() -> None:
            nonlocal last
            while last is None:
                messages.put_nowait(message := await receive())
                last = message if message["type"].endswith(".disconnect") else None

        async def take() -> Any:
            return last if last is not None and messages.empty() else await messages.get()

        listener, answer = asyncio.create_task(listen()), asyncio.create_task(application(scope, take, send))
        await asyncio.wait((listener, answer), return_when=asyncio.FIRST_COMPLETED)
        (listener if answer.done() else answer).cancel()
        await asyncio.gather(listener, return_exceptions=True)
        with suppress(asyncio.CancelledError):
            await answer

    return serve


class Loopback:
    """An application on loopback, in its own thread and loop: ``make`` creates it there, ``call`` runs more there."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(make)), daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)

    async def _serve(self, make: Callable[[], Any]) -> None:
        self._loop = asyncio.get_running_loop()
        # Only with this protocol does asyncio send small packets at once; else each answer would take 40 ms.
        listener = socket.socket(proto=socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(
            uvicorn.Config(make(), log_level="error", timeout_graceful_shutdown=1, timeout_keep_alive=600)
        )
        self._ready.set()
        await self._server.serve([listener])

    def call(self, work: Callable[[], Any]) -> Any:
        """Return the result of ``work`` there, awaited if necessary."""

        async def run() -> Any:
            found = work()
            return await found if inspect.isawaitable(found) else found

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@contextmanager
def scripted(
    path: Path,
    tracer: Tracer | None = None,
    customers: Sequence[TenantConfig] = (),
    backend: Database | None = None,
    max_body_bytes: int = 8 << 20,
    max_model_len: int = 8192,
    agent_prompt_rules: bool = True,
    place: Place = "alone",
) -> Iterator[tuple[str, Script]]:
    """Serve a checkpoint's tokenizer on loopback, to everybody or to customers; yield the base URL and the script.

    ``backend``: the store of responses, files and batches; None: no store. ``place``: that of the model among several.
    """
    info, tokenizer, config = (
        load_checkpoint_info(path),
        PromptTokenizer(path),
        AppConfig(model="demo", max_body_bytes=max_body_bytes, agent_prompt_rules=agent_prompt_rules),
    )
    secret, names = b"s" * 32, {"alone": ("demo",), "first": ("demo", OTHER), "second": (OTHER, "demo")}[place]
    tenants, metrics, drain, shares = Tenants(customers, secret), IngressMetrics(), Drain(), Shares({})
    workers, readers = FairWorkers(shares), AnswerReaders(tokenizer, "auto")
    entrance = FrontDoor(shares, places=lambda: 1, max_waiting=64, max_bytes=1 << 26)
    models = Models(config, entrance, metrics, cast(Any, None)) if len(names) > 1 else None
    guard, history = RouteGuard(tenants, metrics, drain), MessageHistory()
    scripts, served = dict[str, Script](), dict[str, Services]()
    for name in names:
        script = scripts[name] = Script(tokenizer, "" if name == "demo" else "Nobody asked for me.", metrics=metrics)
        adapters = AdapterRegistry(name)
        preparer = Preparer(info, tokenizer, tenants, secret, adapters, Limits(max_model_len, 64))
        door = script.door = FrontDoor(shares, places=lambda: 8, max_waiting=64, max_bytes=1 << 26)
        observers = observed(
            metrics, door, MissDetector(tokenizer.text_of, workers, PromptMemory(lambda: 1), metrics.missed)
        )
        if name == "demo":
            guard.observers = observers
        completions = Completions(
            config, preparer, script, tokenizer, readers, observers, metrics, door, workers, drain,
            *((models.entrance, models.choose) if models is not None else ()),
        )  # fmt: skip
        served[name] = partial_services(
            config=config, base_model=model_body(name, 0, 8192), adapters=adapters, tenants=tenants, drain=drain,
            front_door=door, history=history, guard=guard, tracer=tracer, completions=completions, several=models,
        )  # fmt: skip
    if models is not None:
        models.served |= served

    def application() -> ClientHeaders:
        if backend is not None:
            stored = StoredResponses(backend, secret, FairWorkers(shares), BOUNDS)
            objects = StoredObjects(backend, secret, FairWorkers(shares), BOUNDS)
            gates = [
                ModelGate(partial(str.__eq__, name), one.access.front_door, lambda: 1, lambda: 0)
                for name, one in served.items()
            ]
            desk = scripts["demo"].desk = BatchDesk(objects, "ingress", lambda: tenants.by_name, gates)
            for services in served.values():
                services.records.stored, services.records.batches = stored, desk
        return ClientHeaders(cancelling(make_application(served[names[0]])))  # as Ray serves it

    with Loopback(application) as running:
        yield running.url, scripts["demo"]
    assert not any(scripts[name].asked for name in names if name != "demo"), "another model was asked"


@asynccontextmanager
async def server(answer: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a connection to uvicorn, as Ray runs it, with the responses of ``answer(request)``."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        response: Response = await answer(Request(scope, receive))
        await response(scope, receive, send)

    listener = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(application, lifespan="off", log_level="critical"))
    task = asyncio.create_task(running.serve([listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname(), limit=1024)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        running.should_exit = True
        await task
