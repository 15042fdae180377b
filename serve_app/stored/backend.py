"""What a database does for stored responses, and the choice of one by its URL."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit


class StoreError(ValueError):
    """No responses can be stored so; the message says what to change, and holds no part of a URL."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of what is kept: ``ttl_s`` of each response, ``max_bytes`` of a tenant's together. ``now_s``: since 1970."""

    ttl_s: float
    max_bytes: int
    now_s: Callable[[], float] = time.time


class Backend(Protocol):
    """Keeps sealed responses. Tenants, ids and data are opaque bytes; each id is of one tenant.

    Every call waits for the database, and may come from any thread. ``failures``: what a call raises where the
    database cannot be used.
    """

    failures: tuple[type[Exception], ...]

    def put(self, tenant: bytes, response_id: bytes, data: bytes) -> None:
        """Keep a response; it is durable on return. Where the tenant is over ``max_bytes``, its oldest others leave."""

    def get(self, tenant: bytes, response_id: bytes) -> bytes | None:
        """Return the data of a response, None where it is not there."""

    def delete(self, tenant: bytes, response_id: bytes) -> bool:
        """Remove a response; returns whether it was there."""

    def expire(self) -> None:
        """Remove what is older than ``ttl_s``."""


def open_backend(url: str | None, file: Path, bounds: Bounds) -> Backend:
    """Return the database behind a URL, which is connected to when it is needed, or else the SQLite ``file``.

    Raises StoreError for a URL that names no such database, for a client library that is not installed, and for a file
    that cannot be used.
    """
    if url is None:
        from serve_app.stored.sql import sqlite_backend

        return sqlite_backend(file, bounds)
    try:
        parts = urlsplit(url)
        scheme, named = parts.scheme, bool(parts.hostname) and (parts.port or True)
    except ValueError:  # it would quote what may be a piece of the password
        scheme, named = "", False
    extra = {"redis": "redis", "rediss": "redis", "postgresql": "postgres", "postgres": "postgres"}.get(scheme)
    if extra is None or not named:
        raise StoreError(
            "the URL of stored responses must be redis://HOST, rediss://HOST or postgresql://HOST/DATABASE, with user "
            "and password percent-encoded before an @"
        )
    try:
        if extra == "redis":
            from serve_app.stored.redis_backend import RedisBackend

            return RedisBackend(url, bounds)
        from serve_app.stored.sql import postgres_backend

        return postgres_backend(url, bounds)
    except ImportError as error:
        raise StoreError(
            f"{scheme}:// needs a client library that is not installed: pip install '.[{extra}]'"
        ) from error
