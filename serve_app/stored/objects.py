"""A tenant's files and batches, and what the deployment keeps, by kind and name."""

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

import msgspec

from serve_app.errors import ResponseDamaged, StoredByNewerRelease, WarmpathError
from serve_app.fairness.queue import QUANTUM_BYTES, FairWorkers
from serve_app.stored.database import Database, ObjectPlace, StorageLimits
from serve_app.stored.sealed import Sealed, opened, sealed

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

MAX_REPORTED = 1000
"""The objects that cannot be read whose warnings are remembered."""


def decoded(data: bytes, type: type[T]) -> T:
    """Return what is stored as JSON. Raises StoredByNewerRelease if this release cannot read it."""
    try:
        return msgspec.json.decode(data, type=type)
    except msgspec.MsgspecError as error:
        raise StoredByNewerRelease(
            f"This was stored by another release of the server, and this one cannot read it ({error}); send the "
            "request again once all servers are of one release.",
            retry_after_s=30,
        ) from error


class StoredObjects(Sealed):
    """All tenants' files and batches, by kind and name. Without a tenant, "": the deployment's own.

    ``max_bytes`` of the bounds holds for what is stored as ``bounded``.
    """

    _label = "stored objects"
    _what = "files and batches"
    _else = "ask without them"

    def __init__(self, database: Database, secret: bytes, workers: FairWorkers, bounds: StorageLimits) -> None:
        super().__init__(database, secret, workers, bounds)
        self._reported: set[bytes] = set()
        """Ids of objects that are left out, and of which a warning told."""

    @property
    def max_bytes(self) -> int:
        """The most bytes of one tenant."""
        return self._bounds.max_bytes

    @property
    def ttl_s(self) -> float:
        """The longest life of an object."""
        return self._bounds.ttl_s

    def now_s(self) -> float:
        """Return the time, in seconds since 1970."""
        return self._bounds.now_s()

    def id_of(self, tenant: str, kind: str, name: str) -> bytes:
        """Return the id of an object."""
        return self._derived("object", tenant, kind, name)

    async def work(self, tenant: str, work: Callable[[], T]) -> T:
        """Return the result of what may take milliseconds, done in a thread at the tenant's turn."""
        return await self._workers.run(tenant, QUANTUM_BYTES, work)

    async def insert(
        self, tenant: str, kind: str, name: str, value: bytes, expires_s: float, *, bounded: bool = False
    ) -> bool:
        """Store an object durably, unless there is one of its name; return whether it is new. Raises Overloaded.

        ``bounded``: also not if the tenant's objects would take more than ``max_bytes``.
        """
        at, most = self._at(tenant, kind, name), self.max_bytes if bounded else None

        def insert() -> bool:
            return self._database.insert(at, self._sealed(tenant, at, value), expires_s, most)

        return await self._run(tenant, insert)

    async def expire(self, tenant: str, kind: str, expires_s: float, name: str | None = None) -> None:
        """Let an object, None: all of a kind, live until another time. Raises Overloaded."""
        await self._run(tenant, lambda: self._database.expire(self._at(tenant, kind, name), expires_s))

    async def get(self, tenant: str, kind: str, name: str) -> bytes | None:
        """Return an object, None if it does not exist. Raises Overloaded and ResponseDamaged."""
        at = self._at(tenant, kind, name)

        def get() -> bytes | None:
            data = self._database.find(at)
            return None if data is None else self._opened(tenant, at, data)

        return await self._run(tenant, get)

    async def change(self, tenant: str, kind: str, name: str, change: Callable[[bytes], bytes | None]) -> bool:
        """Replace an object by what ``change`` makes of it; None: leave it. Return whether it was replaced.

        ``change`` is called again if another process was faster. Raises Overloaded and ResponseDamaged.
        """
        at = self._at(tenant, kind, name)

        def attempt() -> bool:
            while (data := self._database.find(at)) is not None:
                value = change(self._opened(tenant, at, data))
                if value is None:
                    return False
                if self._database.swap(at, data, self._sealed(tenant, at, value)):
                    return True
            return False

        return await self._run(tenant, attempt)

    async def ids(self, tenant: str, kind: str) -> set[bytes]:
        """Return the ids (``id_of``) of all objects of a kind. Raises Overloaded."""
        return set(await self._run(tenant, lambda: self._database.ids(self._at(tenant, kind))))

    async def named(self, tenant: str, kind: str, names: Iterable[str]) -> set[str]:
        """Return those of ``names`` of which there is an object. Raises Overloaded."""

        def existing() -> set[str]:
            if not (ids := set(self._database.ids(self._at(tenant, kind)))):
                return set()
            return {name for name in names if self._derive("object", tenant, kind, name) in ids}

        return await self._run(tenant, existing)

    async def read(self, tenant: str, kind: str, name: str, type: type[T]) -> T | None:
        """Return an object of JSON, None if it does not exist.

        Raises Overloaded, ResponseDamaged, and StoredByNewerRelease for one that is no ``type``.
        """
        data = await self.get(tenant, kind, name)
        return None if data is None else decoded(data, type)

    async def read_all(self, tenant: str, kind: str, type: type[T], work: Callable[[list[T], bool], R]) -> R:
        """Return what ``work`` makes, in a thread, of all objects of a kind, in no order, and of whether they are all.

        One of a newer release is left out, with a warning, and so are damaged ones. Raises Overloaded.
        """
        at = self._at(tenant, kind)

        def read() -> R:
            values, whole = list[T](), True
            for one, data in self._database.read(at):
                with suppress(ResponseDamaged):
                    value = self._opened(tenant, at._replace(id=one), data)
                    try:
                        values.append(decoded(value, type))
                    except StoredByNewerRelease as error:
                        whole = False
                        self._left_out(one, kind, error)
            return work(values, whole)

        return await self._run(tenant, read)

    def _left_out(self, one: bytes, kind: str, error: WarmpathError) -> None:
        if one in self._reported:
            return
        if len(self._reported) >= MAX_REPORTED:
            self._reported.clear()
        self._reported.add(one)
        logger.warning("a stored %s cannot be read, and is left out: %s", kind, error.message)

    async def all(self, tenant: str, kind: str) -> list[bytes]:
        """Return all objects of a kind, in no order, without damaged ones. Raises Overloaded."""
        at = self._at(tenant, kind)

        def read() -> list[bytes]:
            values = []
            for one, data in self._database.read(at):
                with suppress(ResponseDamaged):
                    values.append(self._opened(tenant, at._replace(id=one), data))
            return values

        return await self._run(tenant, read)

    async def remove(self, tenant: str, kind: str, name: str | None = None) -> bool:
        """Remove an object, None: all of a kind; return whether there was one. Raises Overloaded."""
        return await self._run(tenant, lambda: self._database.remove(self._at(tenant, kind, name)))

    async def taken(self, tenant: str) -> int:
        """Return the bytes of a tenant's objects, as they are stored. Raises Overloaded."""
        return await self._run(tenant, lambda: self._database.taken(self._at(tenant)))

    def _at(self, tenant: str, kind: str | None = None, name: str | None = None) -> ObjectPlace:
        owner = self._derived("owner", tenant)
        if kind is None:
            return ObjectPlace(owner, b"")
        own = b"" if name is None else self.id_of(tenant, kind, name)
        return ObjectPlace(owner, self._derived("kind", tenant, kind), own)

    def _key(self, tenant: str, at: ObjectPlace) -> bytes:
        return self._derived("key", tenant, at.kind.hex())

    def _sealed(self, tenant: str, at: ObjectPlace, value: bytes) -> bytes:
        return sealed(self._key(tenant, at), value, at.id)

    def _opened(self, tenant: str, at: ObjectPlace, data: bytes) -> bytes:
        try:
            return opened(self._key(tenant, at), data, at.id)
        except ValueError as error:
            logger.error("a stored file or batch is damaged: %s", error)
            raise ResponseDamaged("What is stored here is damaged; delete it, and send it again.") from error
