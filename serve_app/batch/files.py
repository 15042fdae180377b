"""A tenant's files in the store of objects: a row for each, and its content in chunks, so that no process holds it.

Source: OpenAI's Files API, for shapes and bounds.
"""

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec

from serve_app.errors import InvalidRequest, NotFound, RequestTooLarge
from serve_app.stored import StoredObjects

MAX_FILE_BYTES = 200 << 20
MAX_FILES = 10_000
"""Of one tenant."""
CHUNK_BYTES = 256 << 10
FILE = "file"
CONTENT = "contents"


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

    async def write(
        self, tenant: str, parts: AsyncIterator[bytes], life_s: float, room: int | None = None
    ) -> tuple[str, int]:
        """Store a content that lives for ``life_s``; return its name and size. Nothing stays of one that fails.

        Raises RequestTooLarge over a file's limit or the ``room`` (None: there are none), Overloaded, and the errors of
        ``parts``.
        """
        content, size, now_s = secrets.token_hex(16), 0, self.objects.now_s()
        expires_s = now_s + life_s
        chunk, count = bytearray(), 0
        begun = msgspec.json.encode(Content(content, now_s))
        try:
            await self.objects.insert(tenant, CONTENT, content, begun, expires_s)
            async for part in parts:
                chunk += part
                size += len(part)
                if room is not None and size > MAX_FILE_BYTES:
                    raise RequestTooLarge(f"A file may have {MAX_FILE_BYTES >> 20} MiB; send several.", param="file")
                if room is not None and size > room:
                    raise self._full(room)
                while len(chunk) >= CHUNK_BYTES:
                    await self._write(tenant, content, count, bytes(chunk[:CHUNK_BYTES]), expires_s)
                    del chunk[:CHUNK_BYTES]
                    count += 1
            if chunk:
                await self._write(tenant, content, count, bytes(chunk), expires_s)
            if room is not None and await self.objects.taken(tenant) > self.objects.max_bytes:
                raise self._full(0)  # others were written meanwhile
        except BaseException:
            await self.forget(tenant, content)
            raise
        return content, size

    def _full(self, room: int) -> RequestTooLarge:
        message = f"Your files and batches may take {self.objects.max_bytes} bytes, and {max(0, room)} are left;"
        return RequestTooLarge(f"{message} delete some.", param="file", code="storage_limit_exceeded")

    async def contents(self, tenant: str) -> list[Content]:
        """Return a tenant's contents."""
        return [msgspec.json.decode(data, type=Content) for data in await self.objects.all(tenant, CONTENT)]

    async def _write(self, tenant: str, content: str, number: int, chunk: bytes, expires_s: float) -> None:
        await self.objects.insert(tenant, _chunks(content), str(number), chunk, expires_s)

    async def add(self, tenant: str, file: File) -> bool:
        """Store a file whose content is written; return whether it is new."""
        return await self.objects.insert(tenant, FILE, file.id, msgspec.json.encode(file), file.expires_at)

    async def create(
        self, tenant: str, filename: str, content: str, size: int, purpose: str, life_s: float | None = None
    ) -> File:
        """Store a new file, whose ``content`` is written. Raises InvalidRequest if the tenant has too many."""
        if len(await self.objects.ids(tenant, FILE)) >= MAX_FILES:
            raise InvalidRequest(f"You have {MAX_FILES} files; delete some.", code="storage_limit_exceeded")
        life_s, now_s = min(life_s or self.objects.ttl_s, self.objects.ttl_s), self.objects.now_s()
        file = File(f"file-{secrets.token_hex(16)}", content, filename[:256], purpose, size, now_s, now_s + life_s)
        await self.add(tenant, file)
        return file

    async def get(self, tenant: str, file_id: str) -> File:
        """Return a file. Raises NotFound, Overloaded and ResponseDamaged."""
        data = await self.objects.get(tenant, FILE, file_id)
        if data is None:
            raise NotFound(f"There is no file {file_id[:64]!r}: it may be deleted or expired.", param="file_id")
        return msgspec.json.decode(data, type=File)

    async def all(self, tenant: str) -> list[File]:
        """Return a tenant's files, the newest first."""
        files = [msgspec.json.decode(data, type=File) for data in await self.objects.all(tenant, FILE)]
        return sorted(files, key=lambda file: (file.created_at, file.id), reverse=True)

    async def delete(self, tenant: str, file_id: str) -> None:
        """Remove a file and its content. Raises NotFound."""
        file = await self.get(tenant, file_id)
        await self.objects.remove(tenant, FILE, file_id)
        await self.forget(tenant, file.content)

    async def forget(self, tenant: str, content: str) -> None:
        """Remove a content."""
        await self.objects.remove(tenant, _chunks(content))
        await self.objects.remove(tenant, CONTENT, content)

    async def content(self, tenant: str, content: str, size: int) -> AsyncIterator[bytes]:
        """Yield a content of ``size`` bytes in chunks. Raises NotFound if a part is gone."""
        for number in range(-(-size // CHUNK_BYTES)):
            yield await self._chunk(tenant, content, number)

    async def part(self, tenant: str, content: str, start: int, length: int) -> bytes:
        """Return a part of a content. Raises NotFound if it is gone."""
        first, last = start // CHUNK_BYTES, (start + length - 1) // CHUNK_BYTES
        found = b"".join([await self._chunk(tenant, content, number) for number in range(first, last + 1)])
        return found[start - first * CHUNK_BYTES :][:length]

    async def _chunk(self, tenant: str, content: str, number: int) -> bytes:
        chunk = await self.objects.get(tenant, _chunks(content), str(number))
        if chunk is None:
            raise NotFound("The file was deleted or has expired.", code="file_deleted")
        return chunk


def _chunks(content: str) -> str:
    return f"content {content}"
