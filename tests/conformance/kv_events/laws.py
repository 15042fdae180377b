"""The laws of a stream of KV events, and a checker that reads batches in order and says which are broken where.

A cache is what one data parallel rank holds of one group in one medium; blocks of different caches have nothing to do
with each other. A stream that does not begin with batch 0 tells nothing of the blocks of before: what would need them
is not judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from router.protocol.block_hash import hash_blocks
from serve_app.engine.vllm.events.batches import (
    BlockHash,
    BlockRemoved,
    BlockStored,
    KvEvent,
    MalformedBatch,
    decode_batch,
)
from serve_app.engine.vllm.events.pool import UnsupportedEvents, VllmPool

LAWS = {
    "numbers": "batches count up by one: none is missing, none comes twice",
    "readable": "a batch is [ts, events, data_parallel_rank], with events of known names and the fields they must have",
    "block_size": "all blocks of a cache have the same number of tokens, at least one",
    "hashes": "all hashes are bytes of one length, or all are integers of 64 bits",
    "tokens": "an event has block_size token ids for each of its blocks, each a non-negative int32",
    "extra_keys": "an event with extra keys has an entry for each of its blocks",
    "parent": "a stored block begins a chain, or hangs under a block that is held",
    "removed": "only what is held is removed, one copy at a time",
    "no_holes": "a block goes after the blocks that hang under it",
    "content": "a hash stands for one parent, tokens and extra keys, and they for that hash",
    "room": "never more copies are held than the pool has blocks",
    "prediction": "a request hits exactly the full blocks that the events say are held, but the one of its last token",
    "replay": "a batch that is sent again is the batch that was published",
}

Content = tuple[BlockHash | None, tuple[int, ...], str]
_Cache_key = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class Violation:
    """A law that a batch breaks, and how."""

    law: str
    batch: int
    sentence: str


@dataclass(slots=True)
class _Cache:
    block_size: int
    copies: Counter[BlockHash] = field(default_factory=Counter)
    children: dict[BlockHash, set[BlockHash]] = field(default_factory=dict)
    content: dict[BlockHash, Content] = field(default_factory=dict)
    hash_of: dict[Content, BlockHash] = field(default_factory=dict)


@dataclass(slots=True)
class Totals:
    """What a stream held. ``payload_bytes``: of the batches that could be read."""

    batches: int = 0
    events: Counter[str] = field(default_factory=Counter)
    blocks_stored: int = 0
    blocks_removed: int = 0
    duplicates: int = 0
    tokens: int = 0
    payload_bytes: int = 0
    requests: int = 0
    not_judged: int = 0


class Checker:
    """Reads one stream. ``num_blocks``: of the engine's pool; None where it is not known."""

    def __init__(self, num_blocks: int | None = None) -> None:
        self.violations: list[Violation] = []
        self.checks: Counter[str] = Counter()
        self.totals = Totals()
        self.refusal = ""
        self._num_blocks = num_blocks
        self._first: int | None = None
        self._batch = -1
        self._width: int | str | None = None
        self._caches: dict[_Cache_key, _Cache] = {}
        self._pool: VllmPool | None = None

    def batch(self, number: int, payload: bytes) -> None:
        """Take the next batch."""
        if self._first is not None:
            self._check("numbers", number == self._batch + 1, f"it comes after batch {self._batch}")
        else:
            self._first = number
        self._batch = number
        self.totals.batches += 1
        try:
            batch = decode_batch(payload)
        except MalformedBatch as error:
            self._check("readable", False, str(error))
            return
        self.totals.payload_bytes += len(payload)
        for event in batch.events:
            self._event(event, batch.data_parallel_rank or 0)
        self._follow(payload)

    def request(self, root: bytes, token_ids: Sequence[int], cached_tokens: int) -> None:
        """Take what an engine said of a request that came after the last batch and before the next, alone."""
        self.totals.requests += 1
        if self._first or self.refusal:
            self.totals.not_judged += 1
            return
        predicted = 0
        if self._pool is not None:
            size = next(iter(self._caches.values())).block_size
            chain = hash_blocks(root, np.array(token_ids, dtype=np.int32), size)
            predicted = size * self._pool.known(chain, (len(token_ids) - 1) // size)
        sentence = f"of {len(token_ids)} tokens {cached_tokens} were cached, and {predicted} by the events"
        self._check("prediction", predicted == cached_tokens, sentence)

    def reset(self) -> None:
        """Take that the engine has forgotten everything; its event may come with a later batch."""
        if self._pool is not None:
            self._pool.forget()

    def replayed(self, number: int, same: bool) -> None:
        """Take whether a batch that came twice, live and replayed, was the same."""
        self.checks["replay"] += 1
        if not same:
            self.violations.append(Violation("replay", number, "other bytes came when it was sent again"))

    def _check(self, law: str, holds: bool, sentence: str) -> bool:
        self.checks[law] += 1
        if not holds:
            self.violations.append(Violation(law, self._batch, sentence))
        return holds

    def _event(self, event: KvEvent, rank: int) -> None:
        self.totals.events[type(event).__name__] += 1
        self._check("readable", True, "")
        if isinstance(event, BlockStored):
            self._stored(event, (rank, event.group_idx or 0, event.medium or "GPU"))
        elif isinstance(event, BlockRemoved):
            self._removed(event, (rank, event.group_idx or 0, event.medium or "GPU"))
        else:
            for cache in self._caches.values():
                cache.copies.clear()
                cache.children.clear()

    def _stored(self, event: BlockStored, key: _Cache_key) -> None:
        size, blocks = event.block_size, len(event.block_hashes)
        self.totals.blocks_stored += blocks
        self.totals.tokens += len(event.token_ids)
        cache = self._caches.setdefault(key, _Cache(size))
        self._check("block_size", size == cache.block_size >= 1, f"{size} tokens in a block of {key}")
        self._widths(
            event.block_hashes if event.parent_block_hash is None else [event.parent_block_hash, *event.block_hashes]
        )
        sentence = f"{len(event.token_ids)} token ids for {blocks} blocks of {size}"
        if not self._check("tokens", len(event.token_ids) == size * blocks, sentence):
            return
        self._check("tokens", all(0 <= token < 2**31 for token in event.token_ids), "a token id is no int32")
        if event.extra_keys is not None:
            self._check("extra_keys", len(event.extra_keys) == blocks, f"{len(event.extra_keys)} for {blocks} blocks")
        self._parent(cache, event.parent_block_hash)
        parent = event.parent_block_hash
        for index, name in enumerate(event.block_hashes):
            keys = event.extra_keys[index] if event.extra_keys and index < len(event.extra_keys) else None
            content = (parent, tuple(event.token_ids[index * size : (index + 1) * size]), repr((event.lora_name, keys)))
            same = (
                cache.content.setdefault(name, content) == content and cache.hash_of.setdefault(content, name) == name
            )
            self._check("content", same, f"{_shown(name)} stood for something else, or its content had another hash")
            self.totals.duplicates += cache.copies[name] > 0
            cache.copies[name] += 1
            if parent is not None:
                cache.children.setdefault(parent, set()).add(name)
            parent = name
        if self._num_blocks is not None:
            held = cache.copies.total()
            self._check("room", held <= self._num_blocks, f"{held} copies in {self._num_blocks} blocks")

    def _parent(self, cache: _Cache, parent: BlockHash | None) -> None:
        known = parent is None or cache.copies[parent] > 0
        if not known and self._first and parent not in cache.content:
            self.totals.not_judged += 1
        else:
            self._check("parent", known, f"{_shown(parent)} is not held")

    def _removed(self, event: BlockRemoved, key: _Cache_key) -> None:
        self.totals.blocks_removed += len(event.block_hashes)
        self._widths(event.block_hashes)
        cache = self._caches.get(key)
        for name in event.block_hashes:
            if cache is None or not cache.copies[name]:
                if self._first and (cache is None or name not in cache.content):
                    self.totals.not_judged += 1
                else:
                    self._check("removed", False, f"{_shown(name)} is not held")
                continue
            self._check("removed", True, "")
            cache.copies[name] -= 1
            if cache.copies[name]:
                continue
            del cache.copies[name]
            orphans = {child for child in cache.children.pop(name, ()) if cache.copies[child] > 0}
            self._check("no_holes", not orphans, f"{_shown(name)} went before {len(orphans)} blocks under it")

    def _widths(self, names: Sequence[BlockHash]) -> None:
        for name in names:
            width = len(name) if isinstance(name, bytes) else "integers"
            self._width = width if self._width is None else self._width
            fits = width == self._width and (isinstance(name, bytes) or -(2**63) <= name < 2**64)
            self._check("hashes", fits, f"{_shown(name)} among hashes of width {self._width}")

    def _follow(self, payload: bytes) -> None:
        """Let warmpath's own pool follow, until it refuses."""
        if self.refusal or not self._caches:
            return
        if self._pool is None:
            size = next(iter(self._caches.values())).block_size
            self._pool = VllmPool(max(1, size), self._num_blocks or 2**31)
        try:
            self._pool.translate(decode_batch(payload))
        except (UnsupportedEvents, MalformedBatch) as error:
            self.refusal, self._pool = str(error), None


def _shown(name: BlockHash | None) -> str:
    return name.hex()[:16] if isinstance(name, bytes) else str(name)
