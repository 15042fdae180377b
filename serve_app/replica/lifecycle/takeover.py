"""What a replica answers to peers that join or leave: what is hot here, what fits here, and taking it in.

Every block is verified as one that was asked for: by token ids, hashes and scope. It goes on its tenant's account, so
tenants' shares hold. At most ``TAKES_AT_ONCE`` parts are taken in at once; the others wait as references.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from router.protocol.block_hash import HASH_BYTES
from serve_app.cache.kv_chain import KvChain, TransferError
from serve_app.cache.prefix.hot_prefixes import HashedTokens, Kind, SavedPrefix, within
from serve_app.engine.protocol import AdapterSpec, CacheRoom, Engine
from serve_app.replica.lifecycle.prewarm import HotOffer
from serve_app.replica.lifecycle.receipt import MoveMeters

logger = logging.getLogger(__name__)

TAKES_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Survey:
    """``known``: of each run that was asked about, how many leading blocks are here already; ``room``: for others."""

    known: tuple[int, ...]
    room: CacheRoom


class Takeover:
    """One replica's side of its peers' moves. ``adapters``: those in memory, the last used first."""

    def __init__(self, engine: Engine, adapters: Callable[[], Sequence[AdapterSpec]], meters: MoveMeters) -> None:
        self._engine = engine
        self._adapters = adapters
        self._meters = meters
        self._turn = asyncio.Semaphore(TAKES_AT_ONCE)
        self._block_bytes = max(engine.kv_block_bytes, 1)

    async def offer(self, most_blocks: int) -> HotOffer:
        """Return the hottest of what is here, for a replica that joins."""
        hot = await asyncio.to_thread(self._engine.hot_prefixes)
        return HotOffer(within(hot, most_blocks), tuple(self._adapters()))

    async def survey(self, runs: Sequence[bytes]) -> Survey:
        """Say what is known here of runs of blocks (packed hashes), to a replica that leaves."""

        def look() -> Survey:
            known = tuple(self._engine.known_blocks(hashes, len(hashes) // HASH_BYTES) for hashes in runs)
            return Survey(known, self._engine.cache_room())

        return await asyncio.to_thread(look)

    async def take(self, prefix: HashedTokens, first: int, coming: Awaitable[KvChain], kind: Kind) -> int:
        """Take in blocks of a prefix from ``first`` on; return how many leading ones are held then, -1: not those."""
        async with self._turn:
            part = await coming
            try:
                held = await asyncio.to_thread(self._engine.import_part, part, prefix, first)
            except TransferError as error:
                logger.warning("KV that a leaving replica handed over was refused: %s", error)
                self._meters.refused_blocks += part.header.blocks
                return -1
        taken = min(max(0, held - first), part.header.blocks)
        if taken:
            self._meters.taken_blocks[kind] += taken
            self._meters.taken_bytes += taken * self._block_bytes
        self._meters.refused_blocks += part.header.blocks - taken
        return held

    async def keep(self, saved: SavedPrefix, prefix: HashedTokens) -> bool:
        """Keep an explicit save of a replica that leaves; return whether it is kept here now."""
        outcome = await asyncio.to_thread(self._engine.take_over_pin, saved, prefix) or "gone"
        self._meters.taken_saves[outcome] += 1
        return outcome in ("pinned", "present")
