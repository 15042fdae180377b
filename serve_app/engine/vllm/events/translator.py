"""vLLM's KV events -> the events routers understand, under our hashes; holds what the engine's pool holds.

Every request's ``cache_salt`` is the hex of its scope's root. vLLM puts the salt in the extra keys of a chain's first
block, so the event that stores that block names the root; later blocks hang under a parent known by then. Nothing is
shared with the side that submits requests, and no order between the two is needed. Knows no socket and no thread.
"""

from __future__ import annotations

import string
import time
from array import array
from dataclasses import dataclass

import numpy as np

from router.protocol.block_hash import HASH_BYTES, TokenArray, hash_at, hash_blocks
from router.protocol.events import BlocksRemoved, BlocksStored, CacheCleared, Event, TierDigest
from serve_app.engine.protocol import Clock
from serve_app.engine.vllm.events.batches import (
    MEDIUM_GPU,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
    MalformedBatch,
    UnknownEvent,
)
from serve_app.engine.vllm.events.held_blocks import HeldBlocks

ATTENTION_KINDS = frozenset({"full_attention", "mla_attention"})
"""Kinds of KV where a block that is held can be used if all before it are."""

_HEX = frozenset(string.digits + "abcdef")


class UnsupportedEvents(ValueError):
    """The engine keeps KV in a way that this project cannot route by; the message says which and what to do."""


@dataclass(slots=True)
class TranslationCounts:
    """What a translator has seen since its start, in blocks where nothing else is said.

    ``duplicate_blocks``: further copies of blocks that were held. ``orphan_blocks``: stored under a parent that is not
    known, as after a loss. ``unsalted_blocks``: stored without a root of ours. ``unknown_removals``: removed without
    having been known. ``stale_blocks``: of before a reset that had been told already. ``collisions``: a hash of
    vLLM's that came again for other tokens. ``clears``, ``unknown_events``: events. ``restarts``: how often more was
    held than the pool has room for, so that all was forgotten.
    """

    stored_blocks: int = 0
    removed_blocks: int = 0
    duplicate_blocks: int = 0
    orphan_blocks: int = 0
    unsalted_blocks: int = 0
    unknown_removals: int = 0
    stale_blocks: int = 0
    collisions: int = 0
    clears: int = 0
    unknown_events: int = 0
    restarts: int = 0


class _Events:
    """Events in order; hashes of neighbours of one kind are joined as they come, as evictions come one by one."""

    def __init__(self) -> None:
        self._done: list[Event] = []
        self._kind: type[BlocksStored | BlocksRemoved] = BlocksStored
        self._hashes = bytearray()

    def add(self, kind: type[BlocksStored | BlocksRemoved], hashes: bytearray) -> None:
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._hashes += hashes

    def clear(self) -> None:
        """Add that everything is gone, which makes what came before needless."""
        self._done = [CacheCleared()]
        self._hashes.clear()

    def all(self) -> list[Event]:
        self._flush()
        return self._done

    def _flush(self) -> None:
        if self._hashes:
            self._done.append(self._kind(bytes(self._hashes)))
            self._hashes.clear()


class Translator:
    """One engine's pool by its events. Not thread-safe.

    ``max_blocks``: blocks of the engine's pool; each holds one block at a time, so more are never held.
    vLLM does not deduplicate: equal blocks are stored and removed once a copy, and only the last removal counts.
    """

    def __init__(self, block_size: int, max_blocks: int, *, clock: Clock = time.monotonic) -> None:
        if block_size < 1 or max_blocks < 1:
            raise ValueError("block_size and max_blocks must be at least 1")
        self.counts = TranslationCounts()
        self.held = HeldBlocks(clock)
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._ours: dict[BlockHash, bytes] = {}
        self._more_copies: dict[BlockHash, int] = {}
        self._copies = 0
        self._clears_seen = 0
        self._clears_emitted = 0

    @property
    def num_blocks(self) -> int:
        """Distinct blocks held."""
        return len(self.held)

    @property
    def digest(self) -> TierDigest:
        """What was told so far, if it was all taken in."""
        return TierDigest("pool", len(self.held), self.held.xor)

    def announce(self) -> list[Event]:
        """Return events that tell anew of everything held, in the order in which it was stored."""
        return [CacheCleared(), BlocksStored(b"".join(dict.fromkeys(self._ours.values())))]

    def known_blocks(self, chain: bytes, most: int) -> int:
        """Return how many of a packed chain's first ``most`` blocks are held; a hint where a hole is among them."""
        return self.held.known(chain, most)

    def translate(self, batch: KvEventBatch) -> list[Event]:
        """Return what a batch means to routers, neighbours of one kind joined.

        Raises UnsupportedEvents and MalformedBatch; what came before in the batch is taken, so ``forget`` then.
        """
        if batch.data_parallel_rank:
            raise UnsupportedEvents(
                f"the events are of data parallel rank {batch.data_parallel_rank}: each rank has a cache of its own, "
                "so give each a replica (data_parallel_size 1)"
            )
        out = _Events()
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._stored(event, out)
            elif isinstance(event, BlockRemoved):
                self._removed(event, out)
            elif isinstance(event, UnknownEvent):
                self.counts.unknown_events += 1
            else:
                self.counts.clears += 1
                self._clears_seen += 1
                self._clear(out)
        return out.all()

    def before_reset(self) -> int:
        """Return what ``after_reset`` needs; to be called before vLLM is asked to reset its prefix cache."""
        return max(self._clears_seen, self._clears_emitted)

    def after_reset(self, mark: int) -> list[Event]:
        """Return what to tell of a reset that has happened: vLLM says so with the next step's events, hours later.

        Until then what comes is of before the reset, and ignored. Empty where vLLM's own word came first, or where
        events were lost meanwhile: its word may be among those.
        """
        self._clears_emitted = max(self._clears_emitted, mark + 1)
        out = _Events()
        if self.waits_for_reset:
            self._clear(out)
        return out.all()

    def forget(self) -> list[Event]:
        """Start anew, since events were lost: return what to tell.

        What the engine goes on holding of before is not known any more, nor are blocks under it, until stored again.
        """
        # One more than any mark so far: nothing that was begun before is waited for, as its event may be lost.
        self._clears_seen = self._clears_emitted = max(self._clears_seen, self._clears_emitted) + 1
        out = _Events()
        self._clear(out)
        return out.all()

    @property
    def waits_for_reset(self) -> bool:
        """Whether a reset was emitted that the engine has not said so of: what comes is of before it."""
        return self._clears_seen < self._clears_emitted

    def _clear(self, out: _Events) -> None:
        self._ours.clear()
        self._more_copies.clear()
        self.held.clear()
        self._copies = 0
        out.clear()

    def _stored(self, event: BlockStored, out: _Events) -> None:
        refuse_unsupported(event, self._block_size)
        blocks = len(event.block_hashes)
        if self.waits_for_reset:
            self.counts.stale_blocks += blocks
            return
        if self._copies + blocks > self._max_blocks:  # removals were lost on the way, or it is another pool
            self.counts.restarts += 1
            self._clear(out)
        parent = self._parent(event)
        if parent is None:
            return
        ids = token_array(event)
        chain, raw, step = hash_blocks(parent, ids, self._block_size), ids.tobytes(), 4 * self._block_size
        new = bytearray()
        for index, theirs in enumerate(event.block_hashes):
            ours = hash_at(chain, index)
            known = self._ours.get(theirs)
            if known is None:
                self._ours[theirs] = ours
                under = hash_at(chain, index - 1) if index else parent
                self.held.add(ours, under, raw[step * index : step * (index + 1)])
                new += ours
            else:
                self._more_copies[theirs] = self._more_copies.get(theirs, 0) + 1
                self.counts.duplicate_blocks += 1
                self.counts.collisions += known != ours
        self._copies += blocks
        self.counts.stored_blocks += blocks
        out.add(BlocksStored, new)

    def _parent(self, event: BlockStored) -> bytes | None:
        """Return what the event's first block hangs under, by our hashes; None, counted, where it is not known."""
        keys = event.extra_keys or [None]
        begins = event.parent_block_hash is None
        if any(_beside_adapter(event, key) for key in keys[begins:]):
            self.counts.unsalted_blocks += len(event.block_hashes)  # images or embeddings: tokens do not say it all
            return None
        if begins:
            root = _root(_beside_adapter(event, keys[0]))
            self.counts.unsalted_blocks += 0 if root else len(event.block_hashes)
            return root
        assert event.parent_block_hash is not None
        parent = self._ours.get(event.parent_block_hash)
        self.counts.orphan_blocks += len(event.block_hashes) if parent is None else 0
        return parent

    def _removed(self, event: BlockRemoved, out: _Events) -> None:
        refuse_other_pools(event)
        if self.waits_for_reset:
            self.counts.stale_blocks += len(event.block_hashes)
            return
        gone = bytearray()
        for theirs in event.block_hashes:
            more = self._more_copies.get(theirs, 0)
            if more:
                self._copies -= 1
                if more > 1:
                    self._more_copies[theirs] = more - 1
                else:
                    del self._more_copies[theirs]
                continue
            ours = self._ours.pop(theirs, None)
            if ours is None:
                self.counts.unknown_removals += 1
                continue
            self._copies -= 1
            self.held.discard(ours)
            gone += ours
        self.counts.removed_blocks += len(event.block_hashes)
        out.add(BlocksRemoved, gone)


def refuse_other_pools(event: BlockStored | BlockRemoved) -> None:
    """Raise UnsupportedEvents for blocks that are not in the one pool which an engine computes in."""
    if event.group_idx:
        raise UnsupportedEvents(
            f"the model has several groups of KV (group_idx {event.group_idx}): a prefix is held only where all of "
            "them hold it, which one directory cannot say; start vLLM with disable_hybrid_kv_cache_manager"
        )
    if event.medium not in (None, MEDIUM_GPU):
        raise UnsupportedEvents(
            f"blocks lie in {event.medium!r}: vLLM's offload tiers are not followed; switch KV offloading off"
        )


def refuse_unsupported(event: BlockStored, block_size: int) -> None:
    """Raise UnsupportedEvents unless each block of ``block_size`` tokens serves whoever begins with the same tokens.

    Raises MalformedBatch where the event contradicts itself.
    """
    refuse_other_pools(event)
    if event.kv_cache_spec_kind not in (None, *ATTENTION_KINDS) or event.kv_cache_spec_sliding_window is not None:
        raise UnsupportedEvents(
            f"the KV is of kind {event.kv_cache_spec_kind!r} (window: {event.kv_cache_spec_sliding_window}): only "
            "blocks of full attention or MLA serve every prompt that begins with them; use such a model"
        )
    if event.block_size != block_size:
        raise UnsupportedEvents(
            f"vLLM's blocks have {event.block_size} tokens and the routers' {block_size}: "
            f"set block_size to {event.block_size}"
        )
    if len(event.token_ids) != block_size * len(event.block_hashes):
        raise UnsupportedEvents(
            f"an event has {len(event.token_ids)} tokens for {len(event.block_hashes)} blocks of {block_size}: blocks "
            "were left out, as models with sliding windows or Mamba layers do"
        )
    if event.extra_keys is not None and len(event.extra_keys) != len(event.block_hashes):
        raise MalformedBatch(f"{len(event.extra_keys)} extra keys for {len(event.block_hashes)} blocks")


def token_array(event: BlockStored) -> TokenArray:
    """Return an event's token ids. Raises MalformedBatch for one that is no int32."""
    try:
        return np.frombuffer(array("i", event.token_ids), dtype=np.int32)
    except OverflowError as error:
        raise MalformedBatch(f"a token id is out of range: {error}") from error


def _beside_adapter(event: BlockStored, keys: tuple[object, ...] | None) -> list[object]:
    """Return a block's extra keys without the adapter's: they are untagged, and the adapter's comes first."""
    found = list(keys or ())
    if event.lora_name is not None and event.lora_name in found:
        found.remove(event.lora_name)
    return found


def _root(keys: list[object]) -> bytes | None:
    """Return the root that a first block's keys name: the one key there is, 32 hex digits."""
    key = keys[0] if len(keys) == 1 else None
    if not isinstance(key, str) or len(key) != 2 * HASH_BYTES or not _HEX.issuperset(key):
        return None
    return bytes.fromhex(key)
