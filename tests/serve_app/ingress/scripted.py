"""An ingress on a real socket, in this process, with scripted replicas: the test defines the model's text."""

import asyncio
import inspect
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any, Literal, Self
from unittest.mock import MagicMock

import numpy as np
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.core import RoutingCore
from router.protocol.block_hash import PrefixScope
from router.settings import RouterSettings
from serve_app.api.openai.response import model_body
from serve_app.checkpoints.adapter_registry import AdapterEntry, AdapterRegistry
from serve_app.checkpoints.checkpoint import CheckpointInfo, load_checkpoint_info
from serve_app.config.app import AppConfig
from serve_app.config.live import app_config
from serve_app.config.tenants import TenantConfig
from serve_app.engine.protocol import (
    AdapterSpec,
    EngineOutput,
    EngineRequest,
    FinishReason,
    FirstToken,
    SamplingParams,
    TakeAtOnce,
)
from serve_app.fairness.queue import FairWorkers
from serve_app.generation.tool_calls.reader import AnswerReaders
from serve_app.ingress.address import Address
from serve_app.ingress.assembly import make_address
from serve_app.ingress.broadcast import Alone, Broadcast
from serve_app.ingress.client_headers import ClientHeaders
from serve_app.ingress.drain import Drain
from serve_app.ingress.model import Model
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.ingress.observe.reports import SharedAnswers
from serve_app.ingress.outside import LoadedModel
from serve_app.ingress.routes.application import make_application
from serve_app.prompts.registry import Prompts
from serve_app.stored.database import Database, StorageLimits
from serve_app.tokenization.tokenizer import PromptTokenizer
from serve_app.tracing import Tracer
from tests.serve_app.generation.outputs import output

PATIENCE_S = 30
BOUNDS = StorageLimits(ttl_s=86_400, max_bytes=1 << 30)
"""The bounds of stored responses."""

Place = Literal["alone", "first", "second"]
"""Of the model that a test asks for: the only one of its address, or with another one."""
PLACES: tuple[Place, ...] = ("alone", "first", "second")
OTHER = "another"
SECRET = b"s" * 32

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
    ``address``: that of the ingress. ``end_token``: ends the text, None: nobody sees it; like an engine's it is sent
    only if it is to be shown.
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
    address: Address | None = None
    end_token: int | None = None

    def clear(self) -> None:
        self.end_token = None
        self.text, self.step, self.reason, self.fails, self.offers, self.ends = "", 3, "stop", None, True, None
        self.holds = False
        if self.address is not None:  # a batch has not to wait for the requests of the test before
            for model in self.address.models.values():
                model.front_door._others_s = -inf

    async def generate(
        self, generation: EngineRequest, avoid: tuple[str, ...] = (), *, at_once: TakeAtOnce | None = None
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

    def metrics(self) -> IngressMetrics:
        """Return what the model counts."""
        assert self.address is not None
        return self.address.models["demo"].metrics

    def prompt(self) -> str:
        """Return the last prompt, special tokens included."""
        return str(self.tokenizer.pretrained.decode(self.asked[-1].token_ids.tolist()))


@dataclass
class ReadCheckpoint:
    """What is read once of a checkpoint, for all models that have it."""

    path: Path
    info: CheckpointInfo = field(init=False)
    tokenizer: PromptTokenizer = field(init=False)
    readers: AnswerReaders = field(init=False)

    def __post_init__(self) -> None:
        self.info, self.tokenizer = load_checkpoint_info(self.path), PromptTokenizer(self.path)
        self.readers = AnswerReaders(self.tokenizer, "auto")


class NoReplicas(Alone):
    """Calls to a model whose replicas are scripted. ``starting``: whether Serve says that one starts."""

    def __init__(self, model: str, starting: Callable[[bool], bool]) -> None:
        super().__init__(model)
        self._starts = starting

    async def replicas(self, method: str, *arguments: Any, timeout_s: float = 120) -> list[Any]:
        return [{"replica": f"replica-of-{self.model}", "rows": []}] if method == "sessions" else []

    def is_starting(self, *, unheard: bool = False) -> bool:
        return self._starts(unheard)


@dataclass
class ScriptedOutside:
    """No cluster: scripts in place of replicas, a checkpoint that was read before, and a database if it is given.

    ``adapters``: of each model, with their tenants; ``down``: why models cannot be loaded; ``starting``: whether a
    replica starts, as Serve says; ``replicas``: their ids, None: one by the model's name.
    """

    checkpoint: ReadCheckpoint | None = None
    stored: Database | None = None
    adapters: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    down: Mapping[str, str] = field(default_factory=dict)
    starting: Callable[[bool], bool] = bool
    replicas: Sequence[str] | None = None
    scripts: dict[str, Script] = field(default_factory=dict)
    spans: Tracer | None = None
    name: str = "ingress"

    def secret(self, config: AppConfig) -> bytes:
        return SECRET

    def tracer(self, config: AppConfig) -> Tracer | None:
        return self.spans

    def close(self) -> None:
        pass

    async def database(self, config: AppConfig, bounds: StorageLimits) -> Database | None:
        return self.stored

    def load(self, config: AppConfig, workers: FairWorkers) -> LoadedModel:
        name, read = config.model_name, self.checkpoint
        assert read is not None
        if name in self.down:
            raise ValueError(self.down[name])
        registry = AdapterRegistry(name)
        registry.merge(
            AdapterEntry(adapter, AdapterSpec(adapter, "0" * 16, f"/adapters/{adapter}"), users)
            for adapter, users in self.adapters.get(name, {}).items()
        )
        prompts = Prompts.of(config.public_prompts, config.prompts_dir)
        prompts.install(read.tokenizer)
        info = replace(read.info, max_model_len=max(read.info.max_model_len, config.max_model_len or 0))
        return LoadedModel(info, read.tokenizer, prompts, registry, read.readers)

    def broadcast(self, config: AppConfig, model: str, label: str) -> Broadcast:
        return NoReplicas(label, self.starting)

    def core(self, config: AppConfig) -> RoutingCore:
        core = RoutingCore("router", RouterSettings.from_json(config.routing()))
        core.update_replicas([f"replica-of-{config.model_name}"] if self.replicas is None else [*self.replicas])
        return core

    def source(self, config: AppConfig, *_: Any) -> Script:
        name = config.model_name
        if name not in self.scripts:
            assert self.checkpoint is not None
            self.scripts[name] = Script(self.checkpoint.tokenizer, self.texts.get(name, ""))
        return self.scripts[name]


def partial_model(config: AppConfig, **parts: Any) -> Model:
    """Return a model that has these parts and no others."""
    model = Model.__new__(Model)
    for name, part in {"name": "demo", "config": config, "_synced": False, **parts}.items():
        setattr(model, name, part)
    return model


def partial_address(config: AppConfig | None = None, adapters: AdapterRegistry | None = None, **parts: Any) -> Address:
    """Return an address with one model, that have these parts and no others."""
    config = config or AppConfig(model="demo")
    broadcast = parts["broadcast"] = parts.get("broadcast") or Broadcast(MagicMock(), "app", 1)
    own = {name: parts.pop(name, None) for name in ("core", "connecting", "sessions", "live", "front_door")}
    adapters = adapters or AdapterRegistry("demo")
    model = partial_model(config, adapters=adapters, card=model_body("demo", 0, 4096), broadcast=broadcast, **own)
    given = {"drain": Drain(), "models": {"demo": model}, "tables": SharedAnswers(), **parts, "config": config}
    given |= {"refused_settings": "", "down": {}, "fallbacks": {}, "name": "ingress"}
    return Address(**{one.name: given.get(one.name) for one in fields(Address)})  # type: ignore[arg-type]


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
        made = make()
        application = await made if inspect.isawaitable(made) else made
        self._server = uvicorn.Server(
            uvicorn.Config(application, log_level="error", timeout_graceful_shutdown=1, timeout_keep_alive=600)
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
    place: Place = "alone",
    **settings: Any,
) -> Iterator[tuple[str, Script]]:
    """Serve a checkpoint's tokenizer on loopback, to everybody or to customers; yield the base URL and the script.

    ``backend``: the store of responses, files and batches; None: no store. ``place``: that of the model among several.
    """
    names = {"alone": (), "first": ("demo", OTHER), "second": (OTHER, "demo")}[place]
    config = app_config({
        "model": "demo", "max_model_len": 8192, "default_max_tokens": 64, "max_num_seqs": 5, "replicas": 1,
        "max_queued_requests": 64,
        "tenants": [customer.model_dump(mode="json", exclude_unset=True) for customer in customers],
        "models": [{"served_model_name": name} for name in names], **settings,
    })  # fmt: skip
    outside = ScriptedOutside(ReadCheckpoint(path), backend, texts={OTHER: "Nobody asked for me."}, spans=tracer)

    async def application() -> ClientHeaders:
        address = await make_address(config, outside)
        for script in outside.scripts.values():
            script.address = address
        return ClientHeaders(cancelling(make_application(address)))  # as Ray serves it

    with Loopback(application) as running:
        yield running.url, outside.scripts["demo"]
    assert not any(script.asked for name, script in outside.scripts.items() if name != "demo"), "another was asked"


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
