"""The contents of an engine's pool from its KV events, under this project's hashes, and the resulting router events.

Every request's ``cache_salt`` is the hex of its scope's root. vLLM puts the salt in the extra keys of a chain's first
block, and this project's scheduler puts the tenant's in those of the first block after public ones. The events thus
contain the roots. Other blocks have a parent that is already known. No state or order is shared with the code that
submits requests. A block without its parent is no hit and is not reported until the parent returns. Uses no socket.

A model's layers may form groups with separate blocks. The blocks of one leading group make the chains. With a window or
a state in some layers, a prompt can be served up to some blocks only, and only those are reported, under ``ENDS_TIER``.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
from router.protocol.events import ENDS_TIER, POOL_TIER, BlocksRemoved, BlocksStored, CacheCleared, Event
from router.protocol.samples import faded
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

_ROOT = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")

_FULL = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_BESIDE = _FULL | {"mamba"}
_WINDOW = frozenset({"sliding_window", "sliding_window_mla"})

_Changes = list[tuple[type[BlocksStored | BlocksRemoved | CacheCleared], bytes]]


class UnsupportedEvents(ValueError):
    """The engine's KV layout does not allow routing. The message contains the reason and the remedy."""


class VllmPool:
    """One engine's blocks that can be hit and are reported to routers. Iterates over this project's hashes of them.

    ``max_blocks``: the size of the engine's pool, never exceeded. ``states``: whether some layers keep a state instead
    of KV by token. ``xor``: of the words of the hashes; ``unplaced``: stored blocks without a known chain. One thread
    changes the pool, and any thread may read it.
    vLLM does not deduplicate: equal blocks are stored and removed once for each copy, and only the last removal counts.
    """

    def __init__(
        self, block_size: int, max_blocks: int, clock: Callable[[], float] = time.monotonic, *, states: bool = False
    ) -> None:
        self.xor = 0
        self.unplaced = 0
        self.tier = ENDS_TIER if states else POOL_TIER
        self._states = states
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._clock = clock
        self._lead: int | None = None
        self._blocks = Chains()
        self._ours: dict[BlockHash, bytes] = {}
        self._copies: Counter[BlockHash] = Counter()
        self._others: dict[int | None, Counter[BlockHash]] = {}
        self._told: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._told)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._told)

    @property
    def held_blocks(self) -> int:
        """The distinct blocks that vLLM's pool holds, in all groups."""
        return len(self._ours) + sum(map(len, self._others.values()))

    def translate(self, batch: KvEventBatch) -> list[Event]:
        """Apply a batch and return its router events. Adjacent events of one kind are joined.

        Raises UnsupportedEvents and MalformedBatch. The batch is then applied in part, so call ``forget``.
        """
        if batch.data_parallel_rank:
            raise UnsupportedEvents(
                f"the events are of data parallel rank {batch.data_parallel_rank}: each rank has a cache of its own, "
                "so give each a replica (data_parallel_size 1)"
            )
        changes: _Changes = []
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._clear(changes)
            elif event.medium not in (None, "GPU"):  # the pool on a CPU is also called GPU
                self._skip(event)
            elif isinstance(event, BlockRemoved):
                self._removed(event)
            elif self._leads(event):
                self._stored(event, changes)
            else:
                self._stored_beside(event)
        self._tell(changes)
        return _joined(changes, self.tier)

    def forget(self) -> list[Event]:
        """Start over after lost events, and return the router events.

        Blocks that the engine still holds, and blocks under them, are unknown until they are stored again.
        """
        self._clear([])
        return [CacheCleared()]

    def count_held(self, chain: bytes, most: int) -> int:
        """Return the number of held blocks among a packed chain's first ``most``. With holes it is only a hint."""
        most = min(most, len(chain) // HASH_BYTES)
        if self.tier == POOL_TIER:
            return count_leading(chain, most, self._told.__contains__)
        return next((blocks for blocks in range(most, 0, -1) if hash_at(chain, blocks - 1) in self._told), 0)

    def hit(self, chain: bytes, most: int) -> int:
        """Return ``count_held`` for a request that will use these blocks, and count the hit."""
        blocks = self.count_held(chain, most)
        held = self._blocks.get(hash_at(chain, blocks - 1)) if blocks else None
        if held is not None:
            now_s = self._clock()
            held.hits = faded(held.hits, held.used_s, now_s) + 1.0
            held.used_s = now_s
        return blocks

    def roots_of(self, chain: bytes, public_blocks: int) -> bytes:
        """Return the roots of a held chain as in requests: the first block's, and after public blocks the tenant's.

        The tenant's root is missing if no block is private. Blocks that are not held add b"".
        """
        firsts = [self._blocks.get(hash_at(chain, index)) for index in sorted({0, public_blocks})]
        return b"".join(first.root for first in firsts if first is not None)

    def blocks(self) -> Iterator[tuple[bytes, HeldBlock]]:
        """Yield the blocks that can be hit, with parents before children."""
        for block_hash in list(self._told):
            held = self._blocks.get(block_hash)
            if held is not None:  # the block may have been removed during the iteration
                yield block_hash, held

    def _clear(self, changes: _Changes) -> None:
        for known in (self._blocks, self._ours, self._copies, self._others, self._told):
            known.clear()
        self.xor = 0
        changes.append((CacheCleared, b""))

    def _leads(self, event: BlockStored) -> bool:
        """Return whether an event is of the leading group: of full attention, or the only one, with a window."""
        kind, group = event.kv_cache_spec_kind, event.group_idx or 0
        if self._lead is None and (kind in _FULL or (kind in _WINDOW and not self._states)):
            self._lead = group
            if kind in _WINDOW and event.kv_cache_spec_sliding_window:
                self._blocks.needed = -(-(event.kv_cache_spec_sliding_window - 1) // self._block_size)
                self.tier = ENDS_TIER
        return group == self._lead

    def _stored_beside(self, event: BlockStored) -> None:
        """Record another group's blocks. A second group with a window records none, so that no block is reported."""
        held = self._others.setdefault(event.group_idx, Counter())
        if event.kv_cache_spec_kind not in _BESIDE:
            self._skip(event)
            return
        held.update(event.block_hashes)
        self._touch(event.block_hashes)

    def _skip(self, event: BlockStored | BlockRemoved) -> None:
        if isinstance(event, BlockStored):
            self.unplaced += len(event.block_hashes)

    def _stored(self, event: BlockStored, changes: _Changes) -> None:
        if self._leaves_out(event):
            self._skip(event)
            return
        if self.held_blocks + len(event.block_hashes) > self._max_blocks:  # removals were lost, or the pool changed
            self._clear(changes)
        roots = [_root(_beside_adapter(event, keys)) for keys in event.extra_keys or [None] * len(event.block_hashes)]
        parent = b"" if event.parent_block_hash is None else self._ours.get(event.parent_block_hash)
        if not roots or None in roots or parent is None or not (parent or roots[0]):
            self._skip(event)
            return
        ids, size = np.array(event.token_ids, dtype=np.int32), self._block_size
        raw, last, hashes = ids.tobytes(), parent, list[bytes]()
        for first, end in pairwise([0, *(i for i in range(1, len(roots)) if roots[i]), len(roots)]):
            if root := roots[first]:
                last = private_parent(root, last) if last else root
            hashes += split_chain(hash_blocks(last, ids[first * size : end * size], size))
            last = hashes[-1]
        under = parent or roots[0] or b""
        for index, (theirs, ours) in enumerate(zip(event.block_hashes, hashes, strict=True)):
            self._copies[theirs] += 1
            if theirs not in self._ours:
                self._ours[theirs] = ours
                content = raw[4 * size * index : 4 * size * (index + 1)]
                self._blocks.add(ours, HeldBlock(under, roots[index] or b"", content, self._clock(), theirs))
            under = ours

    def _leaves_out(self, event: BlockStored) -> bool:
        """Return whether an event omits blocks of its tokens, so that the others cannot be identified.

        Raises UnsupportedEvents for a block size other than the routers', and MalformedBatch for a contradiction.
        """
        size, tokens, blocks = self._block_size, len(event.token_ids), len(event.block_hashes)
        if event.block_size != size:
            raise UnsupportedEvents(
                f"vLLM's blocks have {event.block_size} tokens and the routers' {size}: "
                f"set block_size to {event.block_size}"
            )
        if tokens % size or tokens < size * blocks:
            raise MalformedBatch(f"{tokens} tokens for {blocks} blocks of {size}")
        if event.extra_keys is not None and len(event.extra_keys) != blocks:
            raise MalformedBatch(f"{len(event.extra_keys)} extra keys for {blocks} blocks")
        return tokens > size * blocks

    def _removed(self, event: BlockRemoved) -> None:
        leads = (event.group_idx or 0) == (self._lead or 0)
        copies = self._copies if leads else self._others.setdefault(event.group_idx, Counter())
        for theirs in event.block_hashes:
            copies[theirs] -= 1
            if copies[theirs] > 0:
                continue
            del copies[theirs]
            if not leads:
                self._touch((theirs,))
            elif ours := self._ours.pop(theirs, None):
                self._blocks.drop(ours)

    def _touch(self, names: Iterable[BlockHash]) -> None:
        self._blocks.touched |= dict.fromkeys(self._ours[theirs] for theirs in names if theirs in self._ours)

    def _tell(self, changes: _Changes) -> None:
        """Append the touched blocks that a prompt can newly be served up to, and those that it no longer can."""
        stored, removed = list[bytes](), list[bytes]()
        for block in self._blocks.touched:
            held = self._blocks.get(block)
            told = held is not None and held.row == self._blocks.needed and self._served(held.theirs)
            if told != (block in self._told):
                (stored if told else removed).append(block)
                self.xor ^= block_word(block)
        self._blocks.touched.clear()
        self._told |= dict.fromkeys(stored)
        for block in removed:
            del self._told[block]
        changes += [(BlocksRemoved, block) for block in reversed(removed)] + [(BlocksStored, block) for block in stored]

    def _served(self, theirs: BlockHash) -> bool:
        """Return whether the groups beside the leading one can continue from a block."""
        known = bool(self._others) or not self._states
        return known and all(theirs in held for held in self._others.values())


def _joined(changes: _Changes, tier: str) -> list[Event]:
    """Return the changes as events, with adjacent changes of one kind joined. A clear drops all earlier events."""
    events: list[Event] = []
    for kind, same in groupby(changes, itemgetter(0)):
        if kind is CacheCleared:
            events = [CacheCleared()]
        else:
            events.append(kind(b"".join(block_hash for _, block_hash in same), tier))
    return events


def _beside_adapter(event: BlockStored, keys: tuple[object, ...] | None) -> list[object]:
    """Return a block's extra keys without the adapter's name. Keys are untagged, and the adapter's name is first."""
    found = list(keys or ())
    if event.lora_name is not None and event.lora_name in found:
        found.remove(event.lora_name)
    return found


def _root(keys: list[object]) -> bytes | None:
    """Return the root in a block's keys, a single key of 32 hex digits; b"" without keys, None for other keys."""
    match keys:
        case []:
            return b""
        case [str(salt)] if _ROOT.fullmatch(salt):
            return bytes.fromhex(salt)
    return None
