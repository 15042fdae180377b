"""What a database does for stored responses, and the choice of one by its URL."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

URL_VARIABLE = "WARMPATH_RESPONSES_URL"
"""Of the environment: the URL, which may hold a password, and so is no setting."""
TIMEOUT_S = 5
"""The longest that a database may take for a call."""
_EXTRAS = {"redis": "redis", "rediss": "redis", "postgresql": "postgres", "postgres": "postgres"}


class StoreError(ValueError):
    """No responses can be stored so; the message says what to change, and holds no part of a URL."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of what is kept: ``ttl_s`` of each response, ``max_bytes`` of a tenant's together. ``now_s``: since 1970."""

    ttl_s: float
    max_bytes: int
    now_s: Callable[[], float] = time.time


class Backend(Protocol):
    """Keeps sealed responses; names and data are opaque bytes, and each id is of one tenant.

    Any thread may call, and waits. ``failures``: what a call raises where the database cannot be used.
    """

    failures: tuple[type[Exception], ...]

    def put(self, tenant: bytes, response_id: bytes, data: bytes) -> None:
        """Keep a response; it is durable on return, and a second time changes nothing.

        Some of what is older than ``ttl_s`` leaves, and where the tenant is over ``max_bytes``, its oldest others.
        """

    def get(self, tenant: bytes, response_id: bytes) -> bytes | None:
        """Return the data of a response, None where it is not there."""

    def delete(self, tenant: bytes, response_id: bytes) -> bool:
        """Remove a response; returns whether it was there."""


def open_backend(url: str | None, file: Path, bounds: Bounds) -> Backend:
    """Return the database behind a URL, which is connected to when it is needed, or else the SQLite ``file``.

    Raises StoreError for a URL that names no database, a client library that is missing, and an impossible file.
    """
    from serve_app.stored.sql import postgres_backend, sqlite_backend

    if not url:
        return sqlite_backend(file, bounds)
    try:
        parts = urlsplit(url)
        extra = _EXTRAS.get(parts.scheme) if parts.hostname and parts.port != 0 else None
    except ValueError:  # it would quote what may be a piece of the password
        extra = None
    try:
        if extra == "redis":
            from serve_app.stored.redis_backend import RedisBackend

            return RedisBackend(url, bounds)
        if extra == "postgres":
            return postgres_backend(url, bounds)
    except ImportError as error:
        raise StoreError(f"${URL_VARIABLE} needs a client library: pip install '.[{extra}]'") from error
    raise StoreError(
        f"${URL_VARIABLE} must be redis://HOST, rediss://HOST or postgresql://HOST/DATABASE, with user and password "
        "percent-encoded before an @"
    )
