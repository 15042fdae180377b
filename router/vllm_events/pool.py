"""What an engine's pool holds by its KV events, under our hashes; and what routers are to be told of it.

Every request's ``cache_salt`` is the hex of its scope's root. vLLM puts the salt in the extra keys of a chain's first
block, and our scheduler the tenant's in those of the first block after public ones, so the events name the roots; other
blocks hang under a parent known by then. Nothing is shared with the side that submits requests, and no order between
the two is needed. A block whose parent is gone is no hit until that is back, and is not told. Knows no socket.

A model's layers may be in groups with blocks of their own. One leads: its blocks make the chains. With a window or a
state in some layers a prompt is served up to some of them only: those are told, under ``ENDS_TIER``, and no others.
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
from router.protocol.heat import faded
from router.vllm_events.batches import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
    MalformedBatch,
)
from router.vllm_events.chains import Chains, HeldBlock

_ROOT = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")

_FULL = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_BESIDE = _FULL | {"mamba"}
_WINDOW = frozenset({"sliding_window", "sliding_window_mla"})

_Changes = list[tuple[type[BlocksStored | BlocksRemoved | CacheCleared], bytes]]


class UnsupportedEvents(ValueError):
    """The engine keeps KV in a way that this project cannot route by; the message says which and what to do."""


class VllmPool:
    """One engine's: the blocks that routers are told of, as they can be hit. Iterates over their hashes, by ours.

    ``max_blocks``: of the engine's pool; each holds one block at a time, so more are never held. ``states``: whether
    some layers keep a state in place of KV by token. ``xor``: of the words of the hashes; ``unplaced``: stored blocks
    that no chain could be told for. One thread changes it, any may ask.
    vLLM does not deduplicate: equal blocks are stored and removed once a copy, and only the last removal counts.
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
        """Blocks of vLLM's pool that hold something, in all groups; copies are one."""
        return len(self._ours) + sum(map(len, self._others.values()))

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
            elif event.medium not in (None, "GPU"):  # which the pool of a CPU is called, too
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
        """Start anew, as where events were lost: return what to tell.

        What the engine goes on holding of before is not known any more, nor are blocks under it, until stored again.
        """
        self._clear([])
        return [CacheCleared()]

    def known(self, chain: bytes, most: int) -> int:
        """Return how many of a packed chain's first ``most`` blocks are held; a hint where a hole is among them."""
        most = min(most, len(chain) // HASH_BYTES)
        if self.tier == POOL_TIER:
            return count_leading(chain, most, self._told.__contains__)
        return next((blocks for blocks in range(most, 0, -1) if hash_at(chain, blocks - 1) in self._told), 0)

    def hit(self, chain: bytes, most: int) -> int:
        """Do as ``known`` for a request that will use them, and count it: hot is what is used."""
        blocks = self.known(chain, most)
        held = self._blocks.get(hash_at(chain, blocks - 1)) if blocks else None
        if held is not None:
            now_s = self._clock()
            held.hits = faded(held.hits, held.used_s, now_s) + 1.0
            held.used_s = now_s
        return blocks

    def roots_of(self, chain: bytes, public_blocks: int) -> bytes:
        """Return the root of a chain that is held as requests have it: with public blocks the tenant's behind it.

        That is left out where no block is private, and what is not held is b"".
        """
        firsts = [self._blocks.get(hash_at(chain, index)) for index in sorted({0, public_blocks})]
        return b"".join(first.root for first in firsts if first is not None)

    def held(self) -> Iterator[tuple[bytes, HeldBlock]]:
        """Yield what can be hit, a parent before what hangs under it."""
        for block_hash in list(self._told):
            held = self._blocks.get(block_hash)
            if held is not None:  # it may be gone meanwhile
                yield block_hash, held

    def _clear(self, changes: _Changes) -> None:
        for known in (self._blocks, self._ours, self._copies, self._others, self._told):
            known.clear()
        self.xor = 0
        changes.append((CacheCleared, b""))

    def _leads(self, event: BlockStored) -> bool:
        """Return whether an event is of the group that leads: of full attention, else the only one, with a window."""
        kind, group = event.kv_cache_spec_kind, event.group_idx or 0
        if self._lead is None and (kind in _FULL or (kind in _WINDOW and not self._states)):
            self._lead = group
            if kind in _WINDOW and event.kv_cache_spec_sliding_window:
                self._blocks.needed = -(-(event.kv_cache_spec_sliding_window - 1) // self._block_size)
                self.tier = ENDS_TIER
        return group == self._lead

    def _stored_beside(self, event: BlockStored) -> None:
        """Take what another group holds: of one with a window nothing, so that nothing is told."""
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
        if self.held_blocks + len(event.block_hashes) > self._max_blocks:  # removals were lost, or it is another pool
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
        """Return whether an event tells of some of its tokens' blocks only, and so not of which.

        Raises UnsupportedEvents for other blocks than the routers', MalformedBatch for a contradiction.
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
        """Note which of the touched blocks a prompt can be served up to now and could not before, or the reverse."""
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
        """Return whether the groups beside the one that leads can go on from a block."""
        known = bool(self._others) or not self._states
        return known and all(theirs in held for held in self._others.values())


def _joined(changes: _Changes, tier: str) -> list[Event]:
    """Return events, those of neighbours of one kind as one; clearing makes what came before needless."""
    events: list[Event] = []
    for kind, same in groupby(changes, itemgetter(0)):
        if kind is CacheCleared:
            events = [CacheCleared()]
        else:
            events.append(kind(b"".join(block_hash for _, block_hash in same), tier))
    return events


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
