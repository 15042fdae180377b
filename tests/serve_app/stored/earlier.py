"""Responses as releases kept them before they were objects, word for word; such a process may run beside a new one."""

import sqlite3
from pathlib import Path
from typing import Any

from serve_app.stored.database import StorageLimits

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


class EarlierSql:
    """The calls of an earlier release in SQLite or Postgres."""

    def __init__(self, url: str | None, file: Path, limits: StorageLimits) -> None:
        self._limits = limits
        if url is None:
            self._connection: Any = sqlite3.connect(file, isolation_level=None)
            self._connection.executescript(_TABLES)
        else:
            import psycopg

            self._connection = psycopg.connect(url, autocommit=True)
            self._connection.execute(_TABLES.replace("BLOB", "BYTEA"))
        self._mark = "?" if url is None else "%s"

    def put(self, owner: bytes, name: bytes, data: bytes) -> None:
        now_s, most_bytes = self._limits.now_s(), self._limits.max_bytes
        self._execute(_PUT, name, owner, now_s, len(data), data)
        self._execute(_EXPIRE, now_s - self._limits.ttl_s)
        while (over := int(self._execute(_USED, owner)[0][0]) - most_bytes) > 0:
            if not self._execute(_EVICT, owner, name, over + most_bytes // 16):
                break

    def get(self, owner: bytes, name: bytes) -> bytes | None:
        rows = self._execute(_GET, owner, name)
        return bytes(rows[0][0]) if rows else None

    def delete(self, owner: bytes, name: bytes) -> bool:
        return bool(self._execute(_DELETE, owner, name))

    def _execute(self, statement: str, *values: Any) -> Any:
        cursor = self._connection.execute(statement.replace("?", self._mark), values)
        return cursor.fetchall() if cursor.description else cursor.rowcount


class EarlierRedis:
    """The calls of an earlier release in Redis."""

    def __init__(self, url: str, limits: StorageLimits) -> None:
        import redis

        self._limits = limits
        self._client: Any = redis.Redis.from_url(url)
        self._change = self._client.register_script(_SCRIPT)

    def put(self, owner: bytes, name: bytes, data: bytes) -> None:
        limits = self._limits
        self._change(_keys(owner), [name, data, limits.now_s(), limits.ttl_s, limits.max_bytes])

    def get(self, owner: bytes, name: bytes) -> bytes | None:
        data: bytes | None = self._client.hget(_keys(owner)[0], name)
        return data

    def delete(self, owner: bytes, name: bytes) -> bool:
        return bool(self._change(_keys(owner), [name]))


def _keys(owner: bytes) -> list[str]:
    return [f"stored_responses:{owner.hex()}:{name}" for name in ("data", "times", "bytes")]


def earlier(url: str | None, file: Path, limits: StorageLimits) -> EarlierSql | EarlierRedis:
    """Return an earlier release's connection to a database, which it makes if there is none."""
    return EarlierRedis(url, limits) if url and url.startswith("redis") else EarlierSql(url, file, limits)
