"""The blocks of one tier by tenant: places, bytes by account, the next block to evict, and events.

Invariants: the accounts add up to ``used_bytes``; no tenant at or under its share loses a block while a tenant above
has an evictable one; a tenant's saved blocks are evicted last, and never for its unsaved ones; unneeded space can be
borrowed. It holds no block contents. Threads that share an index must hold ``lock``.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from threading import RLock
from typing import Generic, TypeVar

from router.protocol.block_hash import block_word
from router.protocol.events import BlocksRemoved, BlocksStored, TierDigest
from serve_app.cache.eviction import EvictionQueue, Standing
from serve_app.cache.prefix.quota import Accounts
from serve_app.cache.prefix_digest import TierBlock

UNKNOWN = ""
"""The account of old files without an owner's name. It is never active, so its blocks are evicted first."""

TierEvent = BlocksStored | BlocksRemoved


@lru_cache(maxsize=4096)
def account_key(tenant: str) -> str:
    """Return the hashed key of a tenant's account below the pool, so that files do not contain tenant names."""
    return blake2b(tenant.encode(), digest_size=16, person=b"kv-tier-account").hexdigest()


def _by_key(shares: Mapping[str, float]) -> dict[str, float]:
    return {account_key(tenant): weight for tenant, weight in shares.items()}


@dataclass(slots=True, eq=False)
class Entry:
    """A block of a tier. ``size``: bytes. ``saved_until_s``: its save's expiry (Unix time), or inf; None: not saved."""

    block: TierBlock
    size: int
    saved_until_s: float | None = None


@dataclass(slots=True)
class TierCounts:
    """Counters of blocks since the tier's start."""

    hits: int = 0
    stores: int = 0
    drops: int = 0
    evicted_blocks: int = 0
    failures: int = 0


E = TypeVar("E", bound=Entry)


class TierIndex(Accounts[EvictionQueue[bytes]], Generic[E]):
    """Entries by hash. ``shares``: weights by tenant name. All other parts use account keys.

    ``tier``: its name in events. ``xor``: of the words of the hashes (see ``block_word``). ``digest``: of the held
    blocks as of the last ``take_events``.
    """

    def __init__(self, tier: str, shares: Mapping[str, float], clock: Callable[[], float], active_s: float) -> None:
        super().__init__(_by_key(shares), clock, active_s, EvictionQueue)
        self.lock = RLock()
        self.counts = TierCounts()
        self.used_bytes = 0
        self.xor = 0
        self.digest = TierDigest(tier, 0, 0)
        self._tier = tier
        self._entries: OrderedDict[bytes, E] = OrderedDict()
        self._stored_before: dict[bytes, bool] = {}
        """For each block added or removed since the last ``take_events``: whether it was held then."""
        self._uses = 0

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Use new weights by tenant name from now on."""
        super().set_weights(_by_key(weights))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._entries

    def __getitem__(self, block_hash: bytes) -> E:
        return self._entries[block_hash]

    def __iter__(self) -> Iterator[E]:
        """Entries of all tenants, the least recently used first."""
        return iter(self._entries.values())

    def get(self, block_hash: bytes) -> E | None:
        """Return a block's entry (any thread)."""
        return self._entries.get(block_hash)

    def find(self, block_hash: bytes) -> TierBlock | None:
        """Return a held block's description (any thread)."""
        entry = self._entries.get(block_hash)
        return entry.block if entry is not None else None

    def add(self, entry: E) -> None:
        """Add a block that is not held, as the most recently used one."""
        block_hash = entry.block.block_hash
        self._entries[block_hash] = entry
        self.account(entry.block.owner).held += entry.size
        self.used_bytes += entry.size
        self._put(entry)
        self._note(block_hash, stored_before=False)

    def use(self, block_hash: bytes) -> None:
        """Make a held block the most recently used one. Raises KeyError."""
        self._entries.move_to_end(block_hash)
        self._put(self._entries[block_hash])

    def mark(self, block_hash: bytes, saved_until_s: float | None) -> None:
        """Set the expiry of a held block's save. If saving begins or ends, it becomes its kind's most recently used."""
        entry = self._entries[block_hash]
        before, entry.saved_until_s = entry.saved_until_s, saved_until_s
        if (before is None) != (saved_until_s is None):
            self._put(entry)

    def remove(self, block_hash: bytes) -> E:
        """Forget a held block. Raises KeyError."""
        entry = self._entries.pop(block_hash)
        account = self._accounts[entry.block.owner]
        account.held -= entry.size
        account.queue.discard(block_hash)
        self.used_bytes -= entry.size
        self._note(block_hash, stored_before=True)
        return entry

    def next_victim(self, owner: str, *, saved: bool = False) -> E | None:
        """Return the entry to evict for a block of ``owner``, or None. An unsaved one evicts none of its saved ones."""
        furthest = self.furthest()
        if furthest is None:
            return None
        own, since_s = self._accounts.get(owner), self._active_since_s()
        if own is not None and own.queue and own.excess(since_s) >= furthest.excess(since_s):
            furthest = own
        victim = self._entries[furthest.queue.first()]
        return None if victim.saved_until_s is not None and furthest is own and not saved else victim

    def clear(self) -> None:
        """Forget every block."""
        for block_hash in self._entries:
            self._note(block_hash, stored_before=True)
        self._entries.clear()
        self.used_bytes = 0
        for account in self._accounts.values():
            account.held, account.queue = 0, EvictionQueue()

    @property
    def has_events(self) -> bool:
        """Whether ``take_events`` has anything (any thread)."""
        return bool(self._stored_before)

    def announce(self) -> None:
        """Announce all held blocks to routers without any knowledge: saved ones first, and newer ones first."""
        entries = sorted(self._entries.values(), key=lambda entry: entry.saved_until_s is not None)
        self._stored_before = {entry.block.block_hash: False for entry in entries}

    def take_events(self) -> list[TierEvent]:
        """Return the changes since the last call: removed blocks, then stored blocks, the last one first."""
        before, self._stored_before = self._stored_before, {}
        self.digest = TierDigest(self._tier, len(self._entries), self.xor)
        removed = b"".join(name for name, stored in before.items() if stored and name not in self._entries)
        # Children were added before their parents, and are announced after them.
        stored = b"".join(name for name in reversed(before) if not before[name] and name in self._entries)
        events: list[TierEvent] = [BlocksRemoved(removed, self._tier)] if removed else []
        return [*events, BlocksStored(stored, self._tier)] if stored else events

    def _note(self, block_hash: bytes, *, stored_before: bool) -> None:
        self.xor ^= block_word(block_hash)
        self._stored_before.setdefault(block_hash, stored_before)

    def _put(self, entry: E) -> None:
        """Rank a block as used now."""
        self._uses += 1
        standing = Standing.ORDINARY if entry.saved_until_s is None else Standing.PINNED
        account = self._accounts[entry.block.owner]
        account.queue.put(entry.block.block_hash, self._uses, standing)
        self.rank(account)
