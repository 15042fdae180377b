"""Stored responses in SQLite or Postgres, by the same statements."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from serve_app.stored.backend import Bounds, StoreError

T = TypeVar("T")
TIMEOUT_S = 5

_TABLES = """
CREATE TABLE IF NOT EXISTS stored_responses (
    id BLOB PRIMARY KEY, tenant BLOB NOT NULL, created_s DOUBLE PRECISION NOT NULL, data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS stored_responses_by_age ON stored_responses (tenant, created_s);
CREATE TABLE IF NOT EXISTS stored_bytes (tenant BLOB PRIMARY KEY, bytes BIGINT NOT NULL)
"""
_CHARGE = """
INSERT INTO stored_bytes VALUES (?, ?) ON CONFLICT (tenant) DO UPDATE SET bytes = stored_bytes.bytes + excluded.bytes
"""
_USED = "SELECT bytes FROM stored_bytes WHERE tenant = ?"
_PUT = "INSERT INTO stored_responses VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
_GET = "SELECT data FROM stored_responses WHERE tenant = ? AND id = ?"
_FIND = "SELECT id, length(data) FROM stored_responses WHERE tenant = ? AND id = ?"
_OLDEST = """
SELECT id, length(data) FROM stored_responses WHERE tenant = ? AND id <> ? AND (created_s < ? OR ?)
ORDER BY created_s LIMIT 1
"""
_DELETE = "DELETE FROM stored_responses WHERE id = ?"


class SqlBackend:
    """A ``Backend`` over one connection, which ``connect`` makes, committing each statement, and makes again.

    ``begin``: the statement that begins a transaction; ``mark``: the driver's mark of a parameter.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        bounds: Bounds,
        failures: tuple[type[Exception], ...],
        begin: str = "BEGIN IMMEDIATE",
        mark: str = "?",
    ) -> None:
        self.failures = failures
        self._connect = connect
        self._bounds = bounds
        self._begin = begin
        self._mark = mark
        self._lock = Lock()
        self._database: Any = None

    def put(self, tenant: bytes, response_id: bytes, data: bytes) -> None:
        """See ``Backend``. A second time it changes nothing."""

        def work() -> None:
            self._charge(tenant, 0)  # holds other writers of this tenant off until the commit
            added = self._execute(_PUT, response_id, tenant, self._bounds.now_s(), data).rowcount
            self._evict(tenant, response_id, self._charge(tenant, added * len(data)))

        self._run(work)

    def get(self, tenant: bytes, response_id: bytes) -> bytes | None:
        """See ``Backend``."""
        row = self._run(lambda: self._execute(_GET, tenant, response_id).fetchone(), writes=False)
        return None if row is None else bytes(row[0])

    def delete(self, tenant: bytes, response_id: bytes) -> bool:
        """See ``Backend``."""

        def work() -> bool:
            self._charge(tenant, 0)
            row = self._execute(_FIND, tenant, response_id).fetchone()
            if row is not None:
                self._remove(tenant, *row)
            return row is not None

        return self._run(work)

    def expire(self) -> None:
        """See ``Backend``."""
        tenants = self._run(lambda: self._execute("SELECT tenant FROM stored_bytes").fetchall(), writes=False)
        for (tenant,) in tenants:
            self._run(lambda tenant=tenant: self._evict(tenant, b"", self._charge(tenant, 0)))  # type: ignore[misc]

    def _charge(self, tenant: bytes, size_bytes: int) -> int:
        """Count bytes of a tenant's; returns how many it has."""
        self._execute(_CHARGE, tenant, size_bytes)
        return int(self._execute(_USED, tenant).fetchone()[0])

    def _remove(self, tenant: bytes, response_id: bytes, size_bytes: int) -> int:
        """Remove a response that is there; returns how many bytes its tenant has then."""
        self._execute(_DELETE, response_id)
        return self._charge(tenant, -size_bytes)

    def _evict(self, tenant: bytes, keep: bytes, used_bytes: int) -> None:
        """Remove what is too old, and the oldest while there is too much."""
        before_s, most_bytes = self._bounds.now_s() - self._bounds.ttl_s, self._bounds.max_bytes
        while row := self._execute(_OLDEST, tenant, keep, before_s, used_bytes > most_bytes).fetchone():
            used_bytes = self._remove(tenant, *row)

    def _execute(self, statement: str, *values: Any) -> Any:
        return self._database.execute(statement.replace("?", self._mark), values)

    def _run(self, work: Callable[[], T], *, writes: bool = True) -> T:
        """Do it in a transaction; once more over a new connection, for the old one may have gone."""
        with self._lock:
            with suppress(*self.failures):
                return self._once(work, writes)
            return self._once(work, writes)

    def _once(self, work: Callable[[], T], writes: bool) -> T:
        try:
            if self._database is None:
                self._database = self._connect()
            if not writes:
                return work()
            self._database.execute(self._begin)
            done = work()
            self._database.execute("COMMIT")
        except BaseException:
            broken, self._database = self._database, None
            if broken is not None:
                with suppress(*self.failures):
                    broken.close()  # what was not committed is undone
            raise
        return done


def sqlite_backend(file: Path, bounds: Bounds) -> SqlBackend:
    """Return the backend of a file, which is made, private, where it is not there. Raises StoreError."""

    def connect() -> sqlite3.Connection:
        database = sqlite3.connect(file, TIMEOUT_S, isolation_level=None, check_same_thread=False)
        for statement in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
            database.execute(f"PRAGMA {statement}")
        return database

    backend = SqlBackend(connect, bounds, (sqlite3.Error, OSError))
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        backend._run(lambda: [backend._execute(statement) for statement in _TABLES.split(";")])
    except backend.failures as error:
        raise StoreError(
            f"cannot keep responses in {file} ({error}); name another responses_file, or set store_responses to false"
        ) from error
    return backend


def postgres_backend(url: str, bounds: Bounds) -> SqlBackend:
    """Return the backend of a Postgres database. Raises ImportError without psycopg."""
    import psycopg

    def connect() -> Any:
        database = psycopg.connect(
            url, autocommit=True, connect_timeout=TIMEOUT_S, tcp_user_timeout=TIMEOUT_S * 1000, prepare_threshold=None
        )
        try:
            database.execute("SET synchronous_commit = on")
            database.execute(f"SET statement_timeout = '{TIMEOUT_S}s'")
            with database.transaction():  # two at once would both make the tables, and one would fail
                database.execute("SELECT pg_advisory_xact_lock(hashtext('stored_responses'))")
                database.execute(_TABLES.replace("BLOB", "BYTEA"))
        except BaseException:
            database.close()
            raise
        return database

    return SqlBackend(connect, bounds, (psycopg.Error, OSError), begin="BEGIN", mark="%s")
