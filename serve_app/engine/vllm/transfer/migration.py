"""What other replicas ask when a cache moves: what vLLM's pool holds and what is hot there, to take KV in, to keep it.

Made of vLLM's events, of the saves, and of the requests so far, which say whose a root is. Any thread but the loop's.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol

from router.protocol.block_hash import HASH_BYTES, PrefixScope, hash_at
from serve_app.cache.kv_chain import KvChain, TransferError
from serve_app.cache.prefix.block_index import CachedBlock
from serve_app.cache.prefix.hot_prefixes import (
    HashedTokens,
    HotPrefixes,
    SavedPrefix,
    idle_heats,
    list_hot,
)
from serve_app.cache.prefix.pins import PinOutcome
from serve_app.engine.protocol import CacheRoom, Clock
from serve_app.engine.vllm.events.held_blocks import OwnerOf
from serve_app.engine.vllm.saves import VllmSaves, block_number
from serve_app.engine.vllm.transfer.transfer import VllmTransfer


class Held(Protocol):
    """What a pool holds; see ``EventSubscriber``."""

    def known_blocks(self, block_hashes: bytes, most: int) -> int:
        """Return how many of a chain's first ``most`` blocks."""

    def root_of(self, first_hash: bytes) -> bytes:
        """Return under which root a chain begins."""

    def entries(self, owner_of: OwnerOf) -> list[CachedBlock]:
        """Return it by owner, parents first."""


class VllmMigration:
    """One engine's answers; the names are those of ``protocol.Engine``.

    ``held`` None: nothing is cached. ``transfer`` None: nothing leaves or enters. ``wait`` runs what belongs to the
    loop; ``used_blocks``: how many are in use.
    """

    def __init__(
        self,
        num_blocks: int,
        held: Held | None,
        transfer: VllmTransfer | None,
        saves: VllmSaves,
        wait: Callable[[Coroutine[Any, Any, PinOutcome | None]], PinOutcome | None],
        used_blocks: Callable[[], int],
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._num_blocks = num_blocks
        self._held = held
        self._transfer = transfer
        self._saves = saves
        self._wait = wait
        self._used_blocks = used_blocks
        self._clock = clock
        self._lock = threading.Lock()
        self._owners: OrderedDict[bytes, tuple[PrefixScope, str]] = OrderedDict()

    def note_owner(self, root: bytes, scope: PrefixScope, tenant: str) -> None:
        """Remember whose a root is. As many as the pool has blocks: it holds no more beginnings."""
        with self._lock:
            self._owners[root] = (scope, tenant)
            self._owners.move_to_end(root)
            if len(self._owners) > self._num_blocks:
                self._owners.popitem(last=False)

    def export_prefix(self, prefix: HashedTokens, first: int, most_blocks: int | None) -> KvChain | None:
        """Return the blocks from ``first`` on that are held of a prefix."""
        return self._transfer.export_prefix(prefix, first, most_blocks) if self._transfer is not None else None

    def import_part(self, part: KvChain, prefix: HashedTokens, first: int) -> int:
        """Load blocks of a prefix that another vLLM handed out; return how many leading ones are held then.

        Raises a TransferError, taking nothing, or EngineError.
        """
        if self._transfer is None:
            raise TransferError("this vLLM takes no KV from elsewhere")
        held = self._transfer.import_part(part, prefix, first)
        self.note_owner(part.header.root, prefix.scope, prefix.tenant)
        return held

    def take_over_pin(self, saved: SavedPrefix, prefix: HashedTokens) -> PinOutcome | None:
        """Keep a prefix that another replica kept; None where not all of it is here, or its time is over."""
        blocks = len(prefix.chain) // HASH_BYTES
        if self._held is None or not blocks or (saved.ttl_s or math.inf) <= saved.unread_s:
            return None
        root = self._held.root_of(hash_at(prefix.chain, 0))
        if not root or self._held.known_blocks(prefix.chain, blocks) < blocks:
            return None
        return self._wait(self._saves.take_over(saved, prefix, root))

    def hot_prefixes(self) -> HotPrefixes:
        """Return what the pool holds, saves and the hottest first; not an adapter's, which peers may not have."""
        # A scope is that of a whole chain, so that what is left out takes its children along.
        base = [entry for entry in self._entries() if not entry.scope.lora]
        blocks = {block_number(entry.block_hash): entry.block for entry in base}
        pins = [
            replace(pin, blocks=tuple(blocks[number] for number in pin.blocks))
            for pin in self._saves.pins.soonest_first()
            if blocks.keys() >= set(pin.blocks)
        ]
        return list_hot(base, pins, self._clock())

    def cache_room(self) -> CacheRoom:
        """Return how much of the pool is neither in use nor holds a prefix, and how hot the coldest prefixes are."""
        entries = self._entries()
        room = max(0, self._num_blocks - self._used_blocks())
        idle = min(len(entries), room)
        heats = idle_heats(entries, range(len(entries)), self._clock())
        return CacheRoom(room - idle, heats[: 4 * idle])

    def _entries(self) -> list[CachedBlock]:
        with self._lock:
            owners = dict(self._owners)
        return self._held.entries(owners.get) if self._held is not None else []
