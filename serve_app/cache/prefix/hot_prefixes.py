"""A cache's contents as a list for another replica: runs of blocks, the hottest first.

The order is saves, public prompts, then by heat. A parent never follows its child, so any beginning of the list is
usable alone. Heat measures a block's savings per byte: the hits of all prefixes that contain it, with older hits
decayed. Pure functions from index entries to plain data that can cross processes.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from router.protocol.block_hash import HASH_BYTES, PrefixScope, TokenArray
from router.protocol.samples import faded
from serve_app.cache.prefix.blocks import CachedBlock
from serve_app.cache.prefix.pins import Pin
from serve_app.cache.prefix.quota import PUBLIC

HotPrefixKind = Literal["save", "public", "prefix"]
"""Pinned by an explicit save; part of a public prompt; any other prefix."""

KINDS: tuple[HotPrefixKind, ...] = ("save", "public", "prefix")
"""In list order."""


@dataclass(frozen=True, slots=True)
class HashedTokens:
    """Tokens under a scope, by their identity. ``chain``: the packed hashes of their full blocks.

    ``tenant``: the owner of new blocks.
    """

    scope: PrefixScope
    token_ids: TokenArray
    chain: bytes
    tenant: str = "default"


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """Consecutive unbranched blocks of one owner and kind. ``parent``: the previous run; ``heat``: at its end."""

    parent: int | None
    hashes: bytes
    token_ids: bytes
    scope: PrefixScope
    tenant: str
    kind: HotPrefixKind
    heat: float

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.hashes) // HASH_BYTES

    @property
    def tip(self) -> bytes:
        """The hash of the last block."""
        return self.hashes[-HASH_BYTES:]


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """An explicit save that ends with the run at index ``run``. ``unread_s``: seconds since the last read."""

    key: bytes
    tenant: str
    ttl_s: float | None
    unread_s: float
    run: int


@dataclass(frozen=True, slots=True)
class HotPrefixes:
    """Ordered runs, and the saves among them."""

    runs: tuple[PrefixRun, ...] = ()
    saves: tuple[SavedPrefix, ...] = ()

    def path(self, index: int) -> list[int]:
        """Return the indexes of the runs from a prompt's start to run ``index``, inclusive."""
        path: list[int] = []
        at: int | None = index
        while at is not None:
            path.append(at)
            at = self.runs[at].parent
        return path[::-1]

    def prefix(self, index: int) -> HashedTokens:
        """Return the whole prefix that ends with a run, under that run's tenant."""
        runs = [self.runs[i] for i in self.path(index)]
        public = sum(run.blocks for run in runs if run.tenant == PUBLIC)
        return HashedTokens(
            replace(runs[-1].scope, public_blocks=public),
            np.frombuffer(b"".join(run.token_ids for run in runs), dtype="<i4"),
            b"".join(run.hashes for run in runs),
            runs[-1].tenant,
        )


@dataclass(slots=True)
class _Run:
    """A run under construction."""

    parent: int | None
    kind: HotPrefixKind
    entries: list[CachedBlock]


def heats(entries: Sequence[CachedBlock], now_s: float) -> dict[int, float]:
    """Return the heat of each block, given all entries of an index in its order (parents first). O(blocks).

    Heat is the hits of prefixes that end at the block or after it, plus up to 1 for the last time that one of them was
    new or hit. The latter orders prefixes without hits by age. A parent is never colder than its child.
    """
    hits: dict[int, float] = {}
    used_s: dict[int, float] = {}
    for entry in reversed(entries):
        block = entry.block
        hits[block] = entry.hits_at(now_s) + hits.get(block, 0.0)
        used_s[block] = max(entry.used_s, used_s.get(block, -math.inf))
        if entry.parent is not None:
            hits[entry.parent] = hits.get(entry.parent, 0.0) + hits[block]
            used_s[entry.parent] = max(used_s.get(entry.parent, -math.inf), used_s[block])
    return {block: count + faded(1.0, used_s[block], now_s) for block, count in hits.items()}


def list_hot(entries: Sequence[CachedBlock], pins: Sequence[Pin], now_s: float) -> HotPrefixes:
    """Return an index's entries (parents first) as ordered runs. A run ends where heat halves. O(blocks log runs)."""
    pinned = {block for pin in pins for block in pin.blocks}
    tails = {pin.blocks[-1] for pin in pins}
    heat = heats(entries, now_s)
    children = Counter(entry.parent for entry in entries)
    runs: list[_Run] = []
    run_of: dict[int, int] = {}

    def goes_on(run: _Run, entry: CachedBlock, kind: HotPrefixKind) -> bool:
        last = run.entries[-1]
        return (
            last.block == entry.parent
            and children[last.block] == 1
            and last.block not in tails
            and run.kind == kind
            and last.tenant == entry.tenant
            and last.scope == entry.scope
            and heat[entry.block] >= heat[run.entries[0].block] / 2
        )

    for entry in entries:
        kind: HotPrefixKind = "save" if entry.block in pinned else "public" if entry.tenant == PUBLIC else "prefix"
        parent = None if entry.parent is None else run_of[entry.parent]
        if parent is not None and goes_on(runs[parent], entry, kind):
            run_of[entry.block] = parent
            runs[parent].entries.append(entry)
        else:
            run_of[entry.block] = len(runs)
            runs.append(_Run(parent, kind, [entry]))
    order = sorted(range(len(runs)), key=lambda i: (KINDS.index(runs[i].kind), -heat[runs[i].entries[-1].block], i))
    place = {old: new for new, old in enumerate(order)}
    frozen = [
        PrefixRun(
            None if run.parent is None else place[run.parent],
            b"".join(entry.block_hash for entry in run.entries),
            b"".join(entry.token_bytes for entry in run.entries),
            run.entries[-1].scope,
            run.entries[-1].tenant,
            run.kind,
            heat[run.entries[-1].block],
        )
        for run in (runs[old] for old in order)
    ]
    saves = [
        SavedPrefix(pin.key, pin.tenant, pin.ttl_s, pin.unread_s(now_s), place[run_of[pin.blocks[-1]]]) for pin in pins
    ]
    return HotPrefixes(tuple(frozen), tuple(saves))


def within(hot: HotPrefixes, most_blocks: int) -> HotPrefixes:
    """Return the first ``most_blocks`` of a list, without its saves. The last run is cut if needed."""
    runs: list[PrefixRun] = []
    room = most_blocks
    for run in hot.runs:
        if room <= 0:
            break
        if run.blocks <= room:
            runs.append(run)
        else:
            ids = len(run.token_ids) // run.blocks
            runs.append(replace(run, hashes=run.hashes[: room * HASH_BYTES], token_ids=run.token_ids[: room * ids]))
        room -= run.blocks
    return HotPrefixes(tuple(runs))


def idle_heats(entries: Sequence[CachedBlock], idle: Collection[int], now_s: float) -> bytes:
    """Return the heats of the idle blocks, which new blocks may evict, as packed float32, the coldest first."""
    heat = heats(entries, now_s)
    return np.sort(np.array([heat[block] for block in idle], dtype="<f4")).tobytes()
