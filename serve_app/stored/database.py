"""The protocol of a database of sealed objects.

Any thread may call a database, and blocks. If one cannot be used, a call raises one of its ``failures``.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

TIMEOUT_S = 5
"""The longest time of a database call."""

RESPONSES = b"responses"
"""The kind of stored responses, whose owner has objects of no other kind.

SQL and Redis keep this kind where releases have kept responses before they were objects, and in that form. So processes
of an earlier release beside newer ones find, continue, count, drop and delete the same responses, whoever stored them,
and neither an upgrade nor its rollback copies any.
"""


class StoreError(ValueError):
    """Responses cannot be stored with these settings. The message contains the remedy, but no part of a URL."""


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """The limits of storage: ``ttl_s`` of each response, ``max_bytes`` of each tenant. ``now_s``: since 1970."""

    ttl_s: float
    max_bytes: int
    now_s: Callable[[], float] = time.time


class ObjectPlace(NamedTuple):
    """The names of an object's owner, of its kind (32 bytes each, below the owner), and its own, b"" for all."""

    owner: bytes
    kind: bytes
    id: bytes = b""


class Database(Protocol):
    """Objects by owner, kind and id, each until a time. All calls see what another process has stored before."""

    failures: tuple[type[Exception], ...]

    def remedy(self, error: Exception) -> str:
        """Return what to do about a failure that will not pass, else ""."""
        return ""

    def insert(self, at: ObjectPlace, data: bytes, expires_s: float, most_bytes: int | None = None) -> bool:
        """Store an object durably, unless there is one of its id; return whether it is new. Removes some expired ones.

        ``most_bytes``: also not if its owner's objects would take more. Writers at once do not pass it together; in
        Postgres, by one object each at most. After a lost connection it may be this call's and still not be new.
        """

    def swap(self, at: ObjectPlace, old: bytes, new: bytes) -> bool:
        """Replace an object's data if it is still ``old``; return whether it was."""

    def find(self, at: ObjectPlace) -> bytes | None:
        """Return an object's data, None if it does not exist or has expired."""

    def ids(self, at: ObjectPlace) -> list[bytes]:
        """Return the ids of all objects of an owner and kind."""

    def read(self, at: ObjectPlace) -> list[tuple[bytes, bytes]]:
        """Return ids and data of all objects of an owner and kind."""

    def remove(self, at: ObjectPlace) -> bool:
        """Remove an object, or all of an owner and kind if there is no id; return whether there was one."""

    def expire(self, at: ObjectPlace, expires_s: float) -> None:
        """Let an object, or all of an owner and kind if there is no id, live until another time."""

    def taken(self, at: ObjectPlace) -> int:
        """Return the bytes of all objects of an owner and kind, of all kinds if it is b""."""

    def evict(self, at: ObjectPlace, most_bytes: int) -> int:
        """Remove the first to expire of an owner and kind, but not ``at``, while all take more; return how many.

        It may stop before, and goes on with the next call.
        """


@dataclass(frozen=True, slots=True)
class DatabaseServer:
    """A kind of database server. ``schemes``: of its URLs; ``forms``: of these, for messages.

    ``extra``: installs its client library. ``open`` does not connect, and raises ImportError without the library;
    ``ping`` raises any exception if the server does not answer.
    """

    schemes: tuple[str, ...]
    forms: tuple[str, ...]
    extra: str
    open: Callable[[str, StorageLimits], Database]
    ping: Callable[[str], object]
