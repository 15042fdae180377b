"""Blocks for the tests of tiers: a tree of prefixes, with different bytes in each block."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine

from router.protocol.block_hash import PrefixScope, hash_blocks
from serve_app.cache.kv_chain import KvFormat, KvPart, Row
from serve_app.cache.prefix_digest import TierBlock, extend_digests, scope_digest
from serve_app.cache.tiers.tier import Wanted
from serve_app.cache.tiers.tier_index import Entry, TierIndex, account_key
from serve_app.cache.tiers.tier_queue import TierQueue
from serve_app.cache.tiers.tiers import Tiers
from serve_app.config.cache import CacheSection

SIZE = 2
FORMAT = KvFormat("m", SIZE, (KvPart("float32", (1, 2, SIZE, 1, 2)),))
BYTES = FORMAT.block_bytes
SCOPE = PrefixScope("m", salt=b"a")


def path(*branches: int, scope: PrefixScope = SCOPE, tenant: str = "default") -> list[TierBlock]:
    """Return the blocks of the prefix along these branches, parents first, on a tenant's account."""
    ids = np.repeat(np.array(branches, dtype=np.int32), SIZE)
    hashes = hash_blocks(scope.root(b"k"), ids, SIZE)
    raw = ids.astype("<i4").tobytes()
    about = scope_digest(scope), scope.lora
    return [
        TierBlock(hashes[16 * i : 16 * i + 16], digest, *about, raw[8 * i : 8 * i + 8], account_key(tenant))
        for i, digest in enumerate(extend_digests(b"", scope, ids, SIZE))
    ]


def content(block: TierBlock) -> Row:
    """Return the bytes that stand for a block's KV."""
    return np.frombuffer((block.prefix_digest * (BYTES // 32 + 1))[:BYTES], dtype=np.uint8)


class Source:
    """Reads the blocks of a batch, as the pool would."""

    def __init__(self, blocks: Sequence[TierBlock]) -> None:
        self.blocks = blocks
        self.read = 0

    def __call__(self, wanted: Sequence[int], rows: Sequence[Row]) -> None:
        for i, row in zip(wanted, rows, strict=True):
            row[...] = content(self.blocks[i])
            self.read += 1


def held(index: TierIndex[Any], *, saved: bool | None = None) -> set[bytes]:
    """Return the hashes of a tier's blocks, of all or only of saved or unsaved ones."""
    entries: list[Entry] = list(index)
    return {e.block.block_hash for e in entries if saved is None or saved == (e.saved_until_s is not None)}


def disk_of(tiers: Tiers) -> TierQueue | None:
    """Return the disk tier, if there is one."""
    return next((tier for tier in tiers.tiers if isinstance(tier, TierQueue)), None)


def wanted(blocks: Sequence[TierBlock]) -> list[Wanted]:
    """Return what a request for these blocks wants."""
    return [Wanted(block.block_hash, block.prefix_digest, block.scope) for block in blocks]


class TierMachine(RuleBasedStateMachine):
    """The common part of state machines over tiers: a directory, its tiers, the disk's work."""

    directory: Path
    tiers: Tiers

    def open(self, settings: CacheSection, **named: Any) -> None:
        self.tiers = Tiers(settings, FORMAT, BYTES, lambda: None, start=False, **named)

    def work(self) -> None:
        """Let the disk's queue do all its pending work."""
        disk = disk_of(self.tiers)
        while disk is not None and disk.run():
            pass

    def teardown(self) -> None:
        if hasattr(self, "tiers"):
            self.tiers.close(0.0)
            shutil.rmtree(self.directory)
