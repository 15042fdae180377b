"""What an engine's pool holds by its KV events, under our hashes; and what routers are to be told of it.

Every request's ``cache_salt`` is the hex of its scope's root. vLLM puts the salt in the extra keys of a chain's first
block, and our scheduler the tenant's in those of the first block after public ones, so the events name the roots; other
blocks hang under a parent known by then. Nothing is shared with the side that submits requests, and no order between
the two is needed. A block whose parent is gone is no hit until that is back, and is not told. Knows no socket.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np

from router.protocol.block_hash import (
    HASH_BYTES,
    PrefixScope,
    block_word,
    hash_at,
    hash_blocks,
    private_parent,
    split_chain,
)
from router.protocol.events import BlocksRemoved, BlocksStored, CacheCleared, Event
from serve_app.cache.prefix.block_index import HEAT_MEMORY_S, CachedBlock, count_leading
from serve_app.engine.protocol import Clock
from serve_app.engine.vllm.events.batches import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
    MalformedBatch,
)

OwnerOf = Callable[[bytes], tuple[PrefixScope, str] | None]
"""A root -> whose it is: the scope and a tenant of it. None: unknown."""

_ROOT = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")

_Changes = list[tuple[type[BlocksStored | BlocksRemoved | CacheCleared], bytes]]


class UnsupportedEvents(ValueError):
    """The engine keeps KV in a way that this project cannot route by; the message says which and what to do."""


@dataclass(slots=True)
class _Block:
    """``under``: the parent's hash, of a chain's first block the root. ``root``: what begins here, b"" for nothing.

    ``hits``, ``used_s``: as of ``CachedBlock``.
    """

    under: bytes
    root: bytes
    token_bytes: bytes
    used_s: float
    hits: float = 0.0


class VllmPool:
    """One engine's, its blocks that can be hit, parents first. Iterates over their hashes, by ours.

    ``max_blocks``: of the engine's pool; each holds one block at a time, so more are never held. ``xor``: of the words
    of the hashes. One thread changes it, any may ask.
    vLLM does not deduplicate: equal blocks are stored and removed once a copy, and only the last removal counts.
    """

    def __init__(self, block_size: int, max_blocks: int, clock: Clock = time.monotonic) -> None:
        self.xor = 0
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._clock = clock
        self._blocks: dict[bytes, _Block] = {}
        self._orphans: dict[bytes, _Block] = {}
        """Held, but not all that they hang under: where tenants evict by themselves, a public or shared parent may
        go before them."""
        self._children: dict[bytes, set[bytes]] = {}
        self._ours: dict[BlockHash, bytes] = {}
        self._copies: Counter[BlockHash] = Counter()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._blocks)

    def translate(self, batch: KvEventBatch) -> list[Event]:
        """Take a batch; return what it means to routers, neighbours of one kind joined.

        Raises UnsupportedEvents and MalformedBatch; what came before in the batch is taken, so ``forget`` then.
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
                continue
            refuse_unsupported(event, self._block_size)
            if isinstance(event, BlockStored):
                self._stored(event, changes)
            else:
                self._removed(event, changes)
        return _joined(changes)

    def forget(self) -> list[Event]:
        """Start anew, as where events were lost: return what to tell.

        What the engine goes on holding of before is not known any more, nor are blocks under it, until stored again.
        """
        self._clear([])
        return [CacheCleared()]

    def known(self, chain: bytes, most: int) -> int:
        """Return how many of a packed chain's first ``most`` blocks are held; a hint where a hole is among them."""
        return count_leading(chain, min(most, len(chain) // HASH_BYTES), self._blocks.__contains__)

    def hit(self, chain: bytes, most: int) -> int:
        """Do as ``known`` for a request that will use them, and count it: hot is what is used."""
        blocks = self.known(chain, most)
        held = self._blocks.get(hash_at(chain, blocks - 1)) if blocks else None
        if held is not None:
            now_s = self._clock()
            held.hits = held.hits * math.exp((held.used_s - now_s) / HEAT_MEMORY_S) + 1.0
            held.used_s = now_s
        return blocks

    def roots_of(self, chain: bytes, public_blocks: int) -> bytes:
        """Return the root of a chain that is held as requests have it: with public blocks the tenant's behind it.

        That is left out where no block is private, and what is not held is b"".
        """
        firsts = [self._blocks.get(hash_at(chain, index)) for index in sorted({0, public_blocks})]
        return b"".join(first.root for first in firsts if first is not None)

    def entries(self, owner_of: OwnerOf) -> list[CachedBlock]:
        """Return everything that begins under a root whose owner is known, parents first, numbered from 0."""
        numbers: dict[bytes, int] = {}
        entries: list[CachedBlock] = []
        for block_hash, held in list(self._blocks.items()):
            parent = numbers.get(held.under)
            above = None if parent is None else (entries[parent].scope, entries[parent].tenant)
            owner = owner_of(held.root) if held.root else above
            if owner is not None and (above is not None or held.root == held.under):
                number = numbers[block_hash] = len(entries)
                entries.append(
                    CachedBlock(
                        block_hash, number, parent, held.token_bytes, *owner, used_s=held.used_s, hits=held.hits
                    )
                )
        return entries

    def _clear(self, changes: _Changes) -> None:
        for known in (self._blocks, self._orphans, self._children, self._ours, self._copies):
            known.clear()
        self.xor = 0
        changes.append((CacheCleared, b""))

    def _stored(self, event: BlockStored, changes: _Changes) -> None:
        if len(self._ours) + len(event.block_hashes) > self._max_blocks:  # removals were lost, or it is another pool
            self._clear(changes)
        roots = [_root(_beside_adapter(event, keys)) for keys in event.extra_keys or [None] * len(event.block_hashes)]
        parent = b"" if event.parent_block_hash is None else self._ours.get(event.parent_block_hash)
        if not roots or None in roots or parent is None or not (parent or roots[0]):
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
                self._orphans[ours] = _Block(under, roots[index] or b"", content, self._clock())
                self._children.setdefault(under, set()).add(ours)
                if under in self._blocks or under == roots[index]:
                    self._move(ours, self._orphans, self._blocks, changes)
            under = ours

    def _move(self, top: bytes, source: dict[bytes, _Block], target: dict[bytes, _Block], changes: _Changes) -> None:
        """Tell of a block and all that hangs under it: that they can be hit from now on, or no more."""
        below = [top]
        for block_hash in below:
            target[block_hash] = source.pop(block_hash)
            self.xor ^= block_word(block_hash)
            below += self._children.get(block_hash, ())
        if target is self._blocks:
            changes += [(BlocksStored, block_hash) for block_hash in below]
        else:
            changes += [(BlocksRemoved, block_hash) for block_hash in reversed(below)]

    def _removed(self, event: BlockRemoved, changes: _Changes) -> None:
        for theirs in event.block_hashes:
            self._copies[theirs] -= 1
            if self._copies[theirs] > 0:
                continue
            del self._copies[theirs]
            ours = self._ours.pop(theirs, None)
            if ours is None:
                continue
            if ours in self._blocks:
                self._move(ours, self._blocks, self._orphans, changes)
            under = self._orphans.pop(ours).under
            self._children[under].discard(ours)
            if not self._children[under]:
                del self._children[under]


def _joined(changes: _Changes) -> list[Event]:
    """Return events, those of neighbours of one kind as one; clearing makes what came before needless."""
    events: list[Event] = []
    for kind, same in groupby(changes, itemgetter(0)):
        if kind is CacheCleared:
            events = [CacheCleared()]
        else:
            events.append(kind(b"".join(block_hash for _, block_hash in same)))
    return events


def refuse_unsupported(event: BlockStored | BlockRemoved, block_size: int) -> None:
    """Raise UnsupportedEvents where equal tokens may not share a block, MalformedBatch for a contradiction."""
    if event.group_idx or event.medium not in (None, "GPU"):  # which the pool of a CPU is called, too
        raise UnsupportedEvents(
            f"blocks lie in {event.medium!r}, group {event.group_idx} of the model's KV: a directory follows one group "
            "in the pool that vLLM computes in; set disable_hybrid_kv_cache_manager, and switch KV offloading off"
        )
    if isinstance(event, BlockRemoved):
        return
    attention = event.kv_cache_spec_kind in (None, "full_attention", "mla_attention")
    if not attention or event.kv_cache_spec_sliding_window is not None:
        raise UnsupportedEvents(
            f"the KV is of kind {event.kv_cache_spec_kind!r} (window: {event.kv_cache_spec_sliding_window}): only "
            "blocks of full attention or MLA serve every prompt that begins with them; use such a model"
        )
    if event.block_size != block_size:
        raise UnsupportedEvents(
            f"vLLM's blocks have {event.block_size} tokens and the routers' {block_size}: "
            f"set block_size to {event.block_size}"
        )
    blocks, tokens = len(event.block_hashes), len(event.token_ids)
    if tokens != block_size * blocks:
        raise UnsupportedEvents(
            f"an event has {tokens} tokens for {blocks} blocks of {block_size}: blocks were left out, as models with "
            "sliding windows or Mamba layers do"
        )
    if event.extra_keys is not None and len(event.extra_keys) != blocks:
        raise MalformedBatch(f"{len(event.extra_keys)} extra keys for {blocks} blocks")


def _beside_adapter(event: BlockStored, keys: tuple[object, ...] | None) -> list[object]:
    """Return a block's extra keys without the adapter's: they are untagged, and the adapter's comes first."""
    found = list(keys or ())
    if event.lora_name is not None and event.lora_name in found:
        found.remove(event.lora_name)
    return found


def _root(keys: list[object]) -> bytes | None:
    """Return the root that a block's keys name: the one key there is, 32 hex digits. None: it is another; b"": none."""
    match keys:
        case []:
            return b""
        case [str(salt)] if _ROOT.fullmatch(salt):
            return bytes.fromhex(salt)
    return None
