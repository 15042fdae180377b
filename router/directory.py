"""The map from blocks to the replicas that hold them, built from the feeds and read on every routing decision.

It covers all replicas and tiers. Its entries are hints: the replica's own cache decides. A replica that holds a block
also holds the blocks before it, so ``match`` bisects. A hole (a lost or refused hint) can only make a prediction wrong.
``ENDS_TIER`` differs: there, the deepest held block alone determines the match.

Beside it: prefixes that a replica is computing now (``PendingPrefixes``), and the comparison with the digests that
replicas report (``DriftChecks``).
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import and_
from typing import Literal

from router.block_table import MAX_ENTRIES, VALUE_BITS, VALUE_MASK, HolderSets, KeyTable, ReplicaSlots, bits, block_keys
from router.protocol.block_hash import HASH_BYTES, common_blocks
from router.protocol.events import ENDS_TIER, POOL_TIER, BlocksRemoved, BlocksStored, CacheCleared, CacheDigest, Event
from router.settings import DEFAULTS

_CHAINS_A_KEY = 4


class PendingPrefixes:
    """Placement key -> the last few (reservation, replica, chain). Beyond ``max_keys``, the oldest key is dropped."""

    def __init__(self, block_size: int, max_keys: int = 4096) -> None:
        self.block_size = block_size
        self._max_keys = max_keys
        self._chains: OrderedDict[bytes, dict[int, tuple[str, bytes]]] = OrderedDict()
        self._key_of: dict[int, bytes] = {}

    def add(self, placement_key: bytes, reservation: int, replica_id: str, chain: bytes) -> None:
        """Record that a replica received ``chain`` (packed hashes)."""
        chains = self._chains.setdefault(placement_key, {})
        chains[reservation] = (replica_id, chain)
        self._key_of[reservation] = placement_key
        if len(chains) > _CHAINS_A_KEY:
            oldest = next(iter(chains))
            del chains[oldest], self._key_of[oldest]
        if len(self._chains) > self._max_keys:
            for oldest in self._chains.popitem(last=False)[1]:
                del self._key_of[oldest]

    def discard(self, reservation: int) -> None:
        """Forget one decision. Unknown decisions are ignored."""
        placement_key = self._key_of.pop(reservation, None)
        if placement_key is not None:
            chains = self._chains[placement_key]
            del chains[reservation]
            if not chains:
                del self._chains[placement_key]

    def match(self, placement_key: bytes, chain: bytes) -> dict[str, int]:
        """Return, by replica, the leading tokens that ``chain`` shares with a prompt already in progress there."""
        chains = self._chains.get(placement_key)
        if not chains:
            return {}
        tokens: dict[str, int] = {}
        for replica_id, other in chains.values():
            common = common_blocks(chain, other) * self.block_size
            if common > tokens.get(replica_id, 0):
                tokens[replica_id] = common
        return tokens


logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 10.0
LAST_PAUSE_S = 600.0


class DriftChecks:
    """Comparisons of one router since its start. ``differences``: their number by replica and kind."""

    def __init__(self) -> None:
        self.checks = 0
        self.differences: dict[str, Counter[DriftKind]] = {}
        self._next_s: dict[str, tuple[float, float]] = {}

    def compare(self, directory: Directory, replica_id: str, digest: CacheDigest, now_s: float) -> bool:
        """Compare, and return whether to ask for a snapshot now. While digests differ, the pauses double."""
        self.checks += 1
        kind = directory.drift(replica_id, digest)
        next_s, pause_s = self._next_s.get(replica_id, (now_s, FIRST_PAUSE_S))
        if kind is None:
            if now_s >= next_s:
                self._next_s.pop(replica_id, None)
            return False
        self.differences.setdefault(replica_id, Counter())[kind] += 1
        if now_s < next_s:
            return False
        self._next_s[replica_id] = (now_s + pause_s, min(2 * pause_s, LAST_PAUSE_S))
        logger.warning("the directory disagrees with the cache of %s (%s): asking for a snapshot", replica_id, kind)
        return True

    def forget(self, replica_id: str) -> None:
        """Forget a removed replica. Unknown ids are ignored."""
        self.differences.pop(replica_id, None)
        self._next_s.pop(replica_id, None)


_MEMO_ENTRIES = 4096
_MAX_TIERS = 8

DriftKind = Literal["extra", "missing", "altered"]
"""Extra: the directory has blocks that the replica lacks. Missing: the reverse. Altered: as many, but others."""


class Directory:
    """Block holders by replica. Not thread-safe. A call's work is bounded, apart from the blocks passed to it."""

    def __init__(self, block_size: int, max_blocks: int = DEFAULTS.max_blocks) -> None:
        if block_size < 1 or not 1 <= max_blocks <= MAX_ENTRIES:
            raise ValueError(f"block_size and max_blocks must be at least 1, max_blocks at most {MAX_ENTRIES}")
        self.block_size = block_size
        self.max_blocks = max_blocks
        """The limit of ``num_blocks``. Hints beyond it are refused, a little earlier for replicas with most blocks."""
        self._table = KeyTable(max_blocks)
        self._sets = HolderSets()
        self._replicas: dict[str, ReplicaSlots] = {}
        self._owner: list[str] = []
        self._free_slots: list[int] = []
        self._crowded_at = max_blocks - max_blocks // 8
        self._dead: int = 0
        self._live: int = 0
        self._extra: int = 0
        self._ends: int = 0
        self._sweep_at = -1
        self._sweep_dead = 0
        self._folded: dict[int, int] = {}
        self._members: dict[int, tuple[str, ...]] = {}

    @property
    def num_blocks(self) -> int:
        """The distinct blocks, including those of removed or cleared replicas until they are swept."""
        return self._table.num_entries

    @property
    def refused_blocks(self) -> int:
        """The hints refused at the limit since the start."""
        return self._table.num_refused

    @property
    def size_bytes(self) -> int:
        """The memory in use, from the sizes of the arrays and tables."""
        return self._table.size_bytes + self._sets.size_bytes

    def blocks_held(self, replica_id: str) -> Mapping[str, int]:
        """Return the number of blocks a replica holds by tier; empty for an unknown replica."""
        replica = self._replicas.get(replica_id)
        return dict(replica.blocks_of_tier) if replica else {}

    def drift(self, replica_id: str, digest: CacheDigest) -> DriftKind | None:
        """Return the directory's difference from a digest, or None, also while there is no space for refused hints."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return None
        digests = {of.tier: of for of in digest.tiers[:_MAX_TIERS]}
        missing, altered = 0, False
        for tier in digests.keys() | replica.blocks_of_tier.keys():
            blocks = digests[tier].blocks if tier in digests else 0
            counted = replica.blocks_of_tier.get(tier, 0)
            if counted > blocks:
                return "extra"
            missing += blocks - counted
            if counted == blocks > 0:
                altered |= replica.xor_of_tier[tier] != digests[tier].xor
        if altered:
            return "altered"
        if missing and replica.refused_blocks and self.num_blocks + missing > self._crowded_at:
            return None
        return "missing" if missing else None

    def add_replica(self, replica_id: str) -> None:
        """Start to accept a replica's hints. Adding it again changes nothing."""
        self._replicas.setdefault(replica_id, ReplicaSlots())

    def remove_replica(self, replica_id: str) -> None:
        """Forget a replica at once. Unknown ids are ignored."""
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            self._retire_slots(replica)

    def apply(self, replica_id: str, events: Iterable[Event]) -> None:
        """Apply one replica's cache events in order. Other events and unknown replicas are ignored."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        for event in events:
            if isinstance(event, BlocksStored):
                self._store(replica_id, replica, event)
            elif isinstance(event, BlocksRemoved):
                self._remove(replica, event)
            elif isinstance(event, CacheCleared):
                self._retire_slots(replica)
        if self._dead or self._sweep_at >= 0:
            self.sweep(1 + self._dead.bit_count() // 64)

    def sweep(self, shards: int = 1) -> bool:
        """Drop blocks without a holder from the next ``shards`` shards, and return whether more may be left."""
        for _ in range(shards):
            if self._sweep_at < 0:
                if not self._dead:
                    return False
                self._sweep_dead, self._sweep_at = self._dead, 0
            new_ids: list[int] = []
            step = self._step(partial(and_, ~self._dead), new_ids)
            self._sets.count(self._table.rebuild(self._sweep_at, step), new_ids)
            self._sweep_at += 1
            if self._sweep_at == len(self._table.words):
                self._free_slots.extend(bits(self._sweep_dead))
                self._dead &= ~self._sweep_dead
                self._sweep_at, self._sweep_dead = -1, 0
        return bool(self._dead) or self._sweep_at >= 0

    def match(self, chain: bytes, *, below: bool = True) -> dict[str, int]:
        """Return the tokens of ``chain``'s longest held prefix by replica, without replicas that hold nothing.

        ``chain``: packed hashes of the prompt's full blocks. ``below`` False: blocks below a pool do not count.
        About log2(blocks) look-ups for each distinct depth.
        Example: of 8 blocks, A holds all, B holds 6 and C holds 3. The interval (0 ABC, 8 -) means: A, B and C hold
        block 0, and no replica holds block 8. A and B hold block 4, a third set, so (4 AB, 8 -) is postponed and
        (0 ABC, 4 AB) continues: block 2 has ABC, block 3 has AB. Low and high are now neighbours. A holder at low
        but not at high ends here: C has 3 blocks. The interval (4 AB, 8 -) then yields B with 6 and A with 8.
        """
        blocks = len(chain) // HASH_BYTES
        if not blocks or not self._live:
            return {}
        words = memoryview(chain if len(chain) == blocks * HASH_BYTES else chain[: blocks * HASH_BYTES]).cast("Q")[::2]
        table, shard_mask, bits_of_value, value_mask = self._table, self._table.shard_mask, VALUE_BITS, VALUE_MASK
        words_of, mask_of = table.words, table.masks
        masks, live, members = self._sets.masks, self._live, self._members
        extra = self._extra if below else 0
        first = masks[table.get(words[0])] & live & ~self._ends
        if not below:
            first &= ~self._extra
        elif first & extra:
            first = self._fold(first)
        tokens = self._deepest(words) if self._ends else {}
        intervals = [(0, first, blocks, 0)] if first else []
        while intervals:
            low, at_low, high, at_high = intervals.pop()
            while high - low > 1:
                middle = (low + high) >> 1
                # -- KeyTable.get(words[middle]), inlined because it dominates the time of a decision
                key = words[middle]
                shard = key & shard_mask
                slots, mask = words_of[shard], mask_of[shard]
                tag = key >> bits_of_value
                slot = tag & mask
                while (word := slots[slot]) and (word >> bits_of_value) != tag:
                    slot = (slot + 1) & mask
                # -- end of KeyTable.get
                holding = masks[word & value_mask]
                if extra and (holding & extra):
                    holding = self._fold(holding & live)
                holding = (holding & at_low) | at_high  # a hole neither adds nor hides holders
                if holding == at_high:
                    high = middle
                elif holding == at_low:
                    low = middle
                else:
                    intervals.append((middle, holding, high, at_high))
                    high, at_high = middle, holding
            depth = (low + 1) * self.block_size
            holders = at_low & ~at_high
            for replica_id in members.get(holders) or self._names(holders):
                tokens[replica_id] = depth
        return tokens

    def _deepest(self, words: memoryview) -> dict[str, int]:
        """Match replicas with blocks in ``ENDS_TIER``, by scanning the blocks from the last one backwards."""
        tokens: dict[str, int] = {}
        left, masks, table = self._ends, self._sets.masks, self._table
        for index in range(len(words) - 1, -1, -1):
            if holders := masks[table.get(words[index])] & left:
                tokens |= dict.fromkeys(self._names(holders), (index + 1) * self.block_size)
                left &= ~holders
                if not left:
                    break
        return tokens

    def tiers(self, chain: bytes, match: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """Return each match's tokens by replica and tier. It reads every block: too slow for decisions."""
        slots = {name: self._replicas[name].slot_of_tier for name in match}
        tokens: dict[str, dict[str, int]] = {name: dict.fromkeys(tiers, 0) for name, tiers in slots.items()}
        depth = max(match.values(), default=0) // self.block_size
        words = memoryview(chain)[: depth * HASH_BYTES].cast("Q")[::2]
        for index in range(depth):
            holders = self._sets.masks[self._table.get(words[index])]
            for name, tiers in slots.items():
                if match[name] > index * self.block_size:
                    for tier, slot in tiers.items():
                        tokens[name][tier] += self.block_size * (tier == ENDS_TIER or (holders >> slot) & 1)
        return tokens

    def _fold(self, holders: int) -> int:
        """Replace the bits of further tiers by the bit of their replica's first tier."""
        folded = self._folded.get(holders)
        if folded is None:
            folded = holders & ~self._extra
            for slot in bits(holders & self._extra):
                folded |= 1 << self._replicas[self._owner[slot]].home
            if len(self._folded) >= _MEMO_ENTRIES:
                self._folded.clear()
            self._folded[holders] = folded
        return folded

    def _names(self, folded: int) -> tuple[str, ...]:
        names = tuple(self._owner[slot] for slot in bits(folded))
        if len(self._members) >= _MEMO_ENTRIES:
            self._members.clear()
        self._members[folded] = names
        return names

    def _store(self, replica_id: str, replica: ReplicaSlots, event: BlocksStored) -> None:
        slot = replica.slot_of_tier.get(event.tier)
        if slot is None:
            if len(replica.slot_of_tier) >= _MAX_TIERS:
                return
            if not replica.slot_of_tier and event.tier not in (POOL_TIER, ENDS_TIER):
                self._new_slot(replica_id, replica, POOL_TIER)  # the pool is the home of a replica's tiers
            slot = self._new_slot(replica_id, replica, event.tier)
        bit = 1 << slot
        # The last eighth is reserved for replicas below an equal share, so that one replica cannot crowd out the rest.
        limit = self.max_blocks
        if sum(replica.blocks_of_tier.values()) * len(self._replicas) >= limit:
            limit = self._crowded_at
        refused = self._table.num_refused
        count, xor = self._update(event.hashes, lambda mask: mask | bit, limit)
        replica.blocks_of_tier[event.tier] += count
        replica.xor_of_tier[event.tier] ^= xor
        replica.refused_blocks += self._table.num_refused - refused

    def _remove(self, replica: ReplicaSlots, event: BlocksRemoved) -> None:
        slot = replica.slot_of_tier.get(event.tier)
        if slot is None:
            return
        bit = 1 << slot
        count, xor = self._update(event.hashes, lambda mask: mask & ~bit)
        replica.blocks_of_tier[event.tier] -= count
        replica.xor_of_tier[event.tier] ^= xor

    def _update(self, hashes: bytes, change: Callable[[int], int], max_entries: int | None = None) -> tuple[int, int]:
        """Change the holders of blocks. Return the number of changed blocks and the XOR of their words."""
        new_ids: list[int] = []
        changes, xor = self._table.update(block_keys(hashes), self._step(change, new_ids), max_entries)
        self._sets.count(changes, new_ids)
        return sum(count for _, _, count in changes), xor

    def _step(self, change: Callable[[int], int], new_ids: list[int]) -> Callable[[int], int]:
        """Return a function that maps set ids as ``change`` maps masks. It appends new ids to ``new_ids``."""
        sets = self._sets

        def step(set_id: int) -> int:
            mask = sets.masks[set_id]
            changed = change(mask)
            if changed == mask:
                return set_id
            new_ids.append(sets.id_of(changed))
            return new_ids[-1]

        return step

    def _new_slot(self, replica_id: str, replica: ReplicaSlots, tier: str) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
            self._owner[slot] = replica_id
        else:
            slot = len(self._owner)
            self._owner.append(replica_id)
        if replica.slot_of_tier:
            self._extra |= 1 << slot
        if tier == ENDS_TIER:
            self._ends |= 1 << slot
        replica.slot_of_tier[tier] = slot
        replica.blocks_of_tier[tier] = replica.xor_of_tier[tier] = 0
        self._live |= 1 << slot
        self._forget_memos()
        return slot

    def _retire_slots(self, replica: ReplicaSlots) -> None:
        """Remove a replica's blocks from matches now. Their entries are swept later."""
        for tier, slot in replica.slot_of_tier.items():
            bit = 1 << slot
            self._live &= ~bit
            self._extra &= ~bit
            self._ends &= ~bit
            if replica.blocks_of_tier[tier]:
                self._dead |= bit
            else:
                self._free_slots.append(slot)
        if replica.slot_of_tier:
            self._forget_memos()
        replica.slot_of_tier.clear()
        replica.blocks_of_tier.clear()
        replica.xor_of_tier.clear()
        replica.refused_blocks = 0

    def _forget_memos(self) -> None:
        self._folded.clear()
        self._members.clear()
