"""Stored responses in SQLite or Postgres, by the same statements, each of which is a transaction."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from serve_app.stored.backend import TIMEOUT_S, Bounds, StoreError

SLACK = 16
"""A tenant over its bytes comes to a sixteenth below them, and each ingress stores a sixteenth of what is free before
it looks again: not every response that follows costs a look, or moves others out."""

_TABLES = """
CREATE TABLE IF NOT EXISTS stored_responses (
    id BLOB PRIMARY KEY, tenant BLOB NOT NULL, created_s DOUBLE PRECISION NOT NULL, bytes BIGINT NOT NULL,
    data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS stored_responses_of_tenants ON stored_responses (tenant, created_s, bytes);
CREATE INDEX IF NOT EXISTS stored_responses_by_age ON stored_responses (created_s);
"""
_PUT = "INSERT INTO stored_responses VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
_USED = "SELECT COALESCE(SUM(bytes), 0) FROM stored_responses WHERE tenant = ?"
_EVICT = """
DELETE FROM stored_responses WHERE id IN (
    SELECT id FROM (
        SELECT id, SUM(bytes) OVER (ORDER BY created_s, id) - bytes AS older FROM (
            SELECT id, bytes, created_s FROM stored_responses WHERE tenant = ? AND id <> ? ORDER BY created_s LIMIT 1000
        ) AS oldest
    ) AS others WHERE older < ?
)
"""
_EXPIRE = """
DELETE FROM stored_responses WHERE id IN (
    SELECT id FROM stored_responses WHERE created_s < ? ORDER BY created_s LIMIT 100
)
"""
_GET = "SELECT data FROM stored_responses WHERE tenant = ? AND id = ?"
_DELETE = "DELETE FROM stored_responses WHERE tenant = ? AND id = ?"


class SqlBackend:
    """A ``Backend`` over one connection, which ``connect`` makes, and makes again. ``mark``: that of a parameter."""

    def __init__(
        self, connect: Callable[[], Any], bounds: Bounds, failures: tuple[type[Exception], ...], mark: str = "?"
    ) -> None:
        self.failures = failures
        self._connect = connect
        self._bounds = bounds
        self._mark = mark
        self._lock = Lock()
        self._room: dict[bytes, int] = {}  # by tenant: bytes to store before its sum, which takes long, is due again
        self._database: Any = None

    def put(self, tenant: bytes, response_id: bytes, data: bytes) -> None:
        """See ``Backend``."""
        now_s, most_bytes = self._bounds.now_s(), self._bounds.max_bytes
        self._execute(_PUT, response_id, tenant, now_s, len(data), data)
        self._execute(_EXPIRE, now_s - self._bounds.ttl_s)
        self._room[tenant] = self._room.get(tenant, 0) - len(data)
        if self._room[tenant] >= 0:
            return
        while (over := int(self._execute(_USED, tenant)[0][0]) - most_bytes) > 0:
            if not self._execute(_EVICT, tenant, response_id, over + most_bytes // SLACK):
                break  # it is alone
        self._room[tenant] = -over // SLACK

    def get(self, tenant: bytes, response_id: bytes) -> bytes | None:
        """See ``Backend``."""
        rows = self._execute(_GET, tenant, response_id)
        return bytes(rows[0][0]) if rows else None

    def delete(self, tenant: bytes, response_id: bytes) -> bool:
        """See ``Backend``."""
        return bool(self._execute(_DELETE, tenant, response_id))

    def _execute(self, statement: str, *values: Any) -> Any:
        """Return the rows that a statement finds, or how many it changes."""
        with self._lock:
            try:
                return self._once(statement, values)
            except self.failures:  # the connection may have gone: once more over a new one
                old, self._database = self._database, None
                with suppress(*self.failures, AttributeError):
                    old.close()
                return self._once(statement, values)

    def _once(self, statement: str, values: tuple[Any, ...]) -> Any:
        if self._database is None:
            self._database = self._connect()
        cursor = self._database.execute(statement.replace("?", self._mark), values)
        return cursor.fetchall() if cursor.description else cursor.rowcount


def sqlite_backend(file: Path, bounds: Bounds) -> SqlBackend:
    """Return the backend of a file, which is made, private, where it is not there. Raises StoreError."""

    def connect() -> sqlite3.Connection:
        database = sqlite3.connect(file, TIMEOUT_S, isolation_level=None, check_same_thread=False)
        database.executescript(
            f"PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA secure_delete = ON; {_TABLES}"
        )
        return database

    backend = SqlBackend(connect, bounds, (sqlite3.Error, OSError))
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        backend.get(b"", b"")
    except backend.failures as error:
        raise StoreError(
            f"cannot keep responses in {file} ({error}); name another responses_file, or set store_responses to false"
        ) from error
    return backend


def postgres_backend(url: str, bounds: Bounds) -> SqlBackend:
    """Return the backend of a Postgres database. Raises ImportError without psycopg."""
    import psycopg

    begin = f"""
    SET synchronous_commit = on; SET statement_timeout = '{TIMEOUT_S}s';
    SELECT pg_advisory_xact_lock(hashtext('stored_responses')); {_TABLES.replace("BLOB", "BYTEA")}
    """  # one transaction: two at once would both make the tables, and one would fail

    def connect() -> Any:
        database = psycopg.connect(
            url, autocommit=True, connect_timeout=TIMEOUT_S, tcp_user_timeout=TIMEOUT_S * 1000, prepare_threshold=None
        )
        database.execute(begin)  # type: ignore[call-overload,unused-ignore]
        return database

    return SqlBackend(connect, bounds, (psycopg.Error, OSError), mark="%s")
