"""Batches of requests in the store: what was asked for, how far it is, and each line's result, once.

A batch's row is the truth: who runs it (until when), its status and counts. A line's result is stored if there is none
yet, so two that run one batch, after a long pause of one, still give one result each. Times are seconds since 1970.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from serve_app.batch.files import CONTENT, FILE, Content, File, Files, newest_first
from serve_app.batch.files import new_id as new_id
from serve_app.errors import InvalidRequest, NotFound, RequestTooLarge, ResponseDamaged, StoredByNewerRelease
from serve_app.stored.objects import StoredObjects, decoded

logger = logging.getLogger(__name__)

BATCH = "batch"
QUEUE = "queued batches"
MAX_OPEN = 100
"""A tenant's batches that have not ended."""
ABANDONED_S = 3600.0
"""After this time what is half made was left by a process that died: nothing takes so long to be named."""
OF_INPUT = 0.9
"""A batch ends after this part of its input's life at the latest, while its lines can still be read."""

R = TypeVar("R")
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED = ("failed", "completed", "expired", "cancelled")
Unasked = Literal["", "expired", "cancelled"]


class LineError(msgspec.Struct, frozen=True):
    """Why a line of the input is refused."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class StoredBatch(msgspec.Struct, kw_only=True):
    """A batch. ``content``: of its input, ``size`` bytes; ``owns_content``: no file has it.

    ``times``: of each status that it had; ``holder``: the ingress that runs it until ``held_until_s``.
    ``output_life_s``: of its output files. ``model``: the lines' own, if it is one. ``total``: lines; of them
    ``completed`` and ``failed`` have a result, the others were not asked for before the batch expired or was cancelled.
    """

    id: str
    endpoint: str
    content: str
    size: int
    created_at: float
    expires_at: float
    completion_window: str = "24h"
    input_file_id: str = ""
    owns_content: bool = False
    metadata: dict[str, str] | None = None
    output_life_s: float | None = None
    model: str | None = None
    status: Status = "validating"
    times: dict[str, float] = {}
    errors: list[LineError] = []
    total: int = 0
    completed: int = 0
    failed: int = 0
    unasked: Unasked = ""
    output_file_id: str | None = None
    error_file_id: str | None = None
    results: str = ""
    results_size: int = 0
    usage: dict[str, int] = {}
    holder: str = ""
    held_until_s: float = 0.0

    @property
    def anthropic(self) -> bool:
        """Whether it was made by Anthropic's API."""
        return self.id.startswith("msgbatch_")

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in ENDED

    def become(self, status: Status, now_s: float) -> None:
        """Change the status."""
        self.status = status
        self.times = {**self.times, status: now_s}


class LineResult(msgspec.Struct, frozen=True):
    """The result of one line. ``status``: HTTP's; ``body``: the answer or error in its API's shape."""

    custom_id: str
    status: int
    request_id: str
    body: msgspec.Raw
    warning: str = ""

    @property
    def ok(self) -> bool:
        """Whether the request was answered."""
        return 200 <= self.status < 300


class OpenBatch(msgspec.Struct):
    """What each release can read of a batch."""

    id: str
    content: str
    status: str


UNREADABLE = LineResult("", 500, "", msgspec.Raw(b"null"))


class QueuedBatch(msgspec.Struct, frozen=True):
    """An entry of the deployment's queue."""

    tenant: str
    batch_id: str
    created_at: float


@dataclass(frozen=True, slots=True)
class Batches:
    """All tenants' batches, over the store of objects and of files."""

    objects: StoredObjects
    files: Files

    async def create(self, tenant: str, batch: StoredBatch) -> None:
        """Store and queue a new batch. Raises InvalidRequest, RequestTooLarge if the tenant has too much already."""
        async with self.files.turn(tenant):
            if len(await self.open(tenant)) >= MAX_OPEN:
                message = f"You have {MAX_OPEN} batches in progress; wait for some."
                raise InvalidRequest(message, code="too_many_batches")
            if await self.room(tenant) <= 0:
                raise RequestTooLarge(
                    "Your files and batches take all their room; delete some.", code="storage_limit_exceeded"
                )
            batch.become("validating", self.objects.now_s())
            until_s = batch.expires_at + self.objects.ttl_s
            queued = msgspec.json.encode(QueuedBatch(tenant, batch.id, batch.created_at))
            await self.objects.insert("", QUEUE, batch.id, queued, until_s)  # first: one without it would never run
            await self.objects.insert(tenant, BATCH, batch.id, msgspec.json.encode(batch), until_s)

    async def open(self, tenant: str) -> list[OpenBatch]:
        """Return a tenant's batches that have not ended, also those of a newer release."""
        rows = []
        for queued in await self.queue():
            if queued.tenant == tenant:
                with suppress(ResponseDamaged, StoredByNewerRelease):
                    rows.append(await self.objects.read(tenant, BATCH, queued.batch_id, OpenBatch))
        return [batch for batch in rows if batch is not None and batch.status not in ENDED]

    async def room(self, tenant: str) -> int:
        """Return the bytes that are left to a tenant. If they are few, what nothing names any more is removed first."""
        most = self.objects.max_bytes
        if (room := most - await self.objects.taken(tenant)) > most // 2:
            return room
        await self.sweep(tenant)
        return most - await self.objects.taken(tenant)

    async def sweep(self, tenant: str) -> None:
        """Remove the contents that a process which died has left behind."""
        since_s = self.objects.now_s() - ABANDONED_S

        def abandoned(rows: list[Content], _: bool) -> set[str]:
            return {content.name for content in rows if content.begun_s < since_s}

        def named_by_files(rows: list[File], whole: bool) -> set[str] | None:
            return {file.content for file in rows} if whole else None

        def named_by_batches(rows: list[StoredBatch], whole: bool) -> set[str] | None:
            return {name for batch in rows for name in (batch.content, batch.results)} if whole else None

        old = await self.objects.read_all(tenant, CONTENT, Content, abandoned)
        if not old:
            return
        files = await self.objects.read_all(tenant, FILE, File, named_by_files)
        batches = await self.objects.read_all(tenant, BATCH, StoredBatch, named_by_batches)
        if files is None or batches is None:
            return  # what a newer release has stored may name any of them
        for content in old - files - batches:
            await self.files.forget(tenant, content)

    async def get(self, tenant: str, batch_id: str) -> StoredBatch:
        """Return a batch. Raises NotFound."""
        batch = await self.objects.read(tenant, BATCH, batch_id, StoredBatch)
        if batch is None:
            raise NotFound(f"There is no batch {batch_id[:64]!r}: it may be deleted or expired.", param="batch_id")
        return batch

    async def listed(self, tenant: str, work: Callable[[list[StoredBatch]], R]) -> R:
        """Return what ``work`` makes of a tenant's batches, the newest first, in a thread."""
        return await self.objects.read_all(tenant, BATCH, StoredBatch, lambda rows, _: work(newest_first(rows)))

    async def change(self, tenant: str, batch_id: str, change: Callable[[StoredBatch], bool]) -> StoredBatch | None:
        """Change a batch and return it; None if it is gone, or ``change`` returns False.

        Fields of a newer release stay. Raises StoredByNewerRelease for one that this release cannot read.
        """
        changed: list[StoredBatch] = []

        def edited(data: bytes) -> bytes | None:
            batch = decoded(data, StoredBatch)
            if not change(batch):
                return None
            changed[:] = [batch]
            return msgspec.json.encode(decoded(data, dict[str, msgspec.Raw]) | msgspec.structs.asdict(batch))

        done = await self.objects.change(tenant, BATCH, batch_id, edited)
        return changed[0] if done else None

    async def cancel(self, tenant: str, batch_id: str) -> StoredBatch:
        """Let a batch end soon; return it. One that has ended stays as it is. Raises NotFound."""

        def cancel(batch: StoredBatch) -> bool:
            if batch.status not in ("validating", "in_progress"):
                return False
            batch.become("cancelling", self.objects.now_s())
            return True

        return await self.change(tenant, batch_id, cancel) or await self.get(tenant, batch_id)

    async def delete(self, tenant: str, batch: StoredBatch) -> None:
        """Remove a batch that has ended, and its results. One that breaks off is done by asking again."""
        await self.tidy(tenant, batch)
        if batch.results:
            await self.files.forget(tenant, batch.results)
        await self.objects.remove(tenant, BATCH, batch.id)

    async def tidy(self, tenant: str, batch: StoredBatch) -> None:
        """Remove what an ended batch no longer needs; its entry in the queue last, by which others would go on."""
        await self.objects.remove(tenant, _lines(batch))
        if batch.owns_content:
            await self.files.forget(tenant, batch.content)
        await self.objects.remove("", QUEUE, batch.id)

    async def queue(self) -> list[QueuedBatch]:
        """Return the queued batches of all tenants, the oldest first. An entry that cannot be read is left out."""

        def oldest_first(rows: list[QueuedBatch], _: bool) -> list[QueuedBatch]:
            return sorted(rows, key=lambda one: one.created_at)

        return await self.objects.read_all("", QUEUE, QueuedBatch, oldest_first)

    async def unqueue(self, queued: QueuedBatch) -> None:
        """Remove an entry whose batch is gone. A new one may not be there yet."""
        if queued.created_at < self.objects.now_s() - ABANDONED_S:
            await self.objects.remove("", QUEUE, queued.batch_id)

    async def keep(self, tenant: str, batch: StoredBatch, number: int, result: LineResult) -> bool:
        """Store a line's result durably, unless it has one; return whether it is new."""
        expires_s = batch.expires_at + self.objects.ttl_s
        return await self.objects.insert(tenant, _lines(batch), str(number), msgspec.json.encode(result), expires_s)

    async def done(self, tenant: str, batch: StoredBatch) -> set[int]:
        """Return the numbers of the lines that have a result."""
        numbers = await self.objects.named(tenant, _lines(batch), map(str, range(batch.total)))
        return set(map(int, numbers))

    async def results(self, tenant: str, batch: StoredBatch) -> AsyncIterator[tuple[int, LineResult | None]]:
        """Yield each line's result in the order of the input; None: it was not asked for.

        ``UNREADABLE``: it is damaged, or of another release.
        """
        for number in range(batch.total):
            try:
                result = await self.objects.read(tenant, _lines(batch), str(number), LineResult)
            except (ResponseDamaged, StoredByNewerRelease):
                logger.warning("the result of line %d of batch %s cannot be read", number + 1, batch.id)
                result = UNREADABLE
            yield number, result


def _lines(batch: StoredBatch) -> str:
    return f"lines {batch.id}"


def usage_of(body: Any) -> dict[str, int]:
    """Return the tokens of an answer in any API's shape."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return {}
    read_details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    written_details = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    cached, read = _first(usage, "cache_read_input_tokens"), _first(usage, "prompt_tokens", "input_tokens")
    if "cache_read_input_tokens" in usage:  # Anthropic's counts each token once
        read += cached + _first(usage, "cache_creation_input_tokens")
    return {
        "input_tokens": read,
        "cached_tokens": cached or _first(read_details, "cached_tokens"),
        "output_tokens": _first(usage, "completion_tokens", "output_tokens"),
        "reasoning_tokens": _first(written_details, "reasoning_tokens", "thinking_tokens"),
    }


def _first(fields: dict[str, Any], *names: str) -> int:
    return next((int(fields[name]) for name in names if fields.get(name)), 0)
