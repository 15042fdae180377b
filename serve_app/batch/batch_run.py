"""One batch in progress: its lines are read, asked for, and written into files of results."""

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from serve_app.batch.batch_file import BatchRequest
from serve_app.batch.batches import (
    UNREADABLE,
    Batches,
    LineError,
    LineResult,
    StoredBatch,
    Unasked,
    usage_of,
)
from serve_app.batch.files import File
from serve_app.batch.lease import TICK_S, Lease, Lost, patient
from serve_app.batch.lines import InputLine, checked, lines_of, request_of
from serve_app.batch.order import Group, LineRunner, grouped
from serve_app.batch.results import anthropic_line, error_body, openai_line
from serve_app.batch.turns import Turns
from serve_app.errors import NotFound, RequestTooLarge

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_LINES = 50_000
MAX_ERRORS = 100
LARGE_BYTES = 64 << 10
"""Lines and answers over this size are not parsed in the event loop."""
QUIET_S = 0.02
"""The interval between looks whether other work waits."""
LONGEST_PAUSE_S = 30.0
"""A batch that is told to wait for longer gives its place back."""
MAX_FAULTS = 3
"""The times that a line is asked for if the server fails at it."""


@dataclass(frozen=True, slots=True)
class Said:
    """The answer to one line. ``retry_after_s``: the server was busy, and the line is asked again; None: it was not.

    ``own_limit``: a limit of its tenant refused it, and would refuse each of its lines.
    """

    status: int
    body: bytes
    warning: str = ""
    retry_after_s: float | None = None
    own_limit: bool = False


Ask = Callable[[str, str, bytes, str, bool], Awaitable[Said]]
"""(tenant, path, body, request id, whether it waits for all others) -> the answer."""


@dataclass(eq=False)
class BatchHost(ABC):
    """What an ingress gives to the batches that it runs.

    ``knows``: whether a tenant exists; ``quiet``: whether its work may start now, for a model.
    ``at_once``: the number of requests for all batches together; ``lanes``: of beginnings in progress.
    """

    batches: Batches
    name: str
    ask: Ask
    knows: Callable[[str], bool]
    quiet: Callable[[str, str], bool]
    at_once: Callable[[], int]
    lanes: Callable[[], int]
    turns: Turns = field(init=False)

    @abstractmethod
    def share(self) -> int:
        """Return how many lines of one batch may be in progress."""

    @abstractmethod
    def leave(self, run: "BatchRun") -> None:
        """Let a batch give its place back."""


@dataclass(eq=False)
class BatchRun:
    """A batch in progress, whose row ``lease`` holds for ``host``."""

    host: BatchHost
    lease: Lease
    begun_s: float
    lines: list[InputLine] = field(default_factory=list)
    model: str | None = None
    asking: Counter[str] = field(default_factory=Counter)
    """The lines in progress by model, as they name it."""
    left: int = 0
    """Lines without a result."""
    urgent: int | None = None
    """The number of a line that does not wait for others, while it is in progress."""
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: the batch's place is free, and it is let go of once its lines in progress have ended; no more start here."""

    @property
    def tenant(self) -> str:
        """The batch's tenant."""
        return self.lease.tenant

    @property
    def _batch(self) -> StoredBatch:
        return self.lease.batch

    @property
    def _batches(self) -> Batches:
        return self.lease.batches

    def _is_late(self) -> bool:
        """Return whether half of its time is over, and more of its lines than of its time is left."""
        batch = self._batch
        most_s, left_s = batch.expires_at - batch.created_at, batch.expires_at - self._batches.objects.now_s()
        return left_s < most_s / 2 and self.left * most_s > len(self.lines) * left_s

    async def work(self) -> None:
        """Do all that is left of a batch."""
        now_s = self._batches.objects.now_s
        try:
            errors = await self._read()
        except (NotFound, RequestTooLarge) as error:
            errors = [LineError(str(error.code), error.message)]
            if self._batch.status != "validating":  # what was answered stays
                errors = []
                self.lines.clear()
                await self.lease.write(_expire)
        if errors:
            await self.lease.write(lambda row: _fail(row, errors, now_s()))
            await self._batches.tidy(self.tenant, self._batch)
            return

        def begin(row: StoredBatch) -> None:
            if self.lines:
                row.total, row.model = len(self.lines), self.model
            if row.status == "validating":
                row.become("in_progress", now_s())

        await self.lease.write(begin)
        if self._batch.status == "in_progress" and not self._batch.unasked and not await self._ask_all():
            await self.lease.write()
            return
        await self._finish()
        await self._batches.tidy(self.tenant, self._batch)

    async def _read(self) -> list[LineError]:
        """Find and check the lines of the input; return what is wrong with it."""
        batch, files = self._batch, self._batches.files
        seen: dict[str, int] = {}
        errors: list[LineError] = []
        models: set[str] = set()
        async for part in lines_of(files.content(self.tenant, batch.content, batch.size)):
            work = partial(checked, part, batch.endpoint)
            for number, custom_id, line in await files.objects.work(self.tenant, work):
                if isinstance(line, LineError):
                    errors.append(line)
                elif custom_id in seen:
                    message = f"Lines {seen[custom_id]} and {number} have the same custom_id."
                    errors.append(LineError("duplicate_custom_id", message, number, "custom_id"))
                else:
                    seen[custom_id] = number
                    models.add(line.model)
                    self.lines.append(line)
            if len(errors) >= MAX_ERRORS:
                return errors[:MAX_ERRORS]
            if len(self.lines) > MAX_LINES and not batch.anthropic:
                return [LineError("too_many_requests", f"A batch has at most {MAX_LINES} requests; send several.")]
        if not errors and not self.lines:
            return [LineError("empty_file", "The file holds no request; it must have one JSON object per line.")]
        if len(models) == 1:
            self.model = models.pop()
        return errors

    async def _ask_all(self) -> bool:
        """Ask for each line that has no result, until the batch expires or is cancelled; return False if it leaves."""
        done = await self._batches.done(self.tenant, self._batch)

        def ordered() -> tuple[list[int], list[Group]]:
            left = [number for number in range(len(self.lines)) if number not in done]
            return left, grouped([self.lines[number].beginnings for number in left])

        left, groups = await self._batches.objects.work(self.tenant, ordered)
        self.left = len(left)

        async def quiet(at: int) -> None:
            model = self.lines[left[at]].model
            while self.leaving.is_set() or not self.host.quiet(self.tenant, model):
                if self.leaving.is_set():
                    await asyncio.Event().wait()  # until this is cancelled
                if self.urgent is None and self._is_late():
                    self.urgent = left[at]  # or others' requests could hold all of it up until it expires
                    break
                await asyncio.sleep(QUIET_S)
            self.asking[model] += 1  # at once: many lines may start before the first of them runs

        async def ask(at: int) -> None:
            try:
                await self._ask(left[at])
            finally:
                self.asking[self.lines[left[at]].model] -= 1

        runner = LineRunner(ask, self.host.share, self.host.lanes, quiet)
        work = asyncio.create_task(runner.run(groups))
        try:
            while not work.done():
                if self._batch.status == "cancelling":
                    return True
                if self._batches.objects.now_s() >= self._batch.expires_at:
                    await self.lease.write(_expire)
                    return True
                if not self.host.knows(self.tenant):
                    self.host.leave(self)
                if self.leaving.is_set() and not self.asking.total():
                    return False
                await asyncio.wait((work,), timeout=TICK_S / 2)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            self.asking.clear()
        work.result()
        return not self.left

    async def _ask(self, number: int) -> None:
        """Ask for one line, again while the server is busy, and store its result."""
        (request, body), batch = await patient(lambda: self._request(number)), self._batch
        request_id = f"req_{secrets.token_hex(12)}"
        faults = 0
        try:
            while True:
                if self.leaving.is_set() and not faults:
                    return
                # What failed twice may have waited for others all the time.
                waits = number != self.urgent and faults < MAX_FAULTS - 1
                try:
                    said = await self.host.ask(self.tenant, request.url, body, request_id, waits)
                except Exception:  # costs this line alone
                    logger.exception("a line of batch %s failed", batch.id)
                    said = Said(500, error_body(request.url, request_id, "The server failed at this request."))
                faults += said.status >= 500 and said.retry_after_s is None
                if said.retry_after_s is None and (said.status < 500 or faults == MAX_FAULTS):
                    break
                if said.retry_after_s is None:
                    await asyncio.sleep(faults)
                    continue
                if said.retry_after_s > LONGEST_PAUSE_S:
                    self.host.turns.rest(self.tenant if said.own_limit else batch.id, said.retry_after_s)
                    self.host.leave(self)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.leaving.wait(), said.retry_after_s)
                if self.leaving.is_set():
                    return
        finally:
            if number == self.urgent:
                self.urgent = None
        self.left -= 1
        result = LineResult(request.custom_id, said.status, request_id, msgspec.Raw(said.body or b"null"), said.warning)
        await patient(lambda: self._batches.keep(self.tenant, batch, number, result))
        self.lease.counts["completed" if result.ok else "failed"] += 1  # it had none when this run began

    async def _request(self, number: int) -> tuple[BatchRequest, bytes]:
        line = self.lines[number]
        raw = await self._batches.files.part(self.tenant, self._batch.content, line.start, line.length)
        return await self._apart(len(raw), partial(request_of, raw))

    async def _apart(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of what takes longer with more bytes, outside of the event loop if there are many."""
        return work() if size <= LARGE_BYTES else await self._batches.objects.work(self.tenant, work)

    async def _finish(self) -> None:
        """Write the results into files, and end the batch."""
        now_s = self._batches.objects.now_s

        def finalize(row: StoredBatch) -> None:
            if row.status == "cancelling":
                row.unasked = "cancelled"
            elif row.status == "in_progress":
                row.become("finalizing", now_s())

        await self.lease.write(finalize)
        batch, counts, usage = self._batch, Counter[str](), Counter[str]()
        life_s = min(batch.output_life_s or self._batches.objects.ttl_s, self._batches.objects.ttl_s)
        kinds = ("results",) if batch.anthropic else ("output", "error")
        contents = {kind: await self._compose(kind, life_s, counts, usage) for kind in kinds}
        try:
            await self.lease.write()
        except Lost:  # another one has ended it, and its files may be deleted already
            for content, _ in contents.values():
                await self._batches.files.forget(self.tenant, content)
            raise
        ids: dict[str, str] = {}
        for kind, (content, size) in contents.items():
            if size and not batch.anthropic:
                # Its id follows from the batch's: who comes second finds the first one's file.
                at_s = batch.times.get(batch.status, batch.created_at)
                ids[kind] = _file_id(kind, batch, at_s)
                name = f"{batch.id}_{kind}.jsonl"
                file = File(ids[kind], content, name, "batch_output", size, at_s, at_s + life_s)
                if not await self._batches.files.add(self.tenant, file):
                    await self._batches.files.forget(self.tenant, content)

        def end(row: StoredBatch) -> None:
            row.completed, row.failed = counts["completed"], counts["failed"]
            row.usage = dict(usage)
            row.output_file_id, row.error_file_id = ids.get("output"), ids.get("error")
            row.results, row.results_size = contents.get("results", ("", 0))
            row.become(_END[row.unasked], now_s())

        self.lease.counts.clear()
        await self.lease.write(end)

    async def _compose(self, kind: str, life_s: float, counts: Counter[str], usage: Counter[str]) -> tuple[str, int]:
        """Write one kind of results into a new content; return its name and size."""
        batch = self._batch

        async def parts() -> AsyncIterator[bytes]:
            async for number, result in self._batches.results(self.tenant, batch):
                if number >= len(self.lines) and (result is None or result is UNREADABLE):
                    continue  # the input is gone
                if result is UNREADABLE:
                    request_id = f"req_{secrets.token_hex(12)}"
                    (request, _), text = await self._request(number), "The result of this request is damaged."
                    body = msgspec.Raw(error_body(request.url, request_id, text))
                    result = LineResult(request.custom_id, 500, request_id, body)
                ok = result is not None and result.ok
                if kind == ("error" if ok else "output"):
                    continue
                if result is None:
                    request, _ = await self._request(number)
                    result = LineResult(request.custom_id, 0, f"req_{secrets.token_hex(12)}", msgspec.Raw(b"null"))
                else:
                    counts["completed" if ok else "failed"] += 1
                if ok:
                    decode = partial(msgspec.json.decode, result.body)
                    usage.update(usage_of(await self._apart(len(result.body), decode)))
                yield (anthropic_line if batch.anthropic else openai_line)(result, batch.unasked) + b"\n"

        return await self._batches.files.write(self.tenant, parts(), life_s)


_END: dict[Unasked, Any] = {"": "completed", "expired": "expired", "cancelled": "cancelled"}


def _expire(batch: StoredBatch) -> None:
    if batch.status == "in_progress":
        batch.unasked = "expired"


def _fail(batch: StoredBatch, errors: list[LineError], now_s: float) -> None:
    batch.errors = errors
    batch.become("failed", now_s)


def _file_id(kind: str, batch: StoredBatch, at_s: float) -> str:
    return f"file-{kind}-{int(at_s * 1000):012x}{batch.id[-24:]}"
