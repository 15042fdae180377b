"""What another replica asks when a cache moves: what is hot in vLLM's pool, and what would fit there.

Made of vLLM's events, of the saves, and of the requests so far, which say whose a root is. Any thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from router.protocol.block_hash import PrefixScope
from serve_app.cache.prefix.block_index import CachedBlock
from serve_app.cache.prefix.hot_prefixes import HotPrefixes, PinnedBlocks, idle_heats, list_hot
from serve_app.cache.prefix.pins import Pin
from serve_app.engine.protocol import CacheRoom, Clock
from serve_app.engine.vllm.events.held_blocks import OwnerOf
from serve_app.engine.vllm.saves import block_number


class VllmMoves:
    """One engine's answers. ``entries``: what the pool holds, by owner; ``pins``: of it, what is saved.

    ``used_blocks``: of it, how many are in use.
    """

    def __init__(
        self,
        num_blocks: int,
        entries: Callable[[OwnerOf], list[CachedBlock]],
        pins: Callable[[], Sequence[Pin]],
        used_blocks: Callable[[], int],
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._num_blocks = num_blocks
        self._entries = entries
        self._pins = pins
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

    def hot_prefixes(self) -> HotPrefixes:
        """Return what the pool holds, saves and the hottest first; not an adapter's, which peers may not have."""
        # A scope is that of a whole chain, so that what is left out takes its children along.
        base = [entry for entry in self._held() if not entry.scope.lora]
        now_s, blocks = self._clock(), {block_number(entry.block_hash): entry.block for entry in base}
        pins = [
            PinnedBlocks(pin.key, pin.tenant, [blocks[one] for one in pin.blocks], pin.ttl_s, pin.expires_s - now_s)
            for pin in self._pins()
            if blocks.keys() >= set(pin.blocks)
        ]
        return list_hot(base, pins, now_s)

    def cache_room(self) -> CacheRoom:
        """Return how much of the pool is neither in use nor holds a prefix, and how hot the coldest prefixes are."""
        entries = self._held()
        room = max(0, self._num_blocks - self._used_blocks())
        idle = min(len(entries), room)
        heats = idle_heats(entries, range(len(entries)), self._clock())
        return CacheRoom(room - idle, heats[: 4 * idle])

    def _held(self) -> list[CachedBlock]:
        with self._lock:
            owners = dict(self._owners)
        return self._entries(owners.get)
