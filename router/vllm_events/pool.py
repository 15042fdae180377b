"""The contents of an engine's pool from its KV events, under this project's hashes, and the resulting router events.

Every request's ``cache_salt`` is the hex of its scope's root. vLLM puts the salt in the extra keys of a chain's first
block, and this project's scheduler puts the tenant's in those of the first block after public ones. The events thus
contain the roots. Other blocks have a parent that is already known. No state or order is shared with the code that
submits requests. A block without its parent is no hit and is not reported until the parent returns. Uses no socket.

A model's layers may form groups with separate blocks, which have the same names. A prompt is served up to a block if
each group can continue behind it: with full attention from all blocks so far, with a window from its last ones, with a
state from the block alone. With windows or states only such blocks are reported, under ``ENDS_TIER``.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np

from router.protocol.block_hash import (
    HASH_BYTES,
    block_word,
    count_leading,
    hash_at,
    hash_blocks,
    private_parent,
    split_chain,
)
from router.protocol.events import (
    ENDS_TIER,
    HOST_TIER,
    POOL_TIER,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheDigest,
    Event,
    TierDigest,
)
from router.protocol.samples import faded
from router.settings import DEFAULTS
from router.vllm_events.batches import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Chains,
    HeldBlock,
    KvEventBatch,
    MalformedBatch,
)
from router.vllm_events.host import HostBlocks

_ROOT = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")

_FULL = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_WINDOW = frozenset({"sliding_window", "sliding_window_mla"})
_STATE = "mamba"

_MOST_LEFT = 65_536
"""Most blocks that the pool lost and whose copies in host memory may still be reported."""

_MOST_GROUPS = 256

_Changes = list[tuple[type[BlocksStored | BlocksRemoved | CacheCleared], str, bytes]]
"""Kind, tier and block."""


class UnsupportedEvents(ValueError):
    """The engine's KV layout does not allow routing. The message contains the reason and the remedy."""


@dataclass(slots=True)
class _Group:
    """One group's blocks. ``scale``: how many of the routers' blocks each covers; ``copies``: their number by name.

    ``chains``: None if the group needs no earlier block (a state), or if its rule is unknown (``known`` False).
    """

    known: bool
    scale: int
    chains: Chains | None
    copies: Counter[BlockHash] = field(default_factory=Counter)


class FollowedPool:
    """One engine's blocks that can be hit and are reported to routers. Iterates over this project's hashes of them.

    ``max_blocks``: the size of the engine's pool, never exceeded; ``most_below``: the most that are known of its host
    memory. ``xor``: of the words of the hashes; ``unplaced``:
    stored blocks without a known chain. One thread changes the pool, and any thread may read it.
    vLLM does not deduplicate: equal blocks are stored and removed once for each copy, and only the last removal counts.
    If its names of blocks cover tokens after them, as for drafts, a block has a name for each continuation. A prompt
    with another one then finds a block less than predicted.
    """

    def __init__(
        self,
        block_size: int,
        max_blocks: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        most_below: int = DEFAULTS.max_blocks,
        far: bool = False,
    ) -> None:
        """``far``: a server that others use too: its events are not trusted, and may tell again of blocks it has."""
        self.xor = 0
        self.unplaced = 0
        self.tier = POOL_TIER
        self._rank: int | None = None
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._clock = clock
        self._far = far
        self._groups: dict[int, _Group] = {}
        self._touched: dict[bytes, None] = {}
        self._blocks = Chains(math.inf, self._touched)
        """Of the group that tells most about a block: one with full attention, or else with the longest window."""
        self._ours: dict[BlockHash, bytes] = {}
        self._names: dict[bytes, set[BlockHash]] = {}
        """Blocks with several names."""
        self._reported: dict[bytes, None] = {}
        self._host = HostBlocks(self._reported, most_below, min(max_blocks, _MOST_LEFT))

    def __len__(self) -> int:
        return len(self._reported)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._reported)

    def get(self, block: bytes) -> HeldBlock | None:
        """Return a block of the pool that can be hit (any thread)."""
        return self._blocks.get(block) if block in self._reported else None

    @property
    def held_blocks(self) -> int:
        """The distinct blocks that vLLM's pool holds, in all groups."""
        return sum(len(group.copies) for group in self._groups.values())

    @property
    def host_blocks(self) -> int:
        """The blocks that host memory serves."""
        return len(self._host.reported)

    def translate(self, batch: KvEventBatch) -> list[Event]:
        """Apply a batch and return its router events. Adjacent events of one kind are joined.

        Raises UnsupportedEvents and MalformedBatch. The batch is then applied in part, so call ``forget``.
        """
        rank = batch.data_parallel_rank or 0
        if self._rank not in (None, rank):
            raise UnsupportedEvents(
                f"the events are of data parallel ranks {self._rank} and {rank}: each rank has a cache of its own, "
                "so follow each by its own address"
            )
        self._rank = rank
        changes: _Changes = []
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._clear(changes)
            elif (event.medium or "GPU").upper() != "GPU":  # the pool on a CPU is also called GPU
                self._offloaded(event)
            elif isinstance(event, BlockRemoved):
                self._removed(event)
            else:
                self._stored(event, changes)
        if scales := [group.scale for group in self._groups.values() if group.chains is not None]:
            self._check_size(min(scales) * self._block_size, min(scales) == 1)
        self._tell(changes)
        return _joined(changes)

    def forget(self) -> list[Event]:
        """Start over after lost events, and return the router events.

        Blocks that the engine still holds, and blocks under them, are unknown until they are stored again.
        """
        if self._far:  # it may be another process, of another rank
            self._rank = None
        self._clear([])
        return [CacheCleared()]

    def count_held(self, chain: bytes, most: int) -> int:
        """Return the number of held blocks among a packed chain's first ``most``. With holes it is only a hint."""
        most = min(most, len(chain) // HASH_BYTES)
        if self.tier == POOL_TIER:
            served, below = self._reported, self._host.reported
            return count_leading(
                chain, most, (lambda block: block in served or block in below) if below else served.__contains__
            )
        return next((blocks for blocks in range(most, 0, -1) if hash_at(chain, blocks - 1) in self._reported), 0)

    def hit(self, chain: bytes, most: int) -> int:
        """Return ``count_held`` for a request that will use these blocks, and count the hit."""
        blocks = self.count_held(chain, most)
        entry = self._blocks.get(hash_at(chain, blocks - 1)) if blocks else None
        if entry is not None:
            now_s = self._clock()
            entry.hits = faded(entry.hits, entry.used_s, now_s) + 1.0
            entry.used_s = now_s
        return blocks

    def roots_of(self, chain: bytes, public_blocks: int) -> bytes:
        """Return the roots of a held chain as in requests: the first block's, and after public blocks the tenant's.

        The tenant's root is missing if no block is private. Blocks that are not held add b"".
        """
        hashes = [hash_at(chain, index) for index in sorted({0, public_blocks})]
        firsts = [self._blocks.get(block) or self._host.get(block) for block in hashes]
        return b"".join(first.root for first in firsts if first is not None)

    def snapshot(self) -> list[Event]:
        """Return the events that tell of all blocks anew."""
        below = [BlocksStored(b"".join(self._host.reported), HOST_TIER)] if self._host.reported else []
        return [CacheCleared(), BlocksStored(b"".join(self), self.tier), *below]

    def digest(self) -> CacheDigest:
        """Return the digest of the reported blocks."""
        below = TierDigest(HOST_TIER, len(self._host.reported), self._host.xor)
        return CacheDigest((TierDigest(self.tier, len(self), self.xor), *((below,) if self._host.reported else ())))

    def blocks(self) -> Iterator[tuple[bytes, HeldBlock]]:
        """Yield the blocks that can be hit, with parents before children."""
        for block_hash in list(self._reported):
            entry = self._blocks.get(block_hash)
            if entry is not None:  # the block may have been removed during the iteration
                yield block_hash, entry

    def _clear(self, changes: _Changes) -> None:
        for group in self._groups.values():
            group.copies.clear()
            if group.chains is not None:
                group.chains.clear()
        for memory in (self._touched, self._ours, self._names, self._reported, self._host):
            memory.clear()
        self.xor = 0
        changes.append((CacheCleared, "", b""))

    def _learn(self, event: BlockStored, changes: _Changes) -> _Group:
        """Return an event's group, which is new. Without it, other groups' blocks were reported too early.

        Raises UnsupportedEvents for more groups than any model has.
        """
        if len(self._groups) >= _MOST_GROUPS:
            raise UnsupportedEvents(f"its events are of more than {_MOST_GROUPS} groups of layers")
        kind, window, size = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window, event.block_size
        chains = None
        if kind in _FULL or (kind in _WINDOW and window):
            needed = math.inf if kind in _FULL or not window else max(1, -(-(window - 1) // size))
            chains = Chains(needed, self._touched)
            if not any(group.chains is self._blocks for group in self._groups.values()) or needed > self._blocks.needed:
                self._blocks = chains
        group = self._groups[event.group_idx or 0] = _Group(
            chains is not None or kind == _STATE, size // self._block_size, chains
        )
        if kind not in _FULL or size > self._block_size:
            self.tier = ENDS_TIER
        self._tell_anew(changes)
        return group

    def _tell_anew(self, changes: _Changes) -> None:
        if self._reported:
            self._touched |= self._reported
            self._reported.clear()
            self._host.clear()
            self.xor = 0
            changes.append((CacheCleared, "", b""))

    def _skip(self, event: BlockStored | BlockRemoved) -> None:
        if isinstance(event, BlockStored):
            self.unplaced += len(event.block_hashes)

    def _offloaded(self, event: BlockStored | BlockRemoved) -> None:
        """Follow host memory, unless layers form groups: what their blocks there serve is not followed."""
        of_host = (event.medium or "").upper() == "CPU"
        followed = of_host and self.tier == POOL_TIER and len(self._groups) == 1
        for name in event.block_hashes:
            if isinstance(event, BlockRemoved):
                if of_host:
                    self._host.drop(name)
            else:
                ours = self._ours.get(name)
                entry = None if ours is None else self._blocks.get(ours)
                self.unplaced += not (followed and self._host.add(name, ours, entry))

    def _stored(self, event: BlockStored, changes: _Changes) -> None:
        if event.block_size <= 0:
            raise MalformedBatch(f"blocks of {event.block_size} tokens")
        if len(event.block_hashes) > self._max_blocks:
            raise MalformedBatch(f"{len(event.block_hashes):,} blocks of a pool of {self._max_blocks:,}")
        group = self._groups.get(event.group_idx or 0) or self._learn(event, changes)
        if not group.known:
            self._skip(event)
            return
        whole = group.chains is None or self._is_whole(event)
        if group.chains is not None and event.block_size != group.scale * self._block_size:
            if event.block_size < group.scale * self._block_size:  # the end of a prompt, part of a block: no hit
                return
            group.scale, self.tier = event.block_size // self._block_size, ENDS_TIER
            group.chains.clear()
            group.copies.clear()
            self._tell_anew(changes)
        again = self._reported_again(group, event)
        new = sum(not (again and name in group.copies) for name in event.block_hashes)
        if self.held_blocks + new > self._max_blocks:  # removals were lost, or the pool changed
            self._clear(changes)
        if group.chains is None:
            group.copies.update(name for name in event.block_hashes if not (again and name in group.copies))
            self._touched |= dict.fromkeys(self._ours[name] for name in event.block_hashes if name in self._ours)
            return
        roots = _roots(event, self._block_size)
        parent = b"" if event.parent_block_hash is None else self._ours.get(event.parent_block_hash)
        if not whole or roots is None or parent is None or not (parent or 0 in roots) or not event.block_hashes:
            self._skip(event)
            return
        ids, size = np.array(event.token_ids, dtype=np.int32), event.block_size
        hashes = [self._ours[name] for name in event.block_hashes if name in self._ours and not self._far]
        if len(hashes) < len(event.block_hashes):
            hashes, last = [], parent
            for first, end in pairwise(sorted({0, *roots, len(ids)})):
                if root := roots.get(first):
                    last = private_parent(root, last) if last else root
                hashes += split_chain(hash_blocks(last, ids[first:end], self._block_size))
                last = hashes[-1]
            hashes = hashes[group.scale - 1 :: group.scale]
        if any(self._ours.get(theirs, ours) != ours for theirs, ours in zip(event.block_hashes, hashes, strict=True)):
            raise MalformedBatch("a block's name stood for another prefix")
        raw = ids.tobytes() if group.chains is self._blocks else b""
        under = parent or roots[0]
        for index, (theirs, ours) in enumerate(zip(event.block_hashes, hashes, strict=True)):
            group.copies[theirs] += not (again and theirs in group.copies)
            self._ours[theirs] = ours
            entry = group.chains.get(ours)
            if entry is not None and entry.theirs != theirs:
                self._names.setdefault(ours, {entry.theirs}).add(theirs)
                self._touched[ours] = None
            elif entry is None:
                content = raw[4 * size * index : 4 * size * (index + 1)]
                group.chains.add(ours, HeldBlock(under, roots.get(size * index, b""), content, self._clock(), theirs))
            under = ours

    def _reported_again(self, group: _Group, event: BlockStored) -> bool:
        """Return whether an event tells of blocks that were stored before, and so of no further copies of them.

        Newer versions of vLLM do so for requests that ask for it (``kv_cache_report_mode``), from a chain's beginning.
        Older ones do not mark it. Equal blocks that a request computed for itself may then count once, and be forgotten
        with the first one's removal: rather too few blocks are known than too many.
        """
        if not self._far or event.origin is not None:
            return event.origin == "REUSED"
        return event.parent_block_hash is None and all(name in group.copies for name in event.block_hashes)

    def _is_whole(self, event: BlockStored) -> bool:
        """Return whether an event has all blocks of its tokens. Otherwise only other groups can identify them.

        Raises UnsupportedEvents for a block size that is none of the routers', and MalformedBatch for a contradiction.
        """
        size, tokens, blocks = event.block_size, len(event.token_ids), len(event.block_hashes)
        self._check_size(size, size % self._block_size == 0)
        if tokens % size or tokens < size * blocks:
            raise MalformedBatch(f"{tokens} tokens for {blocks} blocks of {size}")
        if event.extra_keys is not None and len(event.extra_keys) != blocks:
            raise MalformedBatch(f"{len(event.extra_keys)} extra keys for {blocks} blocks")
        return tokens == size * blocks

    def _check_size(self, size: int, fits: bool) -> None:
        if not fits:
            raise UnsupportedEvents(
                f"vLLM's blocks have {size} tokens and the routers' {self._block_size}: set block_size to {size}"
            )

    def _removed(self, event: BlockRemoved) -> None:
        group = self._groups.get(event.group_idx or 0)
        if group is None or not group.known:
            return
        for theirs in event.block_hashes:
            group.copies[theirs] -= 1
            if group.copies[theirs] > 0:
                continue
            del group.copies[theirs]
            ours = self._ours.get(theirs)
            if ours is None:
                continue
            if group.chains is None:
                self._touched[ours] = None
            elif ours in group.chains:
                self._host.left(theirs, ours, group.chains[ours])
                if (other := next((name for name in self._names.get(ours, ()) if name in group.copies), None)) is None:
                    group.chains.drop(ours)
                else:
                    group.chains[ours].theirs = other
                    self._touched[ours] = None
            if not any(theirs in other.copies for other in self._groups.values()):
                del self._ours[theirs]
                if len(names := self._names.get(ours, set()) - {theirs}) > 1:
                    self._names[ours] = names
                else:
                    self._names.pop(ours, None)

    def _tell(self, changes: _Changes) -> None:
        """Append the touched blocks that a prompt can newly be served up to, and those that it no longer can."""
        stored, removed = list[bytes](), list[bytes]()
        for block in self._touched:
            served = self._serves(block)
            if served != (block in self._reported):
                (stored if served else removed).append(block)
                self.xor ^= block_word(block)
        self._touched.clear()
        self._reported |= dict.fromkeys(stored)
        for block in removed:
            del self._reported[block]
        below, gone = self._host.changes((*stored, *removed))
        for tier, lost, gained in ((self.tier, removed, stored), (HOST_TIER, gone, below)):
            changes += [(BlocksRemoved, tier, block) for block in reversed(lost)]
            changes += [(BlocksStored, tier, block) for block in gained]

    def _serves(self, block: bytes) -> bool:
        """Return whether all groups can continue behind a block."""
        entry, groups = self._blocks.get(block), self._groups.values()
        return entry is not None and any(
            all(
                group.known and name in group.copies if group.chains is None else group.chains.serves(block)
                for group in groups
            )
            for name in self._names.get(block, (entry.theirs,))
        )


def _joined(changes: _Changes) -> list[Event]:
    """Return the changes as events, with adjacent changes of one kind joined. A clear drops all earlier events."""
    events: list[Event] = []
    for (kind, tier), same in groupby(changes, itemgetter(0, 1)):
        if kind is CacheCleared:
            events = [CacheCleared()]
        else:
            events.append(kind(b"".join(block_hash for *_, block_hash in same), tier))
    return events


def _beside_adapter(event: BlockStored, keys: tuple[object, ...] | None) -> list[object]:
    """Return a block's extra keys without the adapter's name. Keys are untagged, and the adapter's name is first."""
    entries = list(keys or ())
    if event.lora_name is not None and event.lora_name in entries:
        entries.remove(event.lora_name)
    return entries


def _roots(event: BlockStored, unit: int) -> dict[int, bytes] | None:
    """Return the roots in an event's extra keys by the token where their scope begins, or None for other keys.

    A root is 32 hex digits. It begins with its block, or so many tokens later as the number behind it says, a multiple
    of ``unit``.
    """
    roots: dict[int, bytes] = {}
    if event.cache_salt is not None:
        first = event.parent_block_hash is None and _ROOT.fullmatch(event.cache_salt)
        return {0: bytes.fromhex(event.cache_salt)} if first else {}
    for index, keys in enumerate(event.extra_keys or ()):
        left = _beside_adapter(event, keys)
        while left:
            salt, at = left.pop(), 0
            if isinstance(salt, int) and left:
                at, salt = salt, left.pop()
            fits = 0 <= at < event.block_size and not at % unit and index * event.block_size + at not in roots
            if not fits or not isinstance(salt, str) or not _ROOT.fullmatch(salt):
                return None
            roots[index * event.block_size + at] = bytes.fromhex(salt)
    return roots
