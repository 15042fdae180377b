"""A file of SQLite, for ingresses on one machine."""

import os
import sqlite3
from pathlib import Path

from serve_app.stored.database import TIMEOUT_S, ObjectPlace, StorageLimits, StoreError
from serve_app.stored.sql import TABLES, SqlDatabase

SHRINK_PAGES = 1000
"""After a removal the file gives back so many pages of 4 KiB in each step, at most."""


def open_file(file: Path, limits: StorageLimits) -> "SqliteFile":
    """Return the database of a file, created as private if missing. Raises StoreError."""
    database = SqliteFile(file, limits)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        database.find(ObjectPlace(b"", b"", b""))
    except database.failures as error:
        raise StoreError(
            f"cannot keep responses in {file} ({error}); name another responses_file, or set store_responses to false"
        ) from error
    return database


class SqliteFile(SqlDatabase):
    """Every change is on disk before it is acknowledged."""

    def __init__(self, file: Path, limits: StorageLimits) -> None:
        super().__init__(limits, (sqlite3.Error, OSError))
        self._file = file

    def connect(self) -> sqlite3.Connection:
        """See ``SqlDatabase``."""
        connection = sqlite3.connect(self._file, TIMEOUT_S, isolation_level=None, check_same_thread=False)
        connection.executescript(
            "PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL; PRAGMA journal_size_limit = 4194304; "
            f"PRAGMA synchronous = FULL; PRAGMA secure_delete = ON; {TABLES}"
        )
        return connection

    def shrink(self, connection: sqlite3.Connection) -> bool:
        """See ``SqlDatabase``."""
        before = _free_pages(connection)
        connection.executescript(f"PRAGMA incremental_vacuum({SHRINK_PAGES})")
        return 0 < _free_pages(connection) < before  # a file of an earlier release only reuses them

    def remedy(self, error: Exception) -> str:
        """See ``Database``."""
        # Its subclasses mean a busy, full or missing file.
        damaged, file = type(error) is sqlite3.DatabaseError, self._file
        return f"{file} is damaged; stop the server, and move it away with {file}-wal and -shm" if damaged else ""


def _free_pages(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA freelist_count").fetchone()[0])
