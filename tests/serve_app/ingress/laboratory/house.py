"""The whole ingress of a server in this process, assembled as in production; only its replicas are scripted.

A request goes to the application as a server of HTTP would pass it on: raw headers, a body in parts.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from starlette.types import Message, Scope

from serve_app.checkpoints.sources import load_served_model
from serve_app.config.app import AppConfig
from serve_app.config.live import app_config
from serve_app.fairness.queue import FairWorkers
from serve_app.ingress.address import Address
from serve_app.ingress.assembly import make_address
from serve_app.ingress.client_headers import ClientHeaders
from serve_app.ingress.outside import LoadedModel
from serve_app.ingress.routes.application import make_application
from serve_app.stored.database import Database, StorageLimits
from serve_app.stored.url import open_database
from tests.serve_app.ingress.scripted import Script, ScriptedOutside

OPERATOR, KEY = "wp-operator", "wp-acme"
PART_BYTES = 64 << 10
"""How much of a body a server passes on at once."""
REPLICAS = ("replica-1", "replica-2")

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(slots=True)
class Said:
    """An answer, whole."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)


class Complaints(logging.Handler):
    """Collects what is logged as an error, or with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._text = logging.Formatter().format

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.texts.append(self._text(record))


class House:
    """An ingress, its application, and what it complained of."""

    def __init__(self, address: Address, script: Script, complaints: Complaints) -> None:
        self.address, self.script, self.complaints = address, script, complaints
        self.application = make_application(address)
        self._outermost = ClientHeaders(self.application)

    async def ask(
        self, method: str, target: bytes, headers: Headers = (), body: bytes | Iterable[bytes] = b"", key: str = KEY
    ) -> Said:
        """Answer a request. ``target``: path and query as sent; ``key`` "": none. Raises what the application does."""
        size = len(body) if isinstance(body, bytes) else None
        parts = iter(
            [body[at : at + PART_BYTES] for at in range(0, len(body), PART_BYTES)] if isinstance(body, bytes) else body
        )
        path, _, query = target.partition(b"?")
        sent = [(name.lower(), value) for name, value in headers]
        given = {name for name, _ in sent}
        if key and not given & {b"authorization", b"x-api-key"}:
            sent.append((b"authorization", b"Bearer " + key.encode()))
        if b"host" not in given:
            sent.append((b"host", b"127.0.0.1:8000"))
        if size is not None and b"content-length" not in given:
            sent.append((b"content-length", b"%d" % size))
        if b"content-type" not in given:
            sent.append((b"content-type", b"application/json"))
        scope: Scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": unquote(path.decode("ascii")), "raw_path": path, "root_path": "", "query_string": query,
            "headers": sent, "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 8000), "state": {},
        }  # fmt: skip
        said, over, left = Said(), asyncio.Event(), asyncio.Event()
        endless = b"/cache/events" in path

        async def receive() -> Message:
            await asyncio.sleep(0)
            if (part := next(parts, None)) is not None:
                return {"type": "http.request", "body": part, "more_body": True}
            if not over.is_set():
                over.set()
                return {"type": "http.request", "body": b"", "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                said.status = message["status"]
                said.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            else:
                said.body += message.get("body", b"")
                if endless and said.body:
                    left.set()
            await asyncio.sleep(0)

        await self._outermost(scope, receive, send)
        return said


@asynccontextmanager
async def opened(model: Path, folder: Path, **settings: Any) -> AsyncIterator[House]:
    """Open a house with the tenant ``acme`` and an operator. ``folder``: for its files."""
    config = app_config({
        "model": str(model), "served_model_name": "demo", "responses_file": str(folder / "responses.sqlite"),
        "usage_file": str(folder / "usage.sqlite"), "max_model_len": 8192, "tokenizer_cache_bytes": "1MiB",
        "tenants": [{"name": "acme", "key_sha256": [sha256(KEY.encode()).hexdigest()]}],
        "operator_key_sha256": [sha256(OPERATOR.encode()).hexdigest()],
        **settings,
    })  # fmt: skip
    complaints, outside = Complaints(), Production(replicas=REPLICAS)
    address = await make_address(config, outside)
    address.first.core.follow(lambda _: True)
    script = outside.scripts["demo"]
    script.text = "It rains."
    house = House(address, script, complaints)
    logging.getLogger().addHandler(complaints)
    try:
        async with house.application.router.lifespan_context(house.application):
            yield house
    finally:
        logging.getLogger().removeHandler(complaints)


@dataclass
class Production(ScriptedOutside):
    """As in production, a checkpoint is loaded by the settings, and a database is opened."""

    def load(self, config: AppConfig, workers: FairWorkers) -> LoadedModel:
        loaded = LoadedModel.load(config, load_served_model(config), workers)
        self.scripts[config.model_name] = Script(loaded.tokenizer)
        return loaded

    async def database(self, config: AppConfig, bounds: StorageLimits) -> Database | None:
        assert config.responses_file is not None
        return open_database(None, config.responses_file, bounds)


def settings_of(house: House) -> AppConfig:
    """Return a house's settings in force."""
    return house.address.config
