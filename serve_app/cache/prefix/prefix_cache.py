"""The reusable computed KV blocks, and the tenants and scopes that may use them.

It owns eviction (leaf first, from the tenant most over its share, in the order of ``cache.eviction``), pins, and the
events for routers. Tokens and chains flow in; block ids and events flow out. Not thread-safe, except as stated in
``index``.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from router.protocol.block_hash import (
    HASH_BYTES,
    ChainHasher,
    PrefixScope,
    TokenArray,
    extend_chain,
    hash_at,
    hash_blocks,
)
from router.protocol.events import BlocksRemoved, BlocksStored, CacheCleared
from serve_app.cache.eviction import Standing
from serve_app.cache.prefix.blocks import BlockIndex, BlockPool, CachedBlock
from serve_app.cache.prefix.pins import PinOutcome, Pins
from serve_app.cache.prefix.quota import PUBLIC, Quota

CacheEvent = BlocksStored | BlocksRemoved | CacheCleared

EvictionHook = Callable[[list[CachedBlock]], None]
"""Called with the blocks being evicted, children first, while their KV is still in place."""


class PrefixCache:
    """Block allocation with reuse of computed prefixes.

    Invariants: a cached block's parent is cached; the parents of a block in use are in use; the hashes announced in
    events equal the indexed hashes; a pinned block is never evicted. ``shares``: weights of tenants' shares
    of the pool and of the pin budget. ``hash_chain`` is a parameter so that tests can force collisions.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enabled: bool = True,
        hash_chain: ChainHasher = hash_blocks,
        pin_budget_blocks: int = 0,
        shares: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = BlockIndex(block_size)
        self.quota = Quota(num_blocks, shares or {}, clock)
        self.pins = Pins(pin_budget_blocks, shares)
        self.block_size = block_size
        self.enabled = enabled
        self.evicted_blocks = 0
        self.evicted_reused_blocks = 0
        self.recalled_pins = 0
        self.on_evict: EvictionHook | None = None
        self._hash_chain = hash_chain
        self._clock = clock
        self._ticks = 0
        self._events: list[CacheEvent] = []

    @property
    def available_blocks(self) -> int:
        """The number of blocks that ``allocate`` can supply: free and evictable ones."""
        return self.pool.free_blocks + self.pool.idle_blocks

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Use new tenant weights from now on. If there are any, the pins of all other tenants end."""
        self.quota.set_weights(shares)
        self.pins.set_weights(shares)
        for key in self.pins.of_others(shares) if shares else ():
            self.unpin(key)

    def prompt_chain(self, scope: PrefixScope, root: bytes, token_ids: TokenArray, known: bytes = b"") -> bytes:
        """Return the chain of a whole prompt, including public blocks, that begins with ``known``; b"" when off."""
        if not self.enabled:
            return b""
        return extend_chain(root, scope.public_blocks, token_ids, self.block_size, known, self._hash_chain)

    def reusable_blocks(self, num_tokens: int) -> int:
        """Return the number of reusable leading blocks of a prompt, never including the last token's."""
        return max(num_tokens - 1, 0) // self.block_size if self.enabled else 0

    def match(self, scope: PrefixScope, token_ids: TokenArray, chain: bytes) -> list[int]:
        """Return the cached blocks of the longest prefix, never including the last token's. Acquires no blocks."""
        limit = min(self.reusable_blocks(len(token_ids)), len(chain) // HASH_BYTES)
        return self.index.match(scope, token_ids, chain, limit)

    def acquire(self, blocks: Sequence[int], *, read: bool = True) -> None:
        """Add a reference to each matched block. ``read``: a request uses them, which renews their pins."""
        for block in blocks:
            self._retain(block)
        if not read:
            return
        if blocks:
            self.quota.read(blocks[0])
        self.pins.read(blocks, self._clock())

    def hit(self, matched: Sequence[int]) -> None:
        """Count a request that starts with these blocks, which makes them hotter."""
        entry = self.index.of_block(matched[-1]) if matched else None
        if entry is not None:
            entry.hit(self._clock())

    def allocate(self, count: int, tenant: str = "default") -> list[int]:
        """Return ``count`` blocks with one reference each, evicting leaves as needed. Raises PoolExhausted."""
        missing = count - self.pool.free_blocks
        if 0 < missing <= self.pool.idle_blocks:
            self.evict(missing)
        taken = self.pool.take(count)
        self.quota.take(taken, tenant)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block, last first, so that the tail of a prefix is evicted before its head."""
        for block in reversed(blocks):
            entry = self.index.of_block(block)
            if not self.pool.release(block, keep=entry is not None):
                continue
            if entry is None:
                self.quota.freed(block, idle=False)
                continue
            self.quota.idled(block)
            self._ticks += 1
            self._place(entry, Standing.ORDINARY)

    def touch(self, chain: bytes, blocks: int) -> None:
        """Treat the idle blocks among a chain's first ``blocks`` as just used.

        Only the last block needs an update, because no block is evicted before those that follow it.
        """
        entry = self.index.of_hash(hash_at(chain, blocks - 1)) if blocks else None
        if entry is not None and self.pool.is_idle(entry.block):
            self._ticks += 1
            self._place(entry, Standing.ORDINARY)

    def demote(self, blocks: Sequence[int]) -> int:
        """Mark a matched prefix's idle, unshared tail for early eviction; return its size.

        Another replica has it, or its session has ended.
        """
        demoted = 0
        self._ticks += 1
        for block in reversed(blocks):
            entry = self.index.of_block(block)
            if entry is None or entry.children > min(demoted, 1) or not self.pool.is_idle(block):
                break
            self._place(entry, Standing.DEMOTED)
            demoted += 1
        return demoted

    def publish(
        self, scope: PrefixScope, token_ids: TokenArray, chain: bytes, blocks: list[int], first: int, last: int
    ) -> int:
        """Index ``blocks[first:last]``, which have complete KV, and return the new count of indexed leading blocks.

        Blocks before ``first`` are already indexed. If an equal block is indexed, ``blocks`` is changed to use that one
        and the duplicate is freed. The count stays below ``last`` if other content has the same hash. Public blocks
        leave their tenant's account.
        """
        if not self.enabled or first >= last:
            return first
        size = self.block_size
        public, private = scope.public, scope.private
        raw = np.ascontiguousarray(token_ids[first * size : last * size], dtype="<i4").tobytes()
        parent = blocks[first - 1] if first else None
        stored = bytearray()
        done, now_s = first, self._clock()
        for i in range(first, last):
            block_hash = hash_at(chain, i)
            content = raw[4 * size * (i - first) : 4 * size * (i - first + 1)]
            own_scope = public if i < scope.public_blocks else private
            entry = self.index.of_hash(block_hash)
            if entry is None:
                if i < scope.public_blocks:
                    self.quota.hand_over(blocks[i], PUBLIC)
                tenant = self.quota.tenant_of(blocks[i])
                self.index.add(CachedBlock(block_hash, blocks[i], parent, content, own_scope, tenant, used_s=now_s))
                stored += block_hash
            elif not entry.equals(parent, content, own_scope):
                break
            elif entry.block != blocks[i]:
                self._retain(entry.block)
                self.pool.release(blocks[i], keep=False)
                self.quota.freed(blocks[i], idle=False)
                blocks[i] = entry.block
            parent = blocks[i]
            done = i + 1
        if stored:
            self._events.append(BlocksStored(bytes(stored)))
        return done

    def pin(
        self,
        key: bytes,
        blocks: Sequence[int],
        ttl_s: float | None = None,
        *,
        tenant: str = "default",
        unread_s: float = 0.0,
    ) -> PinOutcome:
        """Keep indexed blocks under ``key`` for ``ttl_s`` after the last read, ``unread_s`` ago; None: until unpinned.

        Other tenants' pins beyond their shares give way to pins within ``tenant``'s share. An existing key is renewed.
        """
        if not blocks or any(block not in self.index for block in blocks):
            raise ValueError("a pin needs at least one block, and only indexed ones")
        now_s = self._clock() - unread_s
        while (outcome := self.pins.add(key, blocks, ttl_s, now_s, tenant)) == "over_budget":
            lent = self.pins.recall(blocks, tenant)
            if lent is None:
                break
            self.unpin(lent)
            self.recalled_pins += 1
        if outcome == "pinned":
            for block in blocks:
                self._retain(block)
        return outcome

    def unpin(self, key: bytes) -> bool:
        """Make a pinned prefix evictable, as the most recently used. Return False when there is none of that key."""
        blocks = self.pins.remove(key)
        self.release(blocks)
        return bool(blocks)

    def expire_pins(self) -> None:
        """Unpin prefixes that were not read for their TTL."""
        if self.pins.next_expiry_s is not None:
            for key in self.pins.expired(self._clock()):
                self.unpin(key)

    def pinned_idle_blocks(self) -> int:
        """Return the number of blocks that only pins keep in use (any thread; exact between steps)."""
        return sum(1 for block, pins in self.pins.counts().items() if self.pool.references(block) == pins)

    def evict(self, count: int, *, counted: bool = True) -> None:
        """Evict the next ``count`` idle blocks. ``counted``: to make space, so count them and offer them to tiers."""
        removed = bytearray()
        evicted: list[CachedBlock] = []
        for _ in range(count):
            entry = self.index.of_block(self.quota.next_leaf())
            assert entry is not None, "a leaf in a queue is indexed"
            removed += entry.block_hash
            evicted.append(entry)
            parent = self.index.remove(entry)
            self.pool.free_idle(entry.block)
            self.quota.freed(entry.block, idle=True)
            if parent is not None and parent.children == 0 and self.pool.is_idle(parent.block):
                self.quota.queue_leaf(parent.block, parent.released_at, parent.standing)
            if entry.reused:
                self.evicted_reused_blocks += counted
                if parent is not None:
                    parent.reused = True  # a reuse of the child reused the parent
        if removed:
            self._events.append(BlocksRemoved(bytes(removed)))
            self.evicted_blocks += count if counted else 0
            if counted and self.on_evict is not None:
                self.on_evict(evicted)

    def reset(self) -> bool:
        """Release every pin, forget every block not in use, and return whether no block was kept."""
        for key in self.pins:
            self.unpin(key)
        if self.pool.used_blocks and len(self.index):
            self.evict(self.pool.idle_blocks, counted=False)
            return not len(self.index)
        for entry in self.index:
            self.pool.free_idle(entry.block)
            self.quota.freed(entry.block, idle=True)
        if len(self.index):
            self._events.append(CacheCleared())
        self.index.clear()
        return True

    def take_events(self) -> tuple[CacheEvent, ...]:
        """Return the events since the last call, in order."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def _place(self, entry: CachedBlock, standing: Standing) -> None:
        """Place an idle block in the eviction order, as of now."""
        entry.released_at, entry.standing = self._ticks, standing
        if entry.children == 0:
            self.quota.queue_leaf(entry.block, entry.released_at, standing)

    def _retain(self, block: int) -> None:
        if self.pool.retain(block):
            self.quota.reused(block)
