"""Redis. Durability depends on the server's settings (``appendfsync always``)."""

from typing import Any

from serve_app.stored.database import RESPONSES, TIMEOUT_S, Database, DatabaseServer, ObjectPlace, StorageLimits

_OBJECTS = """
local what, prefix, first, last, now_s, ttl_s, value, other, most = unpack(ARGV)
local function names() return redis.call('ZRANGEBYLEX', KEYS[1], '[' .. first, last == '' and '+' or '[' .. last) end
local function get(name) return redis.call('GET', prefix .. name) end
local function length(name) return redis.call('STRLEN', prefix .. name) end
local function replace(name, data) redis.call('SET', prefix .. name, data, 'KEEPTTL') end
local function expire(name, end_ms) redis.call('PEXPIREAT', prefix .. name, end_ms) end
local function remove(name)
    local bytes = length(name)
    redis.call('DEL', prefix .. name)
    redis.call('ZREM', KEYS[1], name)
    return bytes
end
local function add(name, data, end_ms)
    if not redis.call('SET', prefix .. name, data, 'NX', 'PXAT', end_ms) then return false end
    redis.call('ZADD', KEYS[1], 0, name)
    return true
end
local function taken(names)
    local bytes = 0
    for _, name in ipairs(names) do
        local own = length(name)
        if own == 0 then remove(name) end
        bytes = bytes + own
    end
    return bytes
end
local function everything() return taken(redis.call('ZRANGE', KEYS[1], 0, -1)) end
local function of_kind() return taken(names()) end
local function oldest()
    local found, left_ms = names(), {}
    for _, name in ipairs(found) do left_ms[name] = redis.call('PTTL', prefix .. name) end
    table.sort(found, function(one, two) return left_ms[one] < left_ms[two] end)
    return found
end
"""
"""KEYS: an owner's sorted set of names, all that it has, by kind. An object has a key of its own, which expires."""

_RESPONSES = """
local what, prefix, first, last, now_s, ttl_s, value, other, most = unpack(ARGV)
local function names() return first ~= '' and {first} or redis.call('ZRANGE', KEYS[2], 0, -1) end
local function length(name)
    local since_s = redis.call('ZSCORE', KEYS[2], name)
    return since_s and tonumber(since_s) >= now_s - ttl_s and redis.call('HSTRLEN', KEYS[1], name) or 0
end
local function get(name) return length(name) > 0 and redis.call('HGET', KEYS[1], name) end
local function replace(name, data)
    redis.call('INCRBY', KEYS[3], #data - redis.call('HSTRLEN', KEYS[1], name))
    redis.call('HSET', KEYS[1], name, data)
end
local function expire(name, end_ms) redis.call('ZADD', KEYS[2], 'XX', end_ms / 1000 - ttl_s, name) end
local function remove(name)
    local bytes = redis.call('HSTRLEN', KEYS[1], name)
    if bytes > 0 then
        redis.call('DECRBY', KEYS[3], bytes)
        redis.call('ZREM', KEYS[2], name)
        redis.call('HDEL', KEYS[1], name)
    end
    return bytes
end
local function add(name, data, end_ms)
    local over = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. now_s - ttl_s, 'LIMIT', 0, 100)
    for _, old in ipairs(over) do remove(old) end
    if length(name) == 0 then remove(name) end
    if redis.call('HSETNX', KEYS[1], name, data) == 0 then return false end
    redis.call('ZADD', KEYS[2], end_ms / 1000 - ttl_s, name)
    redis.call('INCRBY', KEYS[3], #data)
    for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, math.ceil(ttl_s)) end
    return true
end
local function everything() return tonumber(redis.call('GET', KEYS[3]) or 0) end
local of_kind = everything
local function oldest() return redis.call('ZRANGE', KEYS[2], 0, 999) end
"""
"""KEYS: an owner's hash of data, sorted set of times of storage, and byte count, which expire without new ones."""

_SCRIPT = """
if what == 'insert' then
    if most and everything() + #value > tonumber(most) then return 0 end
    return add(first, value, other) and 1 or 0
elseif what == 'swap' then
    if get(first) ~= value then return 0 end
    replace(first, other)
    return 1
elseif what == 'find' then return get(first)
elseif what == 'taken' then return last == '' and everything() or of_kind()
elseif what == 'evict' then
    local bytes, evicted = of_kind(), 0
    for _, name in ipairs(oldest()) do
        if bytes <= tonumber(value) then break end
        if name ~= other then
            bytes = bytes - remove(name)
            evicted = evicted + 1
        end
    end
    return evicted
end
local found = {}
for _, name in ipairs(names()) do
    local bytes = length(name)
    if bytes > 0 then
        found[#found + 1] = name
        if what == 'read' then found[#found + 1] = get(name) end
    end
    if what == 'remove' or bytes == 0 then remove(name) end
    if what == 'expire' and bytes > 0 then expire(name, value) end
end
return found
"""


class Redis(Database):
    """A script for all changes, over two forms of keys: see ``RESPONSES``."""

    def __init__(self, url: str, limits: StorageLimits) -> None:
        import redis

        self.failures = redis.RedisError, OSError
        self._limits = limits
        client: Any = redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        self._objects = client.register_script(_OBJECTS + _SCRIPT)
        self._responses = client.register_script(_RESPONSES + _SCRIPT)

    def insert(self, at: ObjectPlace, data: bytes, expires_s: float, most_bytes: int | None = None) -> bool:
        """See ``Database``."""
        most = () if most_bytes is None else (most_bytes,)
        return bool(self._run("insert", at, data, int(expires_s * 1000), *most))

    def swap(self, at: ObjectPlace, old: bytes, new: bytes) -> bool:
        """See ``Database``."""
        return bool(self._run("swap", at, old, new))

    def find(self, at: ObjectPlace) -> bytes | None:
        """See ``Database``."""
        data: bytes | None = self._run("find", at)
        return data

    def ids(self, at: ObjectPlace) -> list[bytes]:
        """See ``Database``."""
        return [_id_of(at, name) for name in self._run("ids", at._replace(id=b""))]

    def read(self, at: ObjectPlace) -> list[tuple[bytes, bytes]]:
        """See ``Database``."""
        rows = iter(self._run("read", at._replace(id=b"")))
        return [(_id_of(at, name), data) for name, data in zip(rows, rows, strict=True)]

    def remove(self, at: ObjectPlace) -> bool:
        """See ``Database``."""
        return bool(self._run("remove", at))

    def expire(self, at: ObjectPlace, expires_s: float) -> None:
        """See ``Database``."""
        self._run("expire", at, int(expires_s * 1000))

    def taken(self, at: ObjectPlace) -> int:
        """See ``Database``."""
        return int(self._run("taken", at._replace(id=b"")))

    def evict(self, at: ObjectPlace, most_bytes: int) -> int:
        """See ``Database``."""
        return int(self._run("evict", at._replace(id=b""), most_bytes, _name_of(at)))

    def _run(self, what: str, at: ObjectPlace, *values: Any) -> Any:
        first = _name_of(at)
        last = first if at.id else first and first + b"\xff" * 33
        owner, limits = at.owner.hex(), self._limits
        prefix = f"stored_objects:{owner}:"
        arguments = [what, prefix, first, last, limits.now_s(), limits.ttl_s, *values]
        if at.kind != RESPONSES:
            return self._objects([prefix], arguments)
        keys = [f"stored_responses:{owner}:{name}" for name in ("data", "times", "bytes")]
        return self._responses(keys, arguments)


def _name_of(at: ObjectPlace) -> bytes:
    """Return the name among its owner's."""
    return at.id if at.kind == RESPONSES else at.kind + at.id


def _id_of(at: ObjectPlace, name: bytes) -> bytes:
    return name[len(_name_of(at._replace(id=b""))) :]


def _ping(url: str) -> None:
    import redis

    redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S).ping()


SERVER = DatabaseServer(
    schemes=("redis", "rediss"),
    forms=("redis://HOST", "rediss://HOST"),
    extra="redis",
    open=Redis,
    ping=_ping,
)
