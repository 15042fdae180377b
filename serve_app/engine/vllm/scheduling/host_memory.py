"""Tenants' shares of the host memory to which vLLM offloads blocks: its own cache policy. Runs in vLLM's core.

vLLM offers each block to host memory once it is computed. When that is full, the tenant furthest over its share loses
its least recently used blocks, the end of a prompt before its beginning. Blocks are named by vLLM's hashes, which
contain the tenant's root: another tenant's request has no name for them.
"""

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, order_request_keys

from serve_app.cache.eviction import EvictionQueue, Standing
from serve_app.cache.prefix.quota import CACHE_ACTIVE_S, PUBLIC, Account, Accounts
from serve_app.engine.vllm.scheduling.tenant import HOST_SHARES, owner_of


@dataclass(slots=True, eq=False)
class _Held:
    chunk: Any
    account: Account[EvictionQueue[bytes]]
    used: int = 0
    idle: bool = False


class TenantPolicy(CachePolicy):  # type: ignore[misc]
    """The chunks in host memory; vLLM calls a block's copy a chunk, and keeps those that are being copied."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.shares: Accounts[EvictionQueue[bytes]] = Accounts({}, time.monotonic, CACHE_ACTIVE_S, EvictionQueue)
        self._entries: dict[bytes, _Held] = {}
        self._storers: dict[bytes, str] = {}
        self._ticks = count(1)
        HOST_SHARES.add(self.shares)

    def get(self, key: bytes) -> Any:
        """Return a held chunk, or None."""
        entry = self._entries.get(key)
        return None if entry is None else entry.chunk

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Note whose chunks these are; vLLM inserts them next."""
        for key in keys:
            self._storers.pop(key, None)  # the latest last
            self._storers[key] = _owner(key, req_context)
        while len(self._storers) > self.cache_capacity:  # of requests that found no space
            del self._storers[next(iter(self._storers))]

    def insert(self, key: bytes, chunk: Any, *_: Any) -> None:
        """Add a chunk, which is being copied."""
        account = self.shares.touch(self._storers.pop(key, ""))
        account.held += 1
        self._entries[key] = _Held(chunk, account, next(self._ticks))
        self.shares.rank(account)

    def remove(self, key: bytes) -> None:
        """Drop a chunk."""
        entry = self._entries.pop(key)
        entry.account.held -= 1
        entry.account.queue.discard(key)

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Note a use of a prompt's chunks, its beginning the latest."""
        for key in reversed(list(keys)):
            if (entry := self._entries.get(key)) is not None:
                entry.used = next(self._ticks)
                if entry.account.tenant in (PUBLIC, _owner(key, req_context)):
                    self.shares.touch(entry.account.tenant)
                if entry.idle:
                    self._queue(key, entry)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: Collection[bytes],
        reused_keys: Collection[bytes],
        req_context: Any,
    ) -> None:
        """Note a request's use of its chunks."""
        self.touch(order_request_keys(key_groups, req_context), req_context)

    def mark_evictable(self, key: bytes) -> None:
        """Note that a chunk is copied no more."""
        entry = self._entries[key]
        entry.idle = True
        self._queue(key, entry)

    def mark_non_evictable(self, key: bytes) -> None:
        """Note that a chunk is being copied."""
        entry = self._entries[key]
        entry.idle = False
        entry.account.queue.discard(key)

    def evict(self, n: int, protected: Collection[bytes]) -> list[tuple[bytes, Any]] | None:
        """Remove and return ``n`` chunks, or None if there are not so many."""
        taken, spared = list[bytes](), list[bytes]()
        while len(taken) < n and (account := self.shares.furthest()) is not None:
            key = account.queue.first()
            account.queue.discard(key)
            if key in protected:
                spared.append(key)
            else:
                account.held -= 1
                taken.append(key)
        if len(taken) < n:
            for key in taken:
                self._entries[key].account.held += 1
            spared += taken
        for key in spared:
            self._queue(key, self._entries[key])
        return [(key, self._entries.pop(key).chunk) for key in taken] if len(taken) == n else None

    def clear(self) -> None:
        """Drop all chunks."""
        for key in list(self._entries):
            self.remove(key)

    def _queue(self, key: bytes, entry: _Held) -> None:
        entry.account.queue.put(key, entry.used, Standing.ORDINARY)
        self.shares.rank(entry.account)


def _owner(key: bytes, req_context: Any) -> str:
    tenant, public_tokens = owner_of(req_context.kv_transfer_params)
    return PUBLIC if (req_context.get_offload_key_position(key) or 1 << 62) <= public_tokens else tenant
