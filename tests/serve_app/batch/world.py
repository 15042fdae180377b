"""Ingresses with batches over one database, in virtual time: threads work at once, and clocks can be moved."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from serve_app.batch.batch_run import Said
from serve_app.batch.batches import Batches, LineResult, StoredBatch, new_id
from serve_app.batch.files import File, Files
from serve_app.batch.worker import BatchWorker
from serve_app.errors import InvalidRequest
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares
from serve_app.stored.database import StorageLimits
from serve_app.stored.objects import StoredObjects
from serve_app.stored.url import open_database
from tests.harness.eventually import let_others_run, until
from tests.harness.virtual_time import VirtualTimeLoop, passes

T = TypeVar("T")

EPOCH_S = 1_800_000_000.0
URL, MESSAGES = "/v1/completions", "/v1/messages"


class Died(BaseException):
    """What a call of a process that was killed comes back with."""


class AtOnce(FairWorkers):
    """Threads whose work is done at once, and is not counted as the loop's own."""

    def __init__(self, meter: "Meter") -> None:
        super().__init__(Shares({}), 1)
        self.meter = meter

    async def run(self, tenant: str, cost_bytes: int, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        await let_others_run()
        with self.meter.elsewhere():
            return work(*args, **kwargs)


class Meter:
    """Counts calls of functions on the loop. ``most``: between two of its rounds, with ``all`` in sum."""

    def __init__(self) -> None:
        self.round = self.most = self.all = 0
        self.on = False

    def _count(self, frame: Any, event: str, of: Any) -> None:
        self.round += event in ("call", "c_call")

    def begun(self) -> None:
        """A round of the loop begins."""
        self.most, self.all, self.round = max(self.most, self.round), self.all + self.round, 0

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        if self.on:
            sys.setprofile(None)
        try:
            yield
        finally:
            if self.on:
                sys.setprofile(self._count)

    @contextmanager
    def counting(self) -> Iterator["Meter"]:
        self.round = self.most = self.all = 0
        self.on = True
        sys.setprofile(self._count)
        try:
            yield self
        finally:
            sys.setprofile(None)
            self.on = False
            self.begun()


class Mortal(StoredObjects):
    """A store whose process may be killed, or cut off from it."""

    dead = False
    calls = 0
    before: Callable[[int], Awaitable[None]] | None = None
    """Awaited before each call, with its number."""

    async def _run(self, tenant: str, work: Any) -> Any:
        self.calls += 1
        if self.before is not None:
            await self.before(self.calls)
        if self.dead:
            raise Died
        return await super()._run(tenant, work)


@dataclass(frozen=True)
class Watched(Batches):
    """Counts in ``kept`` the lines whose results are stored."""

    kept: Counter[tuple[str, str]]

    async def keep(self, tenant: str, batch: StoredBatch, number: int, result: LineResult) -> bool:
        new = await super().keep(tenant, batch, number, result)
        self.kept[batch.id, result.custom_id] += 1
        return new


class Ingress:
    """One process, as its world sees it."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        database = open_database(None, world.file, world.bounds)
        database._execute("PRAGMA synchronous = OFF")  # type: ignore[union-attr]  # no machine dies here
        self.objects = Mortal(database, b"s" * 32, AtOnce(world.meter), world.bounds)
        self.files = Files(self.objects)
        self.batches = Watched(self.objects, self.files, world.kept)
        self.worker = BatchWorker(
            self.batches, name, self._ask, self._knows, lambda *_: world.quiet, lambda: 8, lambda: 2,
            clock=world.loop.time,
        )  # fmt: skip

    def _knows(self, tenant: str) -> bool:
        return tenant not in self.world.unknown

    async def _ask(self, tenant: str, path: str, body: bytes, request_id: str, waits: bool) -> Said:
        prompt = json.loads(body)["prompt"]
        self.world.asked[tenant, prompt] += 1
        self.world.waits.append(waits)
        return await self.world.answer(tenant, prompt)

    def start(self) -> None:
        self.worker.start()

    async def kill(self) -> None:
        """End the process: nothing it does reaches the database any more."""
        self.objects.dead = True
        await self.worker.stop()

    async def upload(
        self,
        tenant: str,
        content: bytes,
        life_s: float | None = None,
        purpose: str = "batch",
        part: int = 4096,
        fails_at: int | None = None,
    ) -> File:
        """Do what the route does for an upload that arrives in parts. ``fails_at``: the form is wrong at a byte."""

        async def parts() -> AsyncIterator[bytes]:
            for at in range(0, len(content), part):
                await passes(0.01)
                if fails_at is not None and at >= fails_at:
                    raise InvalidRequest("The form is wrong.")
                yield content[at : at + part]

        name, size = await self.files.write(tenant, parts(), self.objects.ttl_s, await self.batches.room(tenant))
        try:
            return await self.files.create(tenant, "in.jsonl", name, size, purpose, life_s)
        except BaseException:
            await self.files.discard(tenant, name)
            raise

    async def read(self, tenant: str, file_id: str) -> bytes:
        file = await self.files.get(tenant, file_id)
        return b"".join([chunk async for chunk in self.files.content(tenant, file.content, file.bytes)])

    async def batch(self, tenant: str, file: File, window_s: float = 3600.0, **fields: Any) -> StoredBatch:
        """Do what the route does for a batch of a file."""
        now_s = self.objects.now_s()
        batch = StoredBatch(
            id=new_id("batch_", now_s), endpoint=URL, content=file.content, size=file.bytes, created_at=now_s,
            expires_at=now_s + window_s, input_file_id=file.id, **fields,
        )  # fmt: skip
        await self.batches.create(tenant, batch)
        self.worker.wake()
        return batch

    async def submit(self, tenant: str, lines: Sequence[str] | int = 3, **fields: Any) -> StoredBatch:
        """Upload prompts and begin a batch of them."""
        prompts = [str(at) for at in range(lines)] if isinstance(lines, int) else lines
        return await self.batch(tenant, await self.upload(tenant, content_of(prompts)), **fields)

    async def messages(self, tenant: str, prompts: Sequence[str]) -> StoredBatch:
        """Do what the route of Anthropic's API does."""
        content, now_s = content_of(prompts, MESSAGES), self.objects.now_s()

        async def parts() -> AsyncIterator[bytes]:
            yield content

        name, size = await self.files.write(tenant, parts(), self.objects.ttl_s, await self.batches.room(tenant))
        batch = StoredBatch(
            id=new_id("msgbatch_", now_s), endpoint=MESSAGES, content=name, size=size, created_at=now_s,
            expires_at=now_s + 3600.0, owns_content=True, total=len(prompts),
        )  # fmt: skip
        await self.batches.create(tenant, batch)
        self.worker.wake()
        return batch

    async def results(self, tenant: str, batch: StoredBatch) -> dict[str, list[dict[str, Any]]]:
        """Return the lines of the output and of the error file of a batch that has ended."""
        found = {}
        for kind, file_id in (("output", batch.output_file_id), ("error", batch.error_file_id)):
            text = await self.read(tenant, file_id) if file_id else b""
            found[kind] = [json.loads(line) for line in text.splitlines()]
        return found

    async def message_results(self, tenant: str, batch: StoredBatch) -> list[dict[str, Any]]:
        """Return the lines of the results of a message batch that has ended."""
        chunks = [chunk async for chunk in self.files.content(tenant, batch.results, batch.results_size)]
        return [json.loads(line) for line in b"".join(chunks).splitlines()]


@dataclass
class World:
    """A database, a clock that can be moved, and all that tenants' requests are answered with."""

    file: Path
    ttl_s: float = 86_400.0
    max_bytes: int = 1 << 20
    shift_s: float = 0.0
    quiet: bool = True
    unknown: set[str] = field(default_factory=set)
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    waits: list[bool] = field(default_factory=list)
    kept: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By id of the batch and custom_id, how often a result was stored."""
    meter: Meter = field(default_factory=Meter)

    def __post_init__(self) -> None:
        self.runner = asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(self.meter.begun))
        self.loop = self.runner.get_loop()

    @property
    def bounds(self) -> StorageLimits:
        """Of the ingresses that start from now on."""
        return StorageLimits(self.ttl_s, self.max_bytes, self.now_s)

    def now_s(self) -> float:
        return EPOCH_S + self.shift_s + self.loop.time()

    async def answer(self, tenant: str, prompt: str) -> Said:
        """Return the answer to a line; tests replace it."""
        await passes(0.1)
        return said(prompt)

    def ingress(self, name: str = "one") -> Ingress:
        return Ingress(self, name)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    async def until(self, met: Callable[[], object | Awaitable[object]], most_s: float = 600.0) -> None:
        """Let time pass until something holds."""
        await until(met, most_s, every_s=0.25)

    async def until_ended(self, ingress: Ingress, *wanted: tuple[str, StoredBatch], most_s: float = 600.0) -> None:
        async def met() -> bool:
            return all([(await ingress.batches.get(tenant, batch.id)).ended for tenant, batch in wanted])

        await self.until(met, most_s)

    def close(self) -> None:
        self.runner.close()


def said(prompt: str, status: int = 200, **fields: Any) -> Said:
    body = {"prompt": prompt, "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    return Said(status, json.dumps(body).encode(), **fields)


def content_of(prompts: Sequence[str], url: str = URL) -> bytes:
    lines = ({"custom_id": f"c{at}", "url": url, "body": {"prompt": prompt}} for at, prompt in enumerate(prompts))
    return "\n".join(map(json.dumps, lines)).encode()
