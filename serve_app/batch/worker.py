"""Runs queued batches, in the order that computes least, as work that waits for all other.

One process at a time runs a batch: the batch's row names it, and for how long. A line's request goes through ``ask``,
the same path as a client's. Knows neither HTTP nor engines.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from router.background import run_in_background
from serve_app.batch.batch_file import APIS, BatchRequest
from serve_app.batch.batches import (
    UNREADABLE,
    Batches,
    LineError,
    LineResult,
    QueuedBatch,
    StoredBatch,
    Unasked,
    usage_of,
)
from serve_app.batch.files import File
from serve_app.batch.lines import InputLine, asked, checked, lines_of
from serve_app.batch.order import Group, LineRunner, grouped
from serve_app.batch.turns import Turns
from serve_app.errors import NotFound, Overloaded, RequestTooLarge, WarmpathError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_LINES = 50_000
MAX_ERRORS = 100
LARGE_BYTES = 64 << 10
"""Lines and answers over this size are not parsed in the event loop."""
MAX_RUNNING = 16
"""Batches that one ingress runs at once, at most one of a tenant."""
POLL_S = 2.0
LEASE_S = 20.0
"""After this time without a sign of its runner, another ingress continues a batch."""
TICK_S = 1.0
"""The interval at which a running batch's row is written and read."""
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


class Lost(Exception):
    """Another process runs the batch, or it was deleted."""


@dataclass(slots=True, eq=False)
class _Run:
    """A batch in progress, as of the last look at its row."""

    tenant: str
    batch: StoredBatch
    begun_s: float
    lines: list[InputLine] = field(default_factory=list)
    model: str | None = None
    counts: Counter[str] = field(default_factory=Counter)
    """New results that the row does not count yet."""
    left: int = 0
    """Lines without a result."""
    urgent: int | None = None
    """The number of a line that does not wait for others, while it is in progress."""
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: the batch's place is free, and it is let go of once its lines in progress have ended; no more start here."""

    def is_late(self, now_s: float) -> bool:
        """Return whether half of its time is over, and more of its lines than of its time is left."""
        most_s, left_s = self.batch.expires_at - self.batch.created_at, self.batch.expires_at - now_s
        return left_s < most_s / 2 and self.left * most_s > len(self.lines) * left_s


@dataclass(eq=False)
class BatchWorker:
    """One ingress' runner of batches. ``knows``: whether a tenant exists; ``quiet``: whether its work may start now,
    for a model.

    ``at_once``: the number of requests for all batches together; ``lanes``: of beginnings in progress.
    """

    batches: Batches
    name: str
    ask: Ask
    knows: Callable[[str], bool]
    quiet: Callable[[str, str], bool]
    at_once: Callable[[], int]
    lanes: Callable[[], int]
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """By id of the batch."""
    _asking: list[Counter[str]] = field(default_factory=list)
    """By batch, the lines in progress by model."""
    clock: Callable[[], float] = time.monotonic
    turns: Turns = field(init=False)
    _runs: dict[str, _Run] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.Task[None] | None = None
    _leaving: set[asyncio.Task[None]] = field(default_factory=set)
    """What lets go of batches; a stop waits for it and does not cancel it."""

    def __post_init__(self) -> None:
        self.name = f"{self.name} {secrets.token_hex(4)}"
        self.turns = Turns(self.clock)

    @property
    def asking(self) -> Counter[str]:
        """The lines in progress by model, as they name it."""
        return sum(self._asking, Counter[str]())

    def start(self) -> None:
        """Begin to look for batches."""
        self._loop = run_in_background(self._watch)

    async def stop(self) -> None:
        """Let go of all batches; other ingresses continue them at once."""
        tasks = [*self.running.values(), *([self._loop] if self._loop is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._leaving:
            await asyncio.wait(self._leaving)

    def wake(self) -> None:
        """Look at once: there is a new batch, or one was cancelled."""
        self._news.set()

    def limits_changed(self) -> None:
        """Ask again for what rests, as its tenant's limits refused it."""
        self.turns.refresh()
        self._news.set()

    async def _watch(self) -> None:
        while True:
            try:
                await self._claim()
            except WarmpathError:
                logger.warning("batches cannot be looked up", exc_info=True)
            try:
                async with asyncio.timeout(POLL_S):
                    await self._news.wait()
                self._news.clear()
            except TimeoutError:
                pass

    async def _claim(self) -> None:
        """Begin or continue queued batches, one of each tenant at a time. An error costs the batch that had it."""
        for queued in self.turns.order(await self.batches.queue()):
            tenant, batch_id = queued.tenant, queued.batch_id
            if len(placed := self._placed()) >= MAX_RUNNING and not any(
                self.turns.is_over(one.begun_s) for one in placed
            ):
                return
            if batch_id in self.running or not self.knows(tenant) or self.turns.rests(batch_id):
                continue
            ending = self.turns.rests(tenant) or any(run.tenant == tenant for run in self._runs.values())
            try:
                if (batch := await self._take(queued, ending=ending)) is None:
                    continue
                if len(placed := self._placed()) >= MAX_RUNNING:
                    self._leave(min(placed, key=lambda one: one.begun_s))
                self._runs[batch_id] = run = _Run(tenant, batch, self.clock())
                self.running[batch_id] = asyncio.create_task(self._run(run))
            except Exception as error:
                self._failed(batch_id, error)

    def _placed(self) -> list[_Run]:
        """Return the batches that have a place."""
        return [run for run in self._runs.values() if not run.leaving.is_set()]

    def _leave(self, run: _Run) -> None:
        """Let a batch give its place back."""
        if not run.leaving.is_set():
            run.leaving.set()
            self.turns.ended(run.tenant)
            self._news.set()

    def _failed(self, batch_id: str, error: BaseException) -> None:
        self.turns.failed(batch_id)
        known = isinstance(error, WarmpathError)
        logger.warning(
            "batch %s stops here and is continued later: %s", batch_id, error, exc_info=None if known else error
        )

    async def _free(self, queued: QueuedBatch) -> StoredBatch | None:
        """Return a batch that nobody runs and that has not ended, None if it is not so."""
        try:
            batch = await self.batches.get(queued.tenant, queued.batch_id)
        except NotFound:
            await self.batches.unqueue(queued)
            return None
        if batch.ended:  # its runner ended before the rest was tidied
            await self.batches.tidy(queued.tenant, batch)
            return None
        return batch if self._may_hold(batch) else None

    def _may_hold(self, batch: StoredBatch) -> bool:
        left_s = batch.held_until_s - self.batches.objects.now_s()
        # A longer lease than there are was written before the clock was set back.
        return not 0 < left_s <= 2 * LEASE_S or batch.holder == self.name

    async def _take(self, queued: QueuedBatch, *, ending: bool) -> StoredBatch | None:
        """Become the holder of a batch, and return it; None if another one is, or there is nothing to do.

        ``ending``: only if no line of it will be asked for.
        """
        now_s = self.batches.objects.now_s()
        batch = await self._free(queued)
        if batch is None or (ending and batch.status != "cancelling" and now_s < batch.expires_at):
            return None

        def hold(batch: StoredBatch) -> bool:
            free = self._may_hold(batch)
            batch.holder, batch.held_until_s = self.name, now_s + LEASE_S
            return free and not batch.ended

        return await self.batches.change(queued.tenant, queued.batch_id, hold)

    async def _run(self, run: _Run) -> None:
        batch_id = run.batch.id
        work = asyncio.create_task(self._work(run))
        try:
            ticks = asyncio.create_task(self._tick(run))
            await asyncio.wait((work, ticks), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
            ticks.cancel()
            await asyncio.gather(work, ticks, return_exceptions=True)
            errors = [error for task in (work, ticks) if not task.cancelled() and (error := task.exception())]
            for error in errors:
                if not isinstance(error, Lost):
                    self._failed(batch_id, error)
            if not errors:
                self.turns.worked(batch_id)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            leaving = asyncio.create_task(self._let_go(run))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def _let_go(self, run: _Run) -> None:
        ended = True  # or deleted: then there is no row

        def free(batch: StoredBatch) -> bool:
            nonlocal ended
            ended = batch.ended
            if batch.holder != self.name or batch.ended:
                return False
            batch.holder, batch.held_until_s = "", 0.0
            return True

        try:
            await self.batches.change(run.tenant, run.batch.id, free)
            if ended and not run.batch.ended:  # after a pause here, by another: a line may have come too late for it
                await self.batches.tidy(run.tenant, run.batch)
        except WarmpathError:
            logger.warning("batch %s is free once its lease ends", run.batch.id)
        finally:
            self._leave(run)
            del self.running[run.batch.id], self._runs[run.batch.id]

    async def _tick(self, run: _Run) -> None:
        """Keep the lease and write the counts. Return once the batch is another's, or the store is gone for long."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self._write(run)
            except Lost:
                return
            except WarmpathError:
                if self.batches.objects.now_s() > run.batch.held_until_s:
                    return

    async def _write(self, run: _Run, change: Callable[[StoredBatch], None] = lambda _: None) -> None:
        """Change the row and take over what it says. Raises Lost if another process holds it."""
        now_s = self.batches.objects.now_s()

        def write(batch: StoredBatch) -> bool:
            if batch.holder != self.name or batch.ended:
                return False
            batch.held_until_s = now_s + LEASE_S
            batch.completed += counts["completed"]
            batch.failed += counts["failed"]
            change(batch)
            return True

        async with run.writing:
            counts = Counter(run.counts)
            found = await self.batches.change(run.tenant, run.batch.id, write)
            if found is None:
                raise Lost
            run.counts.subtract(counts)
            run.batch = found

    async def _work(self, run: _Run) -> None:
        """Do all that is left of a batch."""
        now_s = self.batches.objects.now_s
        try:
            errors = await self._read(run)
        except (NotFound, RequestTooLarge) as error:
            errors = [LineError(str(error.code), error.message)]
            if run.batch.status != "validating":  # what was answered stays
                errors = []
                run.lines.clear()
                await self._write(run, _expire)
        if errors:
            await self._write(run, lambda row: _fail(row, errors, now_s()))
            await self.batches.tidy(run.tenant, run.batch)
            return

        def begin(row: StoredBatch) -> None:
            if run.lines:
                row.total, row.model = len(run.lines), run.model
            if row.status == "validating":
                row.become("in_progress", now_s())

        await self._write(run, begin)
        if run.batch.status == "in_progress" and not run.batch.unasked and not await self._ask_all(run):
            await self._write(run)
            return
        await self._finish(run)
        await self.batches.tidy(run.tenant, run.batch)

    async def _read(self, run: _Run) -> list[LineError]:
        """Find and check the lines of the input; return what is wrong with it."""
        batch, files = run.batch, self.batches.files
        seen: dict[str, int] = {}
        errors: list[LineError] = []
        models: set[str] = set()
        async for part in lines_of(files.content(run.tenant, batch.content, batch.size)):
            work = partial(checked, part, batch.endpoint)
            for number, custom_id, line in await files.objects.work(run.tenant, work):
                if isinstance(line, LineError):
                    errors.append(line)
                elif custom_id in seen:
                    message = f"Lines {seen[custom_id]} and {number} have the same custom_id."
                    errors.append(LineError("duplicate_custom_id", message, number, "custom_id"))
                else:
                    seen[custom_id] = number
                    models.add(line.model)
                    run.lines.append(line)
            if len(errors) >= MAX_ERRORS:
                return errors[:MAX_ERRORS]
            if len(run.lines) > MAX_LINES and not batch.anthropic:
                return [LineError("too_many_requests", f"A batch has at most {MAX_LINES} requests; send several.")]
        if not errors and not run.lines:
            return [LineError("empty_file", "The file holds no request; it must have one JSON object per line.")]
        if len(models) == 1:
            run.model = models.pop()
        return errors

    async def _ask_all(self, run: _Run) -> bool:
        """Ask for each line that has no result, until the batch expires or is cancelled; return False if it leaves."""
        done = await self.batches.done(run.tenant, run.batch)

        def ordered() -> tuple[list[int], list[Group]]:
            left = [number for number in range(len(run.lines)) if number not in done]
            return left, grouped([run.lines[number].beginnings for number in left])

        left, groups = await self.batches.objects.work(run.tenant, ordered)
        run.left = len(left)
        asking = Counter[str]()

        async def quiet(at: int) -> None:
            model = run.lines[left[at]].model
            while run.leaving.is_set() or not self.quiet(run.tenant, model):
                if run.leaving.is_set():
                    await asyncio.Event().wait()  # until this is cancelled
                if run.urgent is None and run.is_late(self.batches.objects.now_s()):
                    run.urgent = left[at]  # or others' requests could hold all of it up until it expires
                    break
                await asyncio.sleep(QUIET_S)
            asking[model] += 1  # at once: many lines may start before the first of them runs

        async def ask(at: int) -> None:
            try:
                await self._ask(run, left[at])
            finally:
                asking[run.lines[left[at]].model] -= 1

        runner = LineRunner(
            ask,
            lambda: max(1, self.at_once() // max(1, len(self._placed()))),
            self.lanes,
            quiet,
        )
        work = asyncio.create_task(runner.run(groups))
        self._asking.append(asking)
        try:
            while not work.done():
                if run.batch.status == "cancelling":
                    return True
                if self.batches.objects.now_s() >= run.batch.expires_at:
                    await self._write(run, _expire)
                    return True
                if not self.knows(run.tenant):
                    self._leave(run)
                if run.leaving.is_set() and not asking.total():
                    return False
                await asyncio.wait((work,), timeout=TICK_S / 2)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            self._asking = [counts for counts in self._asking if counts is not asking]
        work.result()
        return not run.left

    async def _ask(self, run: _Run, number: int) -> None:
        """Ask for one line, again while the server is busy, and store its result."""
        (request, body), batch = await _patient(lambda: self._request(run, number)), run.batch
        request_id = f"req_{secrets.token_hex(12)}"
        faults = 0
        try:
            while True:
                if run.leaving.is_set() and not faults:
                    return
                # What failed twice may have waited for others all the time.
                waits = number != run.urgent and faults < MAX_FAULTS - 1
                try:
                    said = await self.ask(run.tenant, request.url, body, request_id, waits)
                except Exception:  # costs this line alone
                    logger.exception("a line of batch %s failed", batch.id)
                    said = Said(500, _error_body(request.url, request_id, "The server failed at this request."))
                faults += said.status >= 500 and said.retry_after_s is None
                if said.retry_after_s is None and (said.status < 500 or faults == MAX_FAULTS):
                    break
                if said.retry_after_s is None:
                    await asyncio.sleep(faults)
                    continue
                if said.retry_after_s > LONGEST_PAUSE_S:
                    self.turns.rest(run.tenant if said.own_limit else batch.id, said.retry_after_s)
                    self._leave(run)
                with suppress(TimeoutError):
                    await asyncio.wait_for(run.leaving.wait(), said.retry_after_s)
                if run.leaving.is_set():
                    return
        finally:
            if number == run.urgent:
                run.urgent = None
        run.left -= 1
        result = LineResult(request.custom_id, said.status, request_id, msgspec.Raw(said.body or b"null"), said.warning)
        await _patient(lambda: self.batches.keep(run.tenant, batch, number, result))
        run.counts["completed" if result.ok else "failed"] += 1  # it had none when this run began

    async def _request(self, run: _Run, number: int) -> tuple[BatchRequest, bytes]:
        line = run.lines[number]
        raw = await self.batches.files.part(run.tenant, run.batch.content, line.start, line.length)
        return await self._apart(run, len(raw), partial(asked, raw))

    async def _apart(self, run: _Run, size: int, work: Callable[[], T]) -> T:
        """Return the result of what takes longer with more bytes, outside of the event loop if there are many."""
        return work() if size <= LARGE_BYTES else await self.batches.objects.work(run.tenant, work)

    async def _finish(self, run: _Run) -> None:
        """Write the results into files, and end the batch."""
        now_s = self.batches.objects.now_s

        def finalize(row: StoredBatch) -> None:
            if row.status == "cancelling":
                row.unasked = "cancelled"
            elif row.status == "in_progress":
                row.become("finalizing", now_s())

        await self._write(run, finalize)
        batch, counts, usage = run.batch, Counter[str](), Counter[str]()
        life_s = min(batch.output_life_s or self.batches.objects.ttl_s, self.batches.objects.ttl_s)
        kinds = ("results",) if batch.anthropic else ("output", "error")
        contents = {kind: await self._compose(run, kind, life_s, counts, usage) for kind in kinds}
        try:
            await self._write(run)
        except Lost:  # another one has ended it, and its files may be deleted already
            for content, _ in contents.values():
                await self.batches.files.forget(run.tenant, content)
            raise
        ids: dict[str, str] = {}
        for kind, (content, size) in contents.items():
            if size and not batch.anthropic:
                # Its id follows from the batch's: who comes second finds the first one's file.
                at_s = batch.times.get(batch.status, batch.created_at)
                ids[kind] = _file_id(kind, batch, at_s)
                name = f"{batch.id}_{kind}.jsonl"
                file = File(ids[kind], content, name, "batch_output", size, at_s, at_s + life_s)
                if not await self.batches.files.add(run.tenant, file):
                    await self.batches.files.forget(run.tenant, content)

        def end(row: StoredBatch) -> None:
            row.completed, row.failed = counts["completed"], counts["failed"]
            row.usage = dict(usage)
            row.output_file_id, row.error_file_id = ids.get("output"), ids.get("error")
            row.results, row.results_size = contents.get("results", ("", 0))
            row.become(_END[row.unasked], now_s())

        run.counts.clear()
        await self._write(run, end)

    async def _compose(
        self, run: _Run, kind: str, life_s: float, counts: Counter[str], usage: Counter[str]
    ) -> tuple[str, int]:
        """Write one kind of results into a new content; return its name and size."""
        batch = run.batch

        async def parts() -> AsyncIterator[bytes]:
            async for number, result in self.batches.results(run.tenant, batch):
                if number >= len(run.lines) and (result is None or result is UNREADABLE):
                    continue  # the input is gone
                if result is UNREADABLE:
                    request_id = f"req_{secrets.token_hex(12)}"
                    (request, _), text = await self._request(run, number), "The result of this request is damaged."
                    body = msgspec.Raw(_error_body(request.url, request_id, text))
                    result = LineResult(request.custom_id, 500, request_id, body)
                ok = result is not None and result.ok
                if kind == ("error" if ok else "output"):
                    continue
                if result is None:
                    request, _ = await self._request(run, number)
                    result = LineResult(request.custom_id, 0, f"req_{secrets.token_hex(12)}", _NULL)
                else:
                    counts["completed" if ok else "failed"] += 1
                if ok:
                    decode = partial(msgspec.json.decode, result.body)
                    usage.update(usage_of(await self._apart(run, len(result.body), decode)))
                yield (anthropic_line if batch.anthropic else openai_line)(result, batch.unasked) + b"\n"

        return await self.batches.files.write(run.tenant, parts(), life_s)


async def _patient(work: Callable[[], Awaitable[T]]) -> T:
    """Do what needs the store, again while it cannot be reached: a run ends with its lease at the latest."""
    while True:
        try:
            return await work()
        except Overloaded:
            await asyncio.sleep(TICK_S)


_END: dict[Unasked, Any] = {"": "completed", "expired": "expired", "cancelled": "cancelled"}
_NULL = msgspec.Raw(b"null")
_WHY = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed, because the batch was cancelled.",
}


def openai_line(result: LineResult, unasked: Unasked) -> bytes:
    """Return a result in OpenAI's form. One with status 0 was not asked for, ``unasked`` tells why."""
    response: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    if result.status:
        response = {"status_code": result.status, "request_id": result.request_id, "body": result.body}
        if result.warning:
            response["warning"] = result.warning
    else:
        error = {"code": f"batch_{unasked}", "message": _WHY.get(unasked, "")}
    line = {"id": f"batch_{result.request_id}", "custom_id": result.custom_id, "response": response, "error": error}
    return msgspec.json.encode(line)


def anthropic_line(result: LineResult, unasked: Unasked) -> bytes:
    """Return a result in Anthropic's form; see ``openai_line``."""
    shown: dict[str, Any] = {"type": "canceled" if unasked == "cancelled" else "expired"}
    if result.ok:
        shown = {"type": "succeeded", "message": result.body}
    elif result.status:
        shown = {"type": "errored", "error": result.body}
    return msgspec.json.encode({"custom_id": result.custom_id, "result": shown})


def _expire(batch: StoredBatch) -> None:
    if batch.status == "in_progress":
        batch.unasked = "expired"


def _fail(batch: StoredBatch, errors: list[LineError], now_s: float) -> None:
    batch.errors = errors
    batch.become("failed", now_s)


def _file_id(kind: str, batch: StoredBatch, at_s: float) -> str:
    return f"file-{kind}-{int(at_s * 1000):012x}{batch.id[-24:]}"


def _error_body(url: str, request_id: str, message: str) -> bytes:
    """Return an error of the server in the shape of the API with this path."""
    return msgspec.json.encode(APIS[url][1]().error(WarmpathError(message), request_id).body)
