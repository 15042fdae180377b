"""Batches at this ingress: each line's request goes through its own application, as if its tenant had sent it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

from serve_app.batch.batch_run import Said
from serve_app.batch.batches import Batches
from serve_app.batch.files import Files
from serve_app.batch.order import LANES
from serve_app.batch.worker import BatchWorker
from serve_app.fairness.front_door import FrontDoor
from serve_app.ingress.http import WARNING
from serve_app.stored.objects import StoredObjects
from serve_app.tenants import Tenant

BUSY = (429, 503, 529)
"""Statuses of a server that may answer later, if it tells when."""
OWN_LIMITS = ("budget", "tokens_per_minute")
"""A tenant's limits that may hold for longer than its lines should wait at their place."""


@dataclass(frozen=True, slots=True)
class ModelGate:
    """A served model: the names that it ``serves``, its ``door``, its replicas, and what waits at them."""

    serves: Callable[[str], bool]
    door: FrontDoor
    replicas: Callable[[], int]
    waiting: Callable[[], int]


@dataclass(eq=False)
class BatchDesk:
    """The tenants' files and batches, and their runner.

    ``tenants``: those known now, by name; ``gates``: of the served models; ``aliases``: other names of those.
    """

    objects: StoredObjects
    name: str
    tenants: Callable[[], dict[str, Tenant]]
    gates: Callable[[], Sequence[ModelGate]]
    aliases: Callable[[], Mapping[str, str]]
    _application: ASGIApp | None = None
    files: Files = field(init=False)
    batches: Batches = field(init=False)
    worker: BatchWorker = field(init=False)

    def __post_init__(self) -> None:
        self.files = Files(self.objects)
        self.batches = Batches(self.objects, self.files)
        self.worker = BatchWorker(
            self.batches,
            self.name,
            self._ask,
            lambda tenant: tenant in self.tenants(),
            self._quiet,
            lambda: sum(gate.door.places() for gate in self.gates()) // 2,
            lambda: LANES * max(1, sum(gate.replicas() for gate in self.gates())),
        )

    def start(self, application: ASGIApp) -> None:
        """Run batches from now on; ``application`` answers their lines."""
        self._application = application
        self.worker.start()

    def _quiet(self, tenant: str, model: str) -> bool:
        """Return whether a line for a model may start now: nobody waits there; for an unknown name: anywhere."""
        aliases, asking = self.aliases(), self.worker.asking

        def is_quiet(gate: ModelGate) -> bool:
            own = sum(lines for name, lines in asking.items() if gate.serves(aliases.get(name, name)))
            return gate.door.is_quiet(tenant, own) and gate.waiting() <= own

        gates = self.gates()
        return all(map(is_quiet, [gate for gate in gates if gate.serves(aliases.get(model, model))] or gates))

    async def _ask(self, tenant: str, path: str, body: bytes, request_id: str, waits: bool) -> Said:
        """Answer a request as the application would. Every rule holds; if it ``waits``, it does for all other work."""
        known = self.tenants().get(tenant)
        if known is None or self._application is None:
            return Said(503, b"", retry_after_s=5.0)
        status, headers, answer = 500, dict[str, str](), bytearray()
        read = False

        async def receive() -> Message:
            nonlocal read
            if read:
                await asyncio.Event().wait()  # this client stays
            read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers.update((name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"])
            else:
                answer.extend(message.get("body", b""))

        await self._application(_scope(known, path, len(body), request_id, waits), receive, send)
        wait_s = headers.get("retry-after") if status in BUSY else None
        own = wait_s is not None and _limit_of(bytes(answer)) in OWN_LIMITS
        return Said(status, bytes(answer), headers.get(WARNING, ""), None if wait_s is None else float(wait_s), own)


def _limit_of(answer: bytes) -> str | None:
    """Return the limit that an error names as its reason."""
    try:
        error = msgspec.json.decode(answer)["error"]
        return str(error["reason"]["limit"])
    except (msgspec.MsgspecError, LookupError, TypeError):
        return None


def _scope(tenant: Tenant, path: str, size: int, request_id: str, waits: bool) -> Scope:
    headers = {"content-type": "application/json", "content-length": str(size), "x-request-id": request_id}
    state: dict[str, Any] = {"tenant": tenant, "waits_for_all": waits}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
        "state": state,
    }
