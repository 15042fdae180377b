"""The statements of every database in SQL, and the connection that runs them."""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any

from serve_app.stored.database import RESPONSES, Database, ObjectPlace, StorageLimits

TABLES = """
CREATE TABLE IF NOT EXISTS sealed_responses (
    id BLOB PRIMARY KEY, tenant BLOB NOT NULL, created_s DOUBLE PRECISION NOT NULL, bytes BIGINT NOT NULL,
    data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS sealed_responses_of_tenants ON sealed_responses (tenant, created_s, bytes);
CREATE INDEX IF NOT EXISTS sealed_responses_by_age ON sealed_responses (created_s);
CREATE TABLE IF NOT EXISTS sealed_objects (
    id BLOB PRIMARY KEY, owner BLOB NOT NULL, kind BLOB NOT NULL, expires_s DOUBLE PRECISION NOT NULL,
    bytes BIGINT NOT NULL, data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS sealed_objects_of_owners ON sealed_objects (owner, kind, bytes);
CREATE INDEX IF NOT EXISTS sealed_objects_sums ON sealed_objects (owner, expires_s, bytes);
CREATE INDEX IF NOT EXISTS sealed_objects_by_age ON sealed_objects (expires_s);
"""
_RESPONSES = f"CAST('{RESPONSES.decode()}' AS BLOB)"
SHRINKS = 64
"""The steps after a removal in which the database gives disk back, between which others have the connection."""


class Statements:
    """The statements for one table.

    ``owner``, ``time``: its columns' names; ``kind``: also a column's, "" if it has none, as all rows are responses.
    ``since_s``: the time in a row is so long before its object's end. ``dialect``: from SQLite's to the database's.
    """

    def __init__(
        self, dialect: Callable[[str], str], table: str, owner: str, kind: str, time: str, since_s: float = 0.0
    ) -> None:
        self.since_s = since_s
        self.has_kind = bool(kind)
        columns = [name for name in ("id", owner, kind, time, "bytes", "data") if name]
        names = {
            "table": table,
            "owner": owner,
            "time": time,
            "columns": ", ".join(columns),
            "values": ", ".join("?" * len(columns)),
            "of_kind": f"{owner} = ? AND {kind or _RESPONSES} = ?",
        }

        def sql(statement: str) -> str:
            return dialect(statement.format(**names))

        self.insert = sql("INSERT INTO {table} ({columns}) VALUES ({values}) ON CONFLICT DO NOTHING")
        self.insert_within = sql("""
            INSERT INTO {table} ({columns}) SELECT {values} WHERE
                (SELECT COALESCE(SUM(bytes), 0) FROM {table} WHERE {owner} = ? AND {time} >= ?) <= ?
            ON CONFLICT DO NOTHING
        """)
        self.lapse = sql("""
            DELETE FROM {table}
            WHERE id IN (SELECT id FROM {table} WHERE {time} < ? LIMIT 100) OR (id = ? AND {time} < ?)
        """)
        self.swap = sql("UPDATE {table} SET data = ?, bytes = ? WHERE id = ? AND {owner} = ? AND data = ?")
        self.find = sql("SELECT data FROM {table} WHERE id = ? AND {owner} = ? AND {time} >= ?")
        self.ids = sql("SELECT id FROM {table} WHERE {of_kind} AND {time} >= ?")
        self.read = sql("SELECT id, data FROM {table} WHERE {of_kind} AND {time} >= ?")
        self.remove = sql("DELETE FROM {table} WHERE id = ? AND {owner} = ?")
        self.remove_all = sql("DELETE FROM {table} WHERE {of_kind}")
        self.expire = sql("UPDATE {table} SET {time} = ? WHERE id = ? AND {owner} = ?")
        self.expire_all = sql("UPDATE {table} SET {time} = ? WHERE {of_kind}")
        self.taken = sql("SELECT COALESCE(SUM(bytes), 0) FROM {table} WHERE {owner} = ? AND {time} >= ?")
        self.taken_of_kind = sql("SELECT COALESCE(SUM(bytes), 0) FROM {table} WHERE {of_kind} AND {time} >= ?")
        self.evict = sql("""
            DELETE FROM {table} WHERE id IN (
                SELECT id FROM (
                    SELECT id, SUM(bytes) OVER (ORDER BY {time}, id) - bytes AS older FROM (
                        SELECT id, bytes, {time} FROM {table}
                        WHERE {of_kind} AND id <> ? ORDER BY {time} LIMIT 1000
                    ) AS oldest
                ) AS others
                WHERE older < (SELECT COALESCE(SUM(bytes), 0) FROM {table} WHERE {of_kind}) - ?
            )
        """)


class SqlDatabase(Database):
    """One connection."""

    def __init__(self, limits: StorageLimits, failures: tuple[type[Exception], ...]) -> None:
        self.failures = failures
        self._limits = limits
        self._lock = Lock()
        self._connection: Any = None
        self.objects = Statements(self.dialect, "sealed_objects", "owner", "kind", "expires_s")
        self.responses = Statements(self.dialect, "sealed_responses", "tenant", "", "created_s", limits.ttl_s)

    def dialect(self, statement: str) -> str:
        """Return a statement of SQLite in the form of this database and its driver."""
        return statement

    @abstractmethod
    def connect(self) -> Any:
        """Open a connection to the database, with its tables. Raises one of the ``failures``."""

    def shrink(self, connection: Any) -> bool:
        """Give some of the disk that removed objects had back, and return whether there is more."""
        return False

    def insert(self, at: ObjectPlace, data: bytes, expires_s: float, most_bytes: int | None = None) -> bool:
        """See ``Database``."""
        sql, now_s = self._of(at)
        self._execute(sql.lapse, now_s, at.id, now_s)
        kind = [at.kind] if sql.has_kind else []
        row = at.id, at.owner, *kind, expires_s - sql.since_s, len(data), data
        if most_bytes is None:
            return bool(self._execute(sql.insert, *row))
        return bool(self._execute(sql.insert_within, *row, at.owner, now_s, most_bytes - len(data)))

    def swap(self, at: ObjectPlace, old: bytes, new: bytes) -> bool:
        """See ``Database``."""
        return bool(self._execute(self._of(at)[0].swap, new, len(new), at.id, at.owner, old))

    def find(self, at: ObjectPlace) -> bytes | None:
        """See ``Database``."""
        sql, now_s = self._of(at)
        rows = self._execute(sql.find, at.id, at.owner, now_s)
        return bytes(rows[0][0]) if rows else None

    def ids(self, at: ObjectPlace) -> list[bytes]:
        """See ``Database``."""
        sql, now_s = self._of(at)
        return [bytes(row[0]) for row in self._execute(sql.ids, at.owner, at.kind, now_s)]

    def read(self, at: ObjectPlace) -> list[tuple[bytes, bytes]]:
        """See ``Database``."""
        sql, now_s = self._of(at)
        return [(bytes(row[0]), bytes(row[1])) for row in self._execute(sql.read, at.owner, at.kind, now_s)]

    def remove(self, at: ObjectPlace) -> bool:
        """See ``Database``."""
        sql, _ = self._of(at)
        if at.id:
            return bool(self._execute(sql.remove, at.id, at.owner))
        removed = bool(self._execute(sql.remove_all, at.owner, at.kind))
        for _ in range(SHRINKS if removed else 0):
            with self._lock, suppress(*self.failures):
                if self._connection is not None and self.shrink(self._connection):
                    continue
            break
        return removed

    def expire(self, at: ObjectPlace, expires_s: float) -> None:
        """See ``Database``."""
        sql, _ = self._of(at)
        if at.id:
            self._execute(sql.expire, expires_s - sql.since_s, at.id, at.owner)
        else:
            self._execute(sql.expire_all, expires_s - sql.since_s, at.owner, at.kind)

    def taken(self, at: ObjectPlace) -> int:
        """See ``Database``."""
        sql, now_s = self._of(at)
        if not at.kind:
            return int(self._execute(sql.taken, at.owner, now_s)[0][0])
        return int(self._execute(sql.taken_of_kind, at.owner, at.kind, now_s)[0][0])

    def evict(self, at: ObjectPlace, most_bytes: int) -> int:
        """See ``Database``."""
        of_kind = at.owner, at.kind
        return int(self._execute(self._of(at)[0].evict, *of_kind, at.id, *of_kind, most_bytes))

    def _of(self, at: ObjectPlace) -> tuple[Statements, float]:
        """Return the statements for an object, and the time in its table of what expires now."""
        sql = self.responses if at.kind == RESPONSES else self.objects
        return sql, self._limits.now_s() - sql.since_s

    def _execute(self, statement: str, *values: Any) -> Any:
        """Run a statement as a transaction. Return its rows, or the number of changed rows."""
        with self._lock:
            try:
                return self._once(statement, values)
            except self.failures:  # the connection may be lost: retry once with a new one
                old, self._connection = self._connection, None
                if old is not None:
                    with suppress(*self.failures):
                        old.close()
                return self._once(statement, values)

    def _once(self, statement: str, values: tuple[Any, ...]) -> Any:
        if self._connection is None:
            self._connection = self.connect()
        cursor = self._connection.execute(statement, values)
        return cursor.fetchall() if cursor.description else cursor.rowcount
