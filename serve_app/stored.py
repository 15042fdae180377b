"""A tenant's stored responses, files and batches, sealed: a database alone reveals no texts, tenants or ids.

The databases: SQLite or Postgres, with the same statements, or Redis. Any thread may call them, and blocks. If one
cannot be used, a call raises one of its ``failures``.
"""

import asyncio
import hmac
import logging
import os
import re
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from serve_app.errors import Overloaded, RequestTooLarge, ResponseDamaged, StoredByNewerRelease, WarmpathError
from serve_app.fairness.queue import QUANTUM_BYTES, FairWorkers

URL_VARIABLE = "WARMPATH_RESPONSES_URL"
"""The environment variable for a database's URL. It is not a setting, because it may contain a password."""
_URL = re.compile(r"(redis(?=s?:)|postgres(?=(?:ql)?:))\w*://([^@/?#]*@)?([\w.,-]+|\[[\da-fA-F:]+\])(:\d+)?([/?].*)?")
TIMEOUT_S = 5
"""The longest time of a database call."""
SLACK = 16
"""A tenant over its limit is reduced to a sixteenth below it, and each ingress stores a sixteenth of the free bytes
before it checks again. So later responses do not all cost a check or evict others."""

SHRINKS, SHRINK_PAGES = 64, 1000
"""After a removal SQLite's file gives back so many times so many pages of 4 KiB at most."""

_TABLES = """
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
_PUT = "INSERT INTO sealed_responses VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
_USED = "SELECT COALESCE(SUM(bytes), 0) FROM sealed_responses WHERE tenant = ?"
_EVICT = """
DELETE FROM sealed_responses WHERE id IN (
    SELECT id FROM (
        SELECT id, SUM(bytes) OVER (ORDER BY created_s, id) - bytes AS older FROM (
            SELECT id, bytes, created_s FROM sealed_responses WHERE tenant = ? AND id <> ? ORDER BY created_s LIMIT 1000
        ) AS oldest
    ) AS others WHERE older < ?
)
"""
_EXPIRE = "DELETE FROM sealed_responses WHERE id IN (SELECT id FROM sealed_responses WHERE created_s < ? LIMIT 100)"
_GET = "SELECT data FROM sealed_responses WHERE tenant = ? AND id = ?"
_DELETE = "DELETE FROM sealed_responses WHERE tenant = ? AND id = ?"
_INSERT = "INSERT INTO sealed_objects VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
_INSERT_WITHIN = """
INSERT INTO sealed_objects SELECT ?, ?, ?, ?, ?, ? WHERE
    (SELECT COALESCE(SUM(bytes), 0) FROM sealed_objects WHERE owner = ? AND expires_s >= ?) <= ?
ON CONFLICT DO NOTHING
"""
_LAPSE = """
DELETE FROM sealed_objects
WHERE id IN (SELECT id FROM sealed_objects WHERE expires_s < ? LIMIT 100) OR (id = ? AND expires_s < ?)
"""
_SWAP = "UPDATE sealed_objects SET data = ?, bytes = ? WHERE id = ? AND data = ?"
_FIND = "SELECT data FROM sealed_objects WHERE id = ? AND expires_s >= ?"
_LIST = "SELECT id{} FROM sealed_objects WHERE owner = ? AND kind = ? AND expires_s >= ?"
_REMOVE = "DELETE FROM sealed_objects WHERE id = ?"
_CLEAR = "DELETE FROM sealed_objects WHERE owner = ? AND kind = ?"
_EXPIRES = "UPDATE sealed_objects SET expires_s = ? WHERE id = ?"
_ALL_EXPIRE = "UPDATE sealed_objects SET expires_s = ? WHERE owner = ? AND kind = ?"
_TAKEN = "SELECT COALESCE(SUM(bytes), 0) FROM sealed_objects WHERE owner = ? AND expires_s >= ?"

_SCRIPT = """
local id, data, now_s, ttl_s, most_bytes = unpack(ARGV)
local function remove(id)
    redis.call('DECRBY', KEYS[3], redis.call('HSTRLEN', KEYS[1], id))
    redis.call('ZREM', KEYS[2], id)
    return redis.call('HDEL', KEYS[1], id)
end
if not data then return remove(id) end
if redis.call('HSETNX', KEYS[1], id, data) == 1 then
    redis.call('ZADD', KEYS[2], now_s, id)
    redis.call('INCRBY', KEYS[3], #data)
end
while true do
    local oldest, since_s = unpack(redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES'))
    local full = tonumber(redis.call('GET', KEYS[3])) > tonumber(most_bytes)
    if oldest == id or not (full or tonumber(since_s) < now_s - ttl_s) then break end
    remove(oldest)
end
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, math.ceil(ttl_s)) end
"""
"""KEYS: a tenant's hash of data, sorted set of times, and byte count. Without data, the script removes a response."""

_OBJECTS = """
local what, prefix, from, till, value, other, most = unpack(ARGV)
if most then
    local bytes = #value
    for _, name in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
        bytes = bytes + redis.call('STRLEN', prefix .. name)
    end
    if bytes > tonumber(most) then return 0 end
end
if what == 'insert' then
    if not redis.call('SET', prefix .. from, value, 'NX', 'PXAT', other) then return 0 end
    redis.call('ZADD', KEYS[1], 0, from)
    return 1
elseif what == 'swap' then
    if redis.call('GET', prefix .. from) ~= value then return 0 end
    redis.call('SET', prefix .. from, other, 'KEEPTTL')
    return 1
end
local found, bytes = {}, 0
for _, name in ipairs(redis.call('ZRANGEBYLEX', KEYS[1], '[' .. from, till == '' and '+' or '[' .. till)) do
    local length = redis.call('STRLEN', prefix .. name)
    if what == 'remove' then redis.call('DEL', prefix .. name) end
    if what == 'expire' then redis.call('PEXPIREAT', prefix .. name, value) end
    if what == 'remove' or length == 0 then redis.call('ZREM', KEYS[1], name) end
    if length > 0 then
        bytes = bytes + length
        if what ~= 'taken' then found[#found + 1] = name end
        if what == 'read' then found[#found + 1] = redis.call('GET', prefix .. name) end
    end
end
return what == 'taken' and bytes or found
"""
"""KEYS: an owner's sorted set of names, all that it has, by kind. An object has a key of its own, which expires."""


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


class SqlDatabase:
    """One connection. ``connect`` opens and reopens it. ``mark``: the driver's parameter placeholder.

    ``remedy``: returns what to do about a failure that will not pass, else "". ``shrink``: gives some of the disk that
    removed objects had back, and returns whether there is more.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        bounds: StorageLimits,
        failures: tuple[type[Exception], ...],
        mark: str = "?",
        remedy: Callable[[Exception], str] = lambda error: "",
        shrink: Callable[[Any], bool] = lambda connection: False,
    ) -> None:
        self.failures = failures
        self._shrink = shrink
        self.remedy = remedy
        self._connect = connect
        self._bounds = bounds
        self._mark = mark
        self._lock = Lock()
        self._room: dict[bytes, int] = {}  # by tenant: bytes to store before its slow sum is computed again
        self._connection: Any = None

    def put(self, tenant: bytes, response_id: bytes, data: bytes) -> None:
        """Store a response durably. A repeated call has no effect.

        It also removes some responses older than ``ttl_s``, and the oldest others of a tenant over ``max_bytes``.
        """
        now_s, most_bytes = self._bounds.now_s(), self._bounds.max_bytes
        self._execute(_PUT, response_id, tenant, now_s, len(data), data)
        self._execute(_EXPIRE, now_s - self._bounds.ttl_s)
        self._room[tenant] = self._room.get(tenant, 0) - len(data)
        if self._room[tenant] >= 0:
            return
        while (over := int(self._execute(_USED, tenant)[0][0]) - most_bytes) > 0:
            if not self._execute(_EVICT, tenant, response_id, over + most_bytes // SLACK):
                break  # the tenant has no other responses
        self._room[tenant] = -over // SLACK

    def get(self, tenant: bytes, response_id: bytes) -> bytes | None:
        """Return the data of a response, or None if it does not exist."""
        rows = self._execute(_GET, tenant, response_id)
        return bytes(rows[0][0]) if rows else None

    def delete(self, tenant: bytes, response_id: bytes) -> bool:
        """Remove a response, and return whether it existed."""
        return bool(self._execute(_DELETE, tenant, response_id))

    def insert(self, at: ObjectPlace, data: bytes, expires_s: float, most_bytes: int | None = None) -> bool:
        """Store an object durably, unless there is one of its id; return whether it is new. Removes some expired ones.

        ``most_bytes``: also not if its owner's objects would take more. Writers at once do not pass it together; in
        Postgres, by one object each at most. After a lost connection it may be this call's and still not be new.
        """
        now_s = self._bounds.now_s()
        self._execute(_LAPSE, now_s, at.id, now_s)
        row = at.id, at.owner, at.kind, expires_s, len(data), data
        if most_bytes is None:
            return bool(self._execute(_INSERT, *row))
        return bool(self._execute(_INSERT_WITHIN, *row, at.owner, now_s, most_bytes - len(data)))

    def swap(self, at: ObjectPlace, old: bytes, new: bytes) -> bool:
        """Replace an object's data if it is still ``old``; return whether it was."""
        return bool(self._execute(_SWAP, new, len(new), at.id, old))

    def find(self, at: ObjectPlace) -> bytes | None:
        """Return an object's data, None if it does not exist."""
        rows = self._execute(_FIND, at.id, self._bounds.now_s())
        return bytes(rows[0][0]) if rows else None

    def ids(self, at: ObjectPlace) -> list[bytes]:
        """Return the ids of all objects of an owner and kind."""
        return [bytes(row[0]) for row in self._execute(_LIST.format(""), at.owner, at.kind, self._bounds.now_s())]

    def read(self, at: ObjectPlace) -> list[tuple[bytes, bytes]]:
        """Return ids and data of all objects of an owner and kind."""
        rows = self._execute(_LIST.format(", data"), at.owner, at.kind, self._bounds.now_s())
        return [(bytes(row[0]), bytes(row[1])) for row in rows]

    def remove(self, at: ObjectPlace) -> bool:
        """Remove an object, or all of an owner and kind if there is no id; return whether there was one."""
        if at.id:
            return bool(self._execute(_REMOVE, at.id))
        found = bool(self._execute(_CLEAR, at.owner, at.kind))
        for _ in range(SHRINKS if found else 0):
            with self._lock, suppress(*self.failures):  # in steps, between which others have the connection
                if self._connection is not None and self._shrink(self._connection):
                    continue
            break
        return found

    def expire(self, at: ObjectPlace, expires_s: float) -> None:
        """Let an object, or all of an owner and kind if there is no id, live until another time."""
        if at.id:
            self._execute(_EXPIRES, expires_s, at.id)
        else:
            self._execute(_ALL_EXPIRE, expires_s, at.owner, at.kind)

    def taken(self, owner: bytes) -> int:
        """Return the bytes of all objects of an owner."""
        return int(self._execute(_TAKEN, owner, self._bounds.now_s())[0][0])

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
            self._connection = self._connect()
        cursor = self._connection.execute(statement.replace("?", self._mark), values)
        return cursor.fetchall() if cursor.description else cursor.rowcount


class RedisDatabase:
    """Has the methods of ``SqlDatabase``. Durability depends on the server's settings (``appendfsync always``)."""

    def __init__(self, url: str, bounds: StorageLimits) -> None:
        import redis

        self.failures: tuple[type[Exception], ...] = (redis.RedisError, OSError)
        self._bounds = bounds
        self._client: Any = redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        self._change = self._client.register_script(_SCRIPT)
        self._objects = self._client.register_script(_OBJECTS)

    def put(self, tenant: bytes, response_id: bytes, data: bytes) -> None:
        """See ``SqlDatabase``. Removes this tenant's old responses. An inactive tenant's keys expire."""
        bounds = self._bounds
        self._change(_keys(tenant), [response_id, data, bounds.now_s(), bounds.ttl_s, bounds.max_bytes])

    def remedy(self, error: Exception) -> str:
        """See ``SqlDatabase``."""
        return ""

    def get(self, tenant: bytes, response_id: bytes) -> bytes | None:
        """See ``SqlDatabase``."""
        found: bytes | None = self._client.hget(_keys(tenant)[0], response_id)
        return found

    def delete(self, tenant: bytes, response_id: bytes) -> bool:
        """See ``SqlDatabase``."""
        return bool(self._change(_keys(tenant), [response_id]))

    def insert(self, at: ObjectPlace, data: bytes, expires_s: float, most_bytes: int | None = None) -> bool:
        """See ``SqlDatabase``."""
        bound = () if most_bytes is None else (most_bytes,)
        return bool(self._run("insert", at, data, int(expires_s * 1000), *bound))

    def swap(self, at: ObjectPlace, old: bytes, new: bytes) -> bool:
        """See ``SqlDatabase``."""
        return bool(self._run("swap", at, old, new))

    def find(self, at: ObjectPlace) -> bytes | None:
        """See ``SqlDatabase``."""
        found: bytes | None = self._client.get(_prefix(at.owner) + at.kind + at.id)
        return found

    def ids(self, at: ObjectPlace) -> list[bytes]:
        """See ``SqlDatabase``."""
        return [name[len(at.kind) :] for name in self._run("ids", at._replace(id=b""))]

    def read(self, at: ObjectPlace) -> list[tuple[bytes, bytes]]:
        """See ``SqlDatabase``."""
        found = iter(self._run("read", at._replace(id=b"")))
        return [(name[len(at.kind) :], data) for name, data in zip(found, found, strict=True)]

    def remove(self, at: ObjectPlace) -> bool:
        """See ``SqlDatabase``."""
        return bool(self._run("remove", at))

    def expire(self, at: ObjectPlace, expires_s: float) -> None:
        """See ``SqlDatabase``."""
        self._run("expire", at, int(expires_s * 1000))

    def taken(self, owner: bytes) -> int:
        """See ``SqlDatabase``."""
        return int(self._run("taken", ObjectPlace(owner, b"")))

    def _run(self, what: str, at: ObjectPlace, *values: Any) -> Any:
        first = at.kind + at.id
        last = first if at.id else first and first + b"\xff" * 33
        return self._objects([_prefix(at.owner)], [what, _prefix(at.owner), first, last, *values])


Database = SqlDatabase | RedisDatabase


def open_database(url: str | None, file: Path, bounds: StorageLimits) -> Database:
    """Return the database at a URL, connected on first use, or else the SQLite ``file``.

    Raises StoreError for an invalid URL, a missing client library, or an unusable file.
    """
    if not url:
        return _sqlite(file, bounds)
    if (match := _URL.fullmatch(url)) is None:
        raise StoreError(
            f"${URL_VARIABLE} must be redis://HOST, rediss://HOST or postgresql://HOST/DATABASE, with user and "
            "password percent-encoded before an @"
        )
    try:
        return RedisDatabase(url, bounds) if match[1] == "redis" else _postgres(url, bounds)
    except ImportError as error:
        raise StoreError(f"${URL_VARIABLE} needs a client library: pip install '.[{match[1]}]'") from error


def _sqlite(file: Path, bounds: StorageLimits) -> SqlDatabase:
    """Return the database of a file, created as private if missing. Raises StoreError."""

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(file, TIMEOUT_S, isolation_level=None, check_same_thread=False)
        connection.executescript(
            "PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL; PRAGMA journal_size_limit = 4194304; "
            f"PRAGMA synchronous = FULL; PRAGMA secure_delete = ON; {_TABLES}"
        )
        return connection

    def free(connection: sqlite3.Connection) -> int:
        return int(connection.execute("PRAGMA freelist_count").fetchone()[0])

    def shrink(connection: sqlite3.Connection) -> bool:
        before = free(connection)
        connection.executescript(f"PRAGMA incremental_vacuum({SHRINK_PAGES})")
        return 0 < free(connection) < before  # a file of an earlier release only reuses them

    def remedy(error: Exception) -> str:
        # Its subclasses mean a busy, full or missing file.
        damaged = type(error) is sqlite3.DatabaseError
        return f"{file} is damaged; stop the server, and move it away with {file}-wal and -shm" if damaged else ""

    database = SqlDatabase(connect, bounds, (sqlite3.Error, OSError), remedy=remedy, shrink=shrink)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        database.get(b"", b"")
    except database.failures as error:
        raise StoreError(
            f"cannot keep responses in {file} ({error}); name another responses_file, or set store_responses to false"
        ) from error
    return database


def _postgres(url: str, bounds: StorageLimits) -> SqlDatabase:
    import psycopg

    begin = f"""
    SET synchronous_commit = on; SET statement_timeout = '{TIMEOUT_S}s';
    SELECT pg_advisory_xact_lock(hashtext('stored_responses')); {_TABLES.replace("BLOB", "BYTEA")}
    """  # one transaction under a lock, because two at once would both create the tables, and one would fail

    def connect() -> Any:
        connection = psycopg.connect(
            url, autocommit=True, connect_timeout=TIMEOUT_S, tcp_user_timeout=TIMEOUT_S * 1000, prepare_threshold=None
        )
        connection.execute(begin)
        return connection

    return SqlDatabase(connect, bounds, (psycopg.Error, OSError), mark="%s")


def _keys(tenant: bytes) -> list[str]:
    return [f"stored_responses:{tenant.hex()}:{name}" for name in ("data", "times", "bytes")]


def _prefix(owner: bytes) -> bytes:
    return b"stored_objects:" + owner.hex().encode() + b":"


logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

STORE_TIMEOUT_S = 15.0
"""The longest that a request waits for the database."""
_NONCE_BYTES = 12


MAX_TOLD = 1000
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


class Document(msgspec.Struct):
    """A stored response as sent to clients. ``input``: the items of the whole conversation before it."""

    input: list[dict[str, Any]]
    response: dict[str, Any]


class _Sealed:
    """What is stored under names and keys that follow from the secret. ``_what``: its name; ``_else``: a remedy."""

    _label = "stored responses"
    _what = "responses"
    _else = "send store: false"

    def __init__(self, database: Database, secret: bytes, workers: FairWorkers, bounds: StorageLimits) -> None:
        self._database = database
        self._secret = secret
        self._workers = workers
        self._bounds = bounds
        # Most calls derive the names of an owner and a kind again, on the loop that answers requests.
        self._derived = lru_cache(1024)(self._derive)

    def _derive(self, *fields: str) -> bytes:  # only the last field may hold a NUL
        message = "\0".join((self._label, *fields)).encode("utf-8", "surrogatepass")
        return hmac.digest(self._secret, message, "sha256")

    async def _run(self, tenant: str, work: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                return await self._workers.run(tenant, QUANTUM_BYTES, work)
        except self._database.failures as error:  # includes OSError, and therefore TimeoutError
            if remedy := self._database.remedy(error):
                logger.exception("no %s are stored: %s", self._what, remedy)
                message = f"The storage of {self._what} is damaged; {self._else} until its operator has replaced it."
                raise Overloaded(message, code="response_store_damaged") from error
            logger.exception("stored %s cannot be reached", self._what)
            message = f"Stored {self._what} cannot be reached now; send the request again later, or {self._else}."
            raise Overloaded(message, code="response_store_unavailable", retry_after_s=5) from error


class StoredObjects(_Sealed):
    """All tenants' files and batches, by kind and name. Without a tenant, "": the deployment's own.

    ``max_bytes`` of the bounds holds for what is stored as ``bounded``.
    """

    _label = "stored objects"
    _what = "files and batches"
    _else = "ask without them"

    def __init__(self, database: Database, secret: bytes, workers: FairWorkers, bounds: StorageLimits) -> None:
        super().__init__(database, secret, workers, bounds)
        self._told: set[bytes] = set()
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

        def found() -> set[str]:
            if not (ids := set(self._database.ids(self._at(tenant, kind)))):
                return set()
            return {name for name in names if self._derive("object", tenant, kind, name) in ids}

        return await self._run(tenant, found)

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
            found, whole = list[T](), True
            for one, data in self._database.read(at):
                with suppress(ResponseDamaged):
                    value = self._opened(tenant, at._replace(id=one), data)
                    try:
                        found.append(decoded(value, type))
                    except StoredByNewerRelease as error:
                        whole = False
                        self._left_out(one, kind, error)
            return work(found, whole)

        return await self._run(tenant, read)

    def _left_out(self, one: bytes, kind: str, error: WarmpathError) -> None:
        if one in self._told:
            return
        if len(self._told) >= MAX_TOLD:
            self._told.clear()
        self._told.add(one)
        logger.warning("a stored %s cannot be read, and is left out: %s", kind, error.message)

    async def all(self, tenant: str, kind: str) -> list[bytes]:
        """Return all objects of a kind, in no order, without damaged ones. Raises Overloaded."""
        at = self._at(tenant, kind)

        def read() -> list[bytes]:
            found = []
            for one, data in self._database.read(at):
                with suppress(ResponseDamaged):
                    found.append(self._opened(tenant, at._replace(id=one), data))
            return found

        return await self._run(tenant, read)

    async def remove(self, tenant: str, kind: str, name: str | None = None) -> bool:
        """Remove an object, None: all of a kind; return whether there was one. Raises Overloaded."""
        return await self._run(tenant, lambda: self._database.remove(self._at(tenant, kind, name)))

    async def taken(self, tenant: str) -> int:
        """Return the bytes of a tenant's objects, as they are stored. Raises Overloaded."""
        return await self._run(tenant, lambda: self._database.taken(self._at(tenant, "").owner))

    def _at(self, tenant: str, kind: str, name: str | None = None) -> ObjectPlace:
        own = b"" if name is None else self.id_of(tenant, kind, name)
        return ObjectPlace(self._derived("owner", tenant), self._derived("kind", tenant, kind), own)

    def _cipher(self, tenant: str, at: ObjectPlace) -> AESGCM:
        return AESGCM(self._derived("key", tenant, at.kind.hex()))

    def _sealed(self, tenant: str, at: ObjectPlace, value: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher(tenant, at).encrypt(nonce, zlib.compress(value, 1), at.id)

    def _opened(self, tenant: str, at: ObjectPlace, data: bytes) -> bytes:
        try:
            return zlib.decompress(self._cipher(tenant, at).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], at.id))
        except (InvalidTag, ValueError, zlib.error) as error:
            logger.error("a stored file or batch is damaged: %r", error)
            raise ResponseDamaged("What is stored here is damaged; delete it, and send it again.") from error


class StoredResponses(_Sealed):
    """All tenants' responses. A lookup needs tenant and id, so another tenant's id does not exist."""

    async def put(self, tenant: str, document: Document) -> None:
        """Store a response durably. Raises Overloaded, and RequestTooLarge for one over the limit."""

        def put() -> None:
            nonce, (owner, name, cipher) = os.urandom(_NONCE_BYTES), self._place(tenant, document.response["id"])
            data = nonce + cipher.encrypt(nonce, zlib.compress(msgspec.json.encode(document), 1), None)
            if len(data) > self._bounds.max_bytes:
                raise RequestTooLarge("The response exceeds the storage limit of a tenant; send store: false.")
            self._database.put(owner, name, data)

        await self._run(tenant, put)

    async def get(self, tenant: str, response_id: str) -> tuple[Document, int] | None:
        """Return a response and its size in bytes as JSON, or None if it does not exist.

        Raises Overloaded and ResponseDamaged.
        """

        def get() -> tuple[Document, int] | None:
            owner, name, cipher = self._place(tenant, response_id)
            data = self._database.get(owner, name)
            if data is None:
                return None
            try:
                plain = zlib.decompress(cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], None))
                document = msgspec.json.decode(plain, type=Document)
            except (InvalidTag, ValueError, zlib.error, msgspec.MsgspecError) as error:
                logger.error("a stored response is damaged: %r", error)
                message = "This stored response is damaged; delete it, and send the whole conversation as input."
                raise ResponseDamaged(message) from error
            old = document.response["created_at"] < self._bounds.now_s() - self._bounds.ttl_s
            return None if old else (document, len(plain))

        return await self._run(tenant, get)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Remove a response, and return whether it existed. Raises Overloaded."""
        return await self._run(tenant, lambda: self._database.delete(*self._place(tenant, response_id)[:2]))

    def _place(self, tenant: str, response_id: str) -> tuple[bytes, bytes, AESGCM]:
        """Return the database names of a tenant and its response, and the cipher of only this response."""
        own = tenant, response_id
        derived = self._derived
        return derived("tenant", tenant), derived("response", *own), AESGCM(derived("key", *own))
