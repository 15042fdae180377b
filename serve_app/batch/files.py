"""A tenant's files in the store of objects: a row for each, and its content in chunks, so that no process holds it.

Source: OpenAI's Files API, for shapes and bounds.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import msgspec

from serve_app.errors import InvalidRequest, NotFound, RequestTooLarge, WarmpathError
from serve_app.stored.objects import StoredObjects

logger = logging.getLogger(__name__)

R = TypeVar("R")


class HasPlace(Protocol):
    """What lists hold."""

    @property
    def id(self) -> str:
        """Its id."""

    @property
    def created_at(self) -> float:
        """When it was made, in seconds since 1970."""


Listed = TypeVar("Listed", bound=HasPlace)

MAX_FILE_BYTES = 200 << 20
MAX_FILES = 10_000
"""Of one tenant."""
CHUNK_BYTES = 256 << 10
HOUR_S = 3600.0
"""A content's name outlives its chunks, so that none is left without it; nothing takes longer to be written."""
FILE = "file"
CONTENT = "contents"


_MADE = re.compile(r"[a-z]+[-_](?:(?:output|error)-)?([\da-f]{12})[\da-f]{24}")


def new_id(prefix: str, now_s: float | None = None) -> str:
    """Return a new id, which tells when it was made, as UUIDv7 does: a list has a place for it when it is gone."""
    return f"{prefix}{int((time.time() if now_s is None else now_s) * 1000):012x}{secrets.token_hex(12)}"


ListPlace = tuple[int, str]
"""Of an object in a list: milliseconds since 1970, and its id."""


def place_in_name(name: str) -> ListPlace | None:
    """Return the place in lists that an id tells, None for one of an earlier release."""
    match = _MADE.fullmatch(name)
    return None if match is None else (int(match[1], 16), name)


def place_of(one: HasPlace) -> ListPlace:
    """Return the place in lists of an object."""
    return place_in_name(one.id) or (int(one.created_at * 1000), one.id)


class File(msgspec.Struct, frozen=True):
    """A file. ``content``: the name of its content, which other objects may read; times are seconds since 1970."""

    id: str
    content: str
    filename: str
    purpose: str
    bytes: int
    created_at: float
    expires_at: float

    def shown(self) -> dict[str, Any]:
        """Return the file as OpenAI's API shows it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": int(self.created_at),
            "expires_at": int(self.expires_at),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class Content(msgspec.Struct, frozen=True):
    """A content by name, so that one which nothing else names is found. ``begun_s``: since 1970."""

    name: str
    begun_s: float


@dataclass(frozen=True, slots=True)
class Files:
    """All tenants' files."""

    objects: StoredObjects
    _turns: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    _leaving: set[asyncio.Task[None]] = field(default_factory=set)

    def turn(self, tenant: str) -> asyncio.Lock:
        """Return the lock under which this process compares what a tenant has with a limit, and adds to it."""
        return self._turns.setdefault(tenant, asyncio.Lock())

    async def write(
        self, tenant: str, parts: AsyncIterator[bytes], life_s: float, room: int | None = None
    ) -> tuple[str, int]:
        """Store a content that lives for ``life_s``; return its name and size. Nothing stays of one that fails.

        Raises RequestTooLarge over a file's limit, over the ``room`` (None: there are none), and once the tenant's room
        is taken, by others that are written at the same time too; Overloaded, and the errors of ``parts``.
        """
        content, size, now_s = secrets.token_hex(16), 0, self.objects.now_s()
        expires_s = now_s + life_s
        chunk, count = bytearray(), 0
        begun = msgspec.json.encode(Content(content, now_s))
        try:
            await self.objects.insert(
                tenant, CONTENT, content, begun, max(expires_s, now_s + self.objects.ttl_s) + HOUR_S
            )
            async for part in parts:
                chunk += part
                size += len(part)
                if room is not None and size > MAX_FILE_BYTES:
                    raise RequestTooLarge(f"A file may have {MAX_FILE_BYTES >> 20} MiB; send several.", param="file")
                if room is not None and size > room:
                    raise self._full(room)
                while len(chunk) >= CHUNK_BYTES:
                    await self._write(tenant, content, count, bytes(chunk[:CHUNK_BYTES]), expires_s, room)
                    del chunk[:CHUNK_BYTES]
                    count += 1
            if chunk:
                await self._write(tenant, content, count, bytes(chunk), expires_s, room)
        except BaseException:
            await self.discard(tenant, content)
            raise
        return content, size

    def _full(self, room: int) -> RequestTooLarge:
        message = f"Your files and batches may take {self.objects.max_bytes} bytes, and {max(0, room)} are left;"
        return RequestTooLarge(f"{message} delete some.", param="file", code="storage_limit_exceeded")

    async def _write(
        self, tenant: str, content: str, number: int, chunk: bytes, expires_s: float, room: int | None
    ) -> None:
        place = tenant, _chunks(content), str(number)
        if room is None:
            await self.objects.insert(*place, chunk, expires_s)
            return
        async with self.turn(tenant):
            if await self.objects.insert(*place, chunk, expires_s, bounded=True):
                return
            if await self.objects.get(*place) is not None:  # stored before a connection was lost
                return
            left = self.objects.max_bytes - await self.objects.taken(tenant)
            await self.forget(tenant, content)  # before the next one looks: what is given back may be enough for it
        raise self._full(left)

    async def add(self, tenant: str, file: File) -> bool:
        """Store a file whose content is written, and lives as long as it; return whether it is new."""
        await self.objects.expire(tenant, _chunks(file.content), file.expires_at)
        await self.objects.expire(tenant, CONTENT, file.expires_at, file.content)
        return await self.objects.insert(tenant, FILE, file.id, msgspec.json.encode(file), file.expires_at)

    async def create(
        self, tenant: str, filename: str, content: str, size: int, purpose: str, life_s: float | None = None
    ) -> File:
        """Store a new file, whose ``content`` is written. Raises InvalidRequest if the tenant has too many."""
        async with self.turn(tenant):
            if len(await self.objects.ids(tenant, FILE)) >= MAX_FILES:
                raise InvalidRequest(f"You have {MAX_FILES} files; delete some.", code="storage_limit_exceeded")
            life_s, now_s = min(life_s or self.objects.ttl_s, self.objects.ttl_s), self.objects.now_s()
            file = File(new_id("file-", now_s), content, filename[:256], purpose, size, now_s, now_s + life_s)
            await self.add(tenant, file)
        return file

    async def get(self, tenant: str, file_id: str) -> File:
        """Return a file. Raises NotFound, Overloaded, ResponseDamaged and StoredByNewerRelease."""
        file = await self.objects.read(tenant, FILE, file_id, File)
        if file is None:
            raise NotFound(f"There is no file {file_id[:64]!r}: it may be deleted or expired.", param="file_id")
        return file

    async def listed(self, tenant: str, work: Callable[[list[File]], R]) -> R:
        """Return what ``work`` makes of a tenant's files, the newest first, in a thread."""
        return await self.objects.read_all(tenant, FILE, File, lambda rows, _: work(newest_first(rows)))

    async def delete(self, tenant: str, file_id: str) -> None:
        """Remove a file and its content. Raises NotFound."""
        file = await self.get(tenant, file_id)
        await self.objects.remove(tenant, FILE, file_id)
        await self.forget(tenant, file.content)

    async def forget(self, tenant: str, content: str) -> None:
        """Remove a content."""
        await self.objects.remove(tenant, _chunks(content))
        await self.objects.remove(tenant, CONTENT, content)

    async def discard(self, tenant: str, content: str) -> None:
        """Remove a content of which nothing shall stay after an error, whatever becomes of the caller.

        If the store cannot be reached, ``Batches.sweep`` removes it later.
        """

        async def leave() -> None:
            try:
                await self.forget(tenant, content)
            except WarmpathError:
                logger.warning("a content that nothing names stays in the store for an hour at least", exc_info=True)

        task = asyncio.create_task(leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        await asyncio.shield(task)

    async def content(self, tenant: str, content: str, size: int) -> AsyncIterator[bytes]:
        """Yield a content of ``size`` bytes in chunks. Raises NotFound if a part is gone."""
        for number in range(-(-size // CHUNK_BYTES)):
            yield await self._chunk(tenant, content, number)

    async def part(self, tenant: str, content: str, start: int, length: int) -> bytes:
        """Return a part of a content. Raises NotFound if it is gone."""
        first, last = start // CHUNK_BYTES, (start + length - 1) // CHUNK_BYTES
        whole = b"".join([await self._chunk(tenant, content, number) for number in range(first, last + 1)])
        return whole[start - first * CHUNK_BYTES :][:length]

    async def _chunk(self, tenant: str, content: str, number: int) -> bytes:
        chunk = await self.objects.get(tenant, _chunks(content), str(number))
        if chunk is None:
            raise NotFound("The file was deleted or has expired.", code="file_deleted")
        return chunk


def newest_first(rows: list[Listed]) -> list[Listed]:
    """Return objects in the order of lists."""
    return sorted(rows, key=place_of, reverse=True)


def _chunks(content: str) -> str:
    return f"content {content}"
