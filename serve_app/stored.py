"""A tenant's stored responses, sealed: without the secret, a database reveals no texts, tenants or ids.

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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from serve_app.errors import Overloaded, RequestTooLarge, ResponseDamaged
from serve_app.fairness.queue import QUANTUM_BYTES, FairWorkers

URL_VARIABLE = "WARMPATH_RESPONSES_URL"
"""The environment variable for a database's URL. It is not a setting, because it may contain a password."""
_URL = re.compile(r"(redis(?=s?:)|postgres(?=(?:ql)?:))\w*://([^@/?#]*@)?([\w.,-]+|\[[\da-fA-F:]+\])(:\d+)?([/?].*)?")
TIMEOUT_S = 5
"""The longest time of a database call."""
SLACK = 16
"""A tenant over its limit is reduced to a sixteenth below it, and each ingress stores a sixteenth of the free bytes
before it checks again. So later responses do not all cost a check or evict others."""

_TABLES = """
CREATE TABLE IF NOT EXISTS sealed_responses (
    id BLOB PRIMARY KEY, tenant BLOB NOT NULL, created_s DOUBLE PRECISION NOT NULL, bytes BIGINT NOT NULL,
    data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS sealed_responses_of_tenants ON sealed_responses (tenant, created_s, bytes);
CREATE INDEX IF NOT EXISTS sealed_responses_by_age ON sealed_responses (created_s);
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


class StoreError(ValueError):
    """Responses cannot be stored with these settings. The message contains the remedy, but no part of a URL."""


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """The limits of storage: ``ttl_s`` of each response, ``max_bytes`` of each tenant. ``now_s``: since 1970."""

    ttl_s: float
    max_bytes: int
    now_s: Callable[[], float] = time.time


class SqlDatabase:
    """One connection. ``connect`` opens and reopens it. ``mark``: the driver's parameter placeholder.

    ``remedy``: returns what to do about a failure that will not pass, else "".
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        bounds: StorageLimits,
        failures: tuple[type[Exception], ...],
        mark: str = "?",
        remedy: Callable[[Exception], str] = lambda error: "",
    ) -> None:
        self.failures = failures
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
            f"PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA secure_delete = ON; {_TABLES}"
        )
        return connection

    def remedy(error: Exception) -> str:
        # Its subclasses mean a busy, full or missing file.
        damaged = type(error) is sqlite3.DatabaseError
        return f"{file} is damaged; stop the server, and move it away with {file}-wal and -shm" if damaged else ""

    database = SqlDatabase(connect, bounds, (sqlite3.Error, OSError), remedy=remedy)
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


logger = logging.getLogger(__name__)

T = TypeVar("T")

STORE_TIMEOUT_S = 15.0
"""The longest that a request waits for the database."""
_NONCE_BYTES = 12


class Document(msgspec.Struct):
    """A stored response as sent to clients. ``input``: the items of the whole conversation before it."""

    input: list[dict[str, Any]]
    response: dict[str, Any]


class StoredResponses:
    """All tenants' responses. A lookup needs tenant and id, so another tenant's id does not exist."""

    def __init__(self, database: Database, secret: bytes, workers: FairWorkers, bounds: StorageLimits) -> None:
        self._database = database
        self._secret = secret
        self._workers = workers
        self._bounds = bounds

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

        def derived(*fields: str) -> bytes:  # only the last field may hold a NUL
            message = "\0".join(("stored responses", *fields)).encode("utf-8", "surrogatepass")
            return hmac.digest(self._secret, message, "sha256")

        own = tenant, response_id
        return derived("tenant", tenant), derived("response", *own), AESGCM(derived("key", *own))

    async def _run(self, tenant: str, work: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                return await self._workers.run(tenant, QUANTUM_BYTES, work)
        except self._database.failures as error:  # includes OSError, and therefore TimeoutError
            if remedy := self._database.remedy(error):
                logger.exception("no responses are stored: %s", remedy)
                message = "The storage of responses is damaged; send store: false until its operator has replaced it."
                raise Overloaded(message, code="response_store_damaged") from error
            logger.exception("stored responses cannot be reached")
            message = "Stored responses cannot be reached now; send the request again later, or with store: false."
            raise Overloaded(message, code="response_store_unavailable", retry_after_s=5) from error
