"""Blocks in an object store or a shared file system (fsspec), under one URL that all replicas share.

One object a block. Its name is a keyed hash, its content encrypted and authenticated (AES-256-GCM), both with keys
from the root of the block's scope, which depends on the deployment's secret and the tenant's salt. So whoever reads
the store learns sizes and times only, another tenant's or deployment's blocks have unknown names, and an altered
object is a miss. A replica knows a root from the first request of its scope on, and stores and reads nothing before.

There is no list of what is stored: routers are told nothing, as every replica can read every block. A request whose
next block is nowhere else asks for it; the absence is remembered for a while. Every call of the store has a time
limit, after which the tier pauses, so a store that is slow, broken or hangs costs one such limit at a time.
"""

import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from serve_app.cache.kv_chain import KvFormat, Row, TransferError
from serve_app.cache.prefix_digest import TierBlock
from serve_app.cache.tiers.disk import BlockFiles
from serve_app.cache.tiers.tier import Tier, TierParts, Wanted
from serve_app.cache.tiers.tier_index import TierCounts
from serve_app.cache.tiers.tier_queue import TierQueue

_log = logging.getLogger(__name__)

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

FOLDER = "warmpath-kv-1"
"""Everything under the URL is in here; what a sweep or a reset removes, too."""

CALL_S = 2.0
"""The time limit of reading ``BATCH`` objects, or of writing one."""

PAUSE_S = 30.0
"""How long the tier pauses after a call that failed or was too late."""

ABSENT_S = 10.0
"""How long an object that was absent counts as absent; another replica may write it meanwhile."""

FRESH_S = 3600.0
"""A replica writes an object at most once in this time. If it is evicted here later, writing it again makes it young,
and the oldest objects are removed first: so those stay that are used."""

SWEEP_S = 600.0
SWEEP_PART = 16
"""A replica looks for too many bytes every ``SWEEP_S``, and after it wrote this part of the bound; it frees as much."""

BATCH = 32
THREADS = 8
MOST_CALLS = 32
"""Calls that may hang at once; each has a thread. After that the tier pauses at once."""

_REMEMBERED = 65_536
_BESIDE_BYTES = 64 << 10
"""Of an object beside its block: what tells which block it is."""
_NONCE_BYTES = 12


def open_object(parts: TierParts, below: Tier | None) -> Tier | None:
    """Return the tier, or None if it is off. Raises ValueError for a URL that cannot be used here."""
    settings = parts.settings
    if settings.object_cache_url is None:
        return None
    parts.check_bound("object_cache_bytes", settings.object_cache_bytes)
    file_system, folder = file_system_of(settings.object_cache_url)
    store = ObjectStore(file_system, folder, settings.object_cache_bytes, parts.format, clock=parts.clock)
    return TierQueue(store, settings.disk_queue_bytes, parts, below, threads=THREADS)


def file_system_of(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of ``object_cache_url`` and the folder. Raises ValueError with the remedy."""
    from fsspec.core import url_to_fs  # imported here: most replicas have no such tier

    try:
        file_system, path = url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        remedy = " in the environment of the replicas (pip)" if isinstance(error, ImportError) else ""
        raise ValueError(f"object_cache_url={url}: {error}{remedy}") from error
    return file_system, f"{path.rstrip('/')}/{FOLDER}"


class _Recent(Generic[K, V]):
    """The last values by key. Any thread."""

    def __init__(self) -> None:
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            if len(self._values) > _REMEMBERED:
                self._values.popitem(last=False)

    def drop(self, key: K) -> None:
        with self._lock:
            self._values.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()


class _Keys(NamedTuple):
    name: bytes
    content: AESGCM


class ObjectStore:
    """A ``BlockStore``: at most about ``capacity_bytes`` of objects in ``folder``, of all replicas together."""

    name = "object"
    expected_bytes_per_s = 2e8
    index = None

    def __init__(
        self,
        file_system: Any,
        folder: str,
        capacity_bytes: int,
        kv_format: KvFormat,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.counts = TierCounts()
        self.refused_files = 0
        self.life = 0
        self._fs = file_system
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        self._format_bytes = blake2b(msgspec.msgpack.encode(kv_format)).digest()
        self._codec = BlockFiles(Path(), kv_format)
        self._most_bytes = kv_format.block_bytes + _BESIDE_BYTES
        self._clock = clock
        self._wall_clock = wall_clock
        self._keys: _Recent[bytes, _Keys] = _Recent()
        self._absent_until_s: _Recent[str, float] = _Recent()
        self._fresh_until_s: _Recent[str, float] = _Recent()
        self._pause_until_s = -math.inf
        self._clearing = self._closed = False
        self._calls = threading.BoundedSemaphore(MOST_CALLS)
        self._sweeping = threading.Lock()
        self._next_sweep_s = clock()
        self._written_bytes = 0

    def learn(self, scope: bytes, root: bytes) -> None:
        """Note the root of a scope, by the scope's digest."""
        if self._keys.get(scope) is None:
            derived = blake2b(self._format_bytes, key=root, digest_size=64, person=b"kv-object-store").digest()
            self._keys.put(scope, _Keys(derived[:32], AESGCM(derived[32:])))

    def known(self, block: TierBlock) -> bool | None:
        """Return True for a block that was written here not long ago."""
        name = self._name(block)
        fresh_until_s = self._fresh_until_s.get(name) if name is not None else None
        return True if fresh_until_s is not None and fresh_until_s > self._clock() else None

    def holds(self, block: Wanted | TierBlock) -> bool:
        """Return whether it is worth asking for a block."""
        name = self._name(block) if self._usable() else None
        return name is not None and (self._absent_until_s.get(name) or -math.inf) <= self._clock()

    def store(self, block: TierBlock, row: Row, saved_until_s: float | None = None, *, life: int | None = None) -> bool:
        """Write a block, unless its scope's root is unknown or the store pauses. Saves are ordinary blocks here."""
        life = self.life if life is None else life
        keys, name = self._keys.get(block.scope), self._name(block)
        if keys is None or name is None or not self._usable() or life != self.life:
            return False
        nonce = os.urandom(_NONCE_BYTES)
        content = nonce + keys.content.encrypt(nonce, self._codec.encode(block, row), name.encode())

        def write() -> bool:
            self._write(name, content)
            if life != self.life:  # here, because a call may end long after its time limit
                self._remove([self._path(name)])
            return life == self.life

        if not self._call(write):
            return False
        self._fresh_until_s.put(name, self._clock() + FRESH_S)
        self._absent_until_s.drop(name)
        self._written_bytes += len(content)
        if self._clock() >= self._next_sweep_s or self._written_bytes * SWEEP_PART >= self._capacity_bytes:
            self._begin(self._sweep)
        return True

    def read(self, blocks: Sequence[Wanted]) -> Iterator[tuple[TierBlock, Row]]:
        """Yield blocks up to the first that is absent, unreadable or too late. The first one alone, then batches."""
        life = self.life
        for start in (0, *range(1, len(blocks), BATCH)):
            batch = [(one, name) for one in blocks[start : start + BATCH if start else 1] if (name := self._name(one))]
            if not batch:
                return
            paths = [self._path(name) for _, name in batch]
            contents = self._call(partial(self._read, paths)) if self._usable() else None
            for one, name in batch:
                content = (contents or {}).get(self._path(name))
                block = self._opened(one, name, content) if isinstance(content, bytes) else None
                if block is None or life != self.life:
                    if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                        self._failed(content)
                    elif contents is not None:
                        self._absent_until_s.put(name, self._clock() + ABSENT_S)
                        self._fresh_until_s.drop(name)
                    return
                yield block

    def touch(self, block_hashes: Iterable[bytes]) -> None:
        """Do nothing: an object is young again once it is written again."""

    def mark(self, block_hashes: Iterable[bytes], saved_until_s: float | None) -> int:
        """Do nothing: saves are ordinary blocks here."""
        return 0

    def forget_all(self) -> Callable[[], None]:
        """Remove every block under the URL, of all replicas. Until that succeeds, nothing is read or written here."""
        self.life += 1
        self._clearing = True
        self._fresh_until_s.clear()
        self._absent_until_s.clear()

        def begin() -> None:
            clearing = threading.Thread(target=self._clear, name="warmpath-object-reset", daemon=True)
            clearing.start()
            clearing.join(CALL_S)

        return begin

    def close(self) -> None:
        """Begin nothing from now on. Threads of calls that hang end with the process."""
        self._closed = True

    def _usable(self) -> bool:
        return not self._clearing and not self._closed and self._clock() >= self._pause_until_s

    def _name(self, block: Wanted | TierBlock) -> str | None:
        keys = self._keys.get(block.scope)
        if keys is None:
            return None
        return blake2b(block.block_hash + block.prefix_digest, key=keys.name, digest_size=16).hexdigest()

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name[:2]}/{name}.kv"

    def _opened(self, expected: Wanted, name: str, content: bytes) -> tuple[TierBlock, Row] | None:
        """Return the block in an object, or None if it is not the wanted one, whole and unaltered."""
        keys = self._keys.get(expected.scope)
        try:
            if keys is None or len(content) < _NONCE_BYTES:
                raise InvalidTag
            plain = keys.content.decrypt(content[:_NONCE_BYTES], content[_NONCE_BYTES:], name.encode())
            block, row = self._codec.decode(plain, expected.block_hash)
        except (InvalidTag, TransferError):
            self.refused_files += 1
            _log.warning("an object of the cache cannot be read: it was altered, or is incomplete")
            return None
        return (block, row) if block.prefix_digest == expected.prefix_digest else None

    def _read(self, paths: Sequence[str]) -> dict[str, Any]:
        """Return each object's content or error; no more of it than a block has, whatever somebody put there."""
        contents = self._fs.cat_ranges([*paths], 0, self._most_bytes, on_error="return")
        return dict(zip(paths, contents, strict=True))

    def _write(self, name: str, content: bytes) -> None:
        path = self._path(name)
        target = f"{path}.{os.urandom(4).hex()}.tmp" if getattr(self._fs, "local_file", False) else path
        try:
            self._fs.pipe_file(target, content)
        except FileNotFoundError:  # a file system with real directories
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(target, content)
        if target != path:
            os.replace(target, path)  # noqa: PTH105  # else readers would see a part of it

    def _remove(self, paths: Sequence[str]) -> None:
        many = getattr(self._fs, "async_impl", False)  # then one call removes many
        step = 500 if many else 1
        for group in (paths[start : start + step] for start in range(0, len(paths), step)):
            with suppress(FileNotFoundError):  # another replica was quicker
                self._fs.rm(list(group)) if many else self._fs.rm_file(group[0])
            for path in group:
                self._fresh_until_s.drop(path.rpartition("/")[2].removesuffix(".kv"))

    def _listing(self) -> list[tuple[float, int, str]]:
        """Return time, size and path of every object, the oldest first."""
        with suppress(FileNotFoundError):
            listing = self._fs.find(self._folder, detail=True)
            return sorted((_written_s(info), int(info.get("size") or 0), path) for path, info in listing.items())
        return []

    def _sweep(self) -> None:
        """Remove the oldest objects above the bound, again if enough is written meanwhile: one sweep runs at a time."""
        while self._sweeping.acquire(blocking=False):
            try:
                self._sweep_once()
            except Exception as error:
                self._failed(error)
            finally:
                self._sweeping.release()
            if self._written_bytes * SWEEP_PART < self._capacity_bytes:
                return

    def _sweep_once(self) -> None:
        """Remove what is above the bound now, and what writers left that ended midway."""
        self._next_sweep_s, self._written_bytes = self._clock() + SWEEP_S, 0
        objects = self._listing()
        excess = sum(size for _, size, _ in objects) - self._capacity_bytes
        if excess > 0:
            excess += self._capacity_bytes // SWEEP_PART
        old: list[str] = []
        for written_s, size, path in objects:
            torn = path.endswith(".tmp") and written_s < self._wall_clock() - FRESH_S
            if excess > 0 or torn:
                old.append(path)
                excess -= size
        self._remove(old)
        self.counts.evicted_blocks += len(old)

    def _clear(self) -> None:
        """Remove all objects, again and again until it succeeds."""
        life, pause_s = self.life, 1.0
        while not self._closed and life == self.life:
            try:
                self._remove([path for _, _, path in self._listing()])
                self._clearing = life != self.life
                return
            except Exception as error:
                self._failed(error)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 60.0)

    def _call(self, work: Callable[[], T]) -> T | None:
        """Return the result of a call of the store, or None if it fails or is too late."""
        result = self._begin(work)
        try:
            return result.result(CALL_S)
        except Exception as error:
            self._failed(error)
            return None

    def _begin(self, work: Callable[[], T]) -> "Future[T]":
        """Call the store in a thread of its own, which may hang."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except Exception as error:
                result.set_exception(error)
            finally:
                self._calls.release()

        if self._calls.acquire(blocking=False):
            threading.Thread(target=run, name="warmpath-object-call", daemon=True).start()
        else:
            result.set_exception(TimeoutError("too many calls of it hang"))
        return result

    def _failed(self, error: Exception) -> None:
        self.counts.failures += 1
        if self._clock() >= self._pause_until_s:
            _log.warning("the object store fails, and pauses for %g s: %s", PAUSE_S, type(error).__name__)
        self._pause_until_s = self._clock() + PAUSE_S


def _written_s(info: dict[str, Any]) -> float:
    """Return the time (Unix) of an object's last write, in the words of each file system; 0.0 if it has none."""
    words = ("mtime", "LastModified", "last_modified", "updated", "created")
    value = next((info[word] for word in words if info.get(word)), 0.0)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return value.timestamp() if isinstance(value, datetime) else float(value)
