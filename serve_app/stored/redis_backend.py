"""Stored responses in Redis: of each tenant a hash of data, a sorted set of times, and a count of bytes."""

from typing import Any

import redis

from serve_app.stored.backend import TIMEOUT_S, Bounds

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
"""With data it puts a response, without any it removes one."""


class RedisBackend:
    """A ``Backend``. What is kept is as durable as the server is set to be (``appendfsync always``)."""

    failures: tuple[type[Exception], ...] = (redis.RedisError, OSError)

    def __init__(self, url: str, bounds: Bounds) -> None:
        self._bounds = bounds
        self._client: Any = redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        self._change = self._client.register_script(_SCRIPT)

    def put(self, tenant: bytes, response_id: bytes, data: bytes) -> None:
        """See ``Backend``."""
        bounds = self._bounds
        self._change(_keys(tenant), [response_id, data, bounds.now_s(), bounds.ttl_s, bounds.max_bytes])

    def get(self, tenant: bytes, response_id: bytes) -> bytes | None:
        """See ``Backend``."""
        found: bytes | None = self._client.hget(_keys(tenant)[0], response_id)
        return found

    def delete(self, tenant: bytes, response_id: bytes) -> bool:
        """See ``Backend``."""
        return bool(self._change(_keys(tenant), [response_id]))


def _keys(tenant: bytes) -> list[str]:
    return [f"stored_responses:{tenant.hex()}:{name}" for name in ("data", "times", "bytes")]
