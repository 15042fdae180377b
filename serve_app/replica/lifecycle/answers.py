"""A replica's answers to its peers: it exports a prefix's KV, lists hot prefixes and free space, and imports KV.

Every imported block is verified against the requested one, by token ids, hashes and scope. It is charged to its tenant,
so tenants' shares hold. A few parts are exported and imported at once; the others wait, imports as mere references.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from router.protocol.block_hash import HASH_BYTES
from serve_app.cache.kv_chain import KvChain, TransferError
from serve_app.cache.prefix.hot_prefixes import HashedTokens, HotPrefixKind, SavedPrefix, within
from serve_app.engine.protocol import AdapterSpec, Engine
from serve_app.replica.lifecycle.handover import MoveMeters
from serve_app.replica.peers import HotOffer, PulledPart, Survey, WantedPart
from serve_app.replica.pull import PullMeters

logger = logging.getLogger(__name__)

TAKES_AT_ONCE = 2
EXPORTS_AT_ONCE = 2
EXPORTS_WAITING = 32


@dataclass(eq=False)
class PeerAnswers:
    """The answers of one replica. ``adapters``: those in memory, the last used first."""

    engine: Engine
    adapters: Callable[[], Sequence[AdapterSpec]]
    moves: MoveMeters
    pulls: PullMeters
    _takes: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(TAKES_AT_ONCE))
    # Their threads wait for the engine's loop, and must not delay other work of the replica.
    _exports: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(EXPORTS_AT_ONCE))
    _exporting: int = 0

    async def export_kv(self, request: WantedPart) -> PulledPart:
        """Return the part of the prefix that is in the pool."""
        if self._exporting >= EXPORTS_AT_ONCE + EXPORTS_WAITING:
            self.pulls.exports["busy"] += 1
            return "busy"
        self._exporting += 1
        try:
            async with self._exports:
                token_ids = np.frombuffer(request.token_ids, dtype="<i4")
                prefix = HashedTokens(request.scope, token_ids, request.block_hashes)
                part = request.first, request.most_blocks
                chain = await asyncio.to_thread(
                    self.engine.transfer.export_prefix, prefix, *part, demote=request.demote
                )
        finally:
            self._exporting -= 1
        self.pulls.exports["gone" if chain is None else "sent"] += 1
        if chain is None:
            return "gone"
        self.pulls.exported_tokens += chain.header.blocks * chain.header.format.block_size
        return chain

    async def offer_hot(self, most_blocks: int) -> HotOffer:
        """Return the hottest prefixes here, for a joining replica."""
        hot = await asyncio.to_thread(self.engine.transfer.hot_prefixes)
        return HotOffer(within(hot, most_blocks), tuple(self.adapters()))

    async def survey_cache(self, runs: Sequence[bytes]) -> Survey:
        """Return how much of these runs (packed hashes) is held here, and the free space, for a leaving replica."""

        def look() -> Survey:
            cached = tuple(self.engine.cached_blocks(hashes, len(hashes) // HASH_BYTES) for hashes in runs)
            return Survey(cached, self.engine.transfer.cache_room())

        return await asyncio.to_thread(look)

    async def take_kv(
        self, prefix: HashedTokens, first: int, part: Sequence[Awaitable[KvChain]], kind: HotPrefixKind
    ) -> int:
        """Import blocks of a prefix from ``first`` on; return how many leading ones are then held, -1: refused.

        ``part``: one reference, in a list because Ray would fetch a bare one before its turn.
        """
        async with self._takes:
            chain = await part[0]
            try:
                cached = await asyncio.to_thread(self.engine.transfer.import_part, chain, prefix, first)
            except TransferError as error:
                logger.warning("KV that a leaving replica handed over was refused: %s", error)
                self.moves.refused_blocks += chain.header.blocks
                return -1
        taken = min(max(0, cached - first), chain.header.blocks)
        if taken:
            self.moves.taken_blocks[kind] += taken
            self.moves.taken_bytes += taken * self.engine.kv_block_bytes
        self.moves.refused_blocks += chain.header.blocks - taken
        return cached

    async def keep_save(self, saved: SavedPrefix, prefix: HashedTokens) -> bool:
        """Keep an explicit save of a leaving replica; return whether it is kept here now."""
        outcome = await asyncio.to_thread(self.engine.transfer.take_over_pin, saved, prefix) or "gone"
        self.moves.taken_saves[outcome] += 1
        return outcome in ("pinned", "present")
