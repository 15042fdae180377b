"""Stored responses in Redis: of each tenant a hash of data, a sorted set of times, and a count of bytes."""

from typing import Any

import redis

from serve_app.stored.backend import Bounds

TIMEOUT_S = 5

_REMOVE = """
local function remove(id)
    local size = redis.call('HSTRLEN', KEYS[1], id)
    redis.call('ZREM', KEYS[2], id)
    redis.call('DECRBY', KEYS[3], size)
    return redis.call('HDEL', KEYS[1], id)
end
"""
_DELETE = _REMOVE + "return remove(ARGV[1])"
_PUT = (
    _REMOVE
    + """
local id, data = ARGV[1], ARGV[2]
local now_s, ttl_s, most_bytes = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
if redis.call('HSETNX', KEYS[1], id, data) == 1 then
    redis.call('ZADD', KEYS[2], ARGV[3], id)
    redis.call('INCRBY', KEYS[3], #data)
end
while true do
    local oldest = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
    local old = tonumber(oldest[2]) < now_s - ttl_s
    if oldest[1] == id or not (old or tonumber(redis.call('GET', KEYS[3])) > most_bytes) then break end
    remove(oldest[1])
end
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, math.ceil(ttl_s)) end
"""
)


class RedisBackend:
    """A ``Backend``. What is kept is as durable as the server is set to be (``appendfsync always``)."""

    failures: tuple[type[Exception], ...] = (redis.RedisError, OSError)

    def __init__(self, url: str, bounds: Bounds) -> None:
        self._bounds = bounds
        self._client: Any = redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        self._put = self._client.register_script(_PUT)
        self._delete = self._client.register_script(_DELETE)

    def put(self, tenant: bytes, response_id: bytes, data: bytes) -> None:
        """See ``Backend``."""
        bounds = self._bounds
        self._put(_keys(tenant), [response_id, data, bounds.now_s(), bounds.ttl_s, bounds.max_bytes])

    def get(self, tenant: bytes, response_id: bytes) -> bytes | None:
        """See ``Backend``."""
        found: bytes | None = self._client.hget(_keys(tenant)[0], response_id)
        return found

    def delete(self, tenant: bytes, response_id: bytes) -> bool:
        """See ``Backend``."""
        return bool(self._delete(_keys(tenant), [response_id]))


def _keys(tenant: bytes) -> list[str]:
    return [f"stored_responses:{tenant.hex()}:{name}" for name in ("data", "times", "bytes")]
