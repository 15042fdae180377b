"""A new replica copies the hottest prefixes from its peers before it takes requests.

A byte and a time budget bound it. A failure costs only the warm start, never the start itself.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from router.protocol.block_hash import split_chain
from serve_app.cache.kv_chain import TransferError
from serve_app.cache.prefix.hot_prefixes import KINDS, HashedTokens, HotPrefixes, HotPrefixKind
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import AdapterSpec, Engine
from serve_app.replica.lifecycle.handover import Receipt, Skipped
from serve_app.replica.peers import HolderLost, HotOffer, Peers, ask_all
from serve_app.replica.pull import PIECE_BYTES, copy_part

logger = logging.getLogger(__name__)

PULLS_AT_ONCE = 4

ANSWER_PART = 4
"""Divisor of the time budget for one answer of a peer: a hanging peer does not use all of it."""

LoadAdapter = Callable[[AdapterSpec], Awaitable[str]]
"""Loads an adapter; returns why it failed, or ""."""


@dataclass(frozen=True, slots=True)
class PrefixPart:
    """Blocks ``first`` to ``last`` - 1 of the prefix at the end of a run; ``after``: the index of the piece before."""

    offer: HotPrefixes
    run: int
    first: int
    last: int
    holders: tuple[str, ...]
    after: int | None

    @property
    def prefix(self) -> HashedTokens:
        """The whole prefix, built on each access: thousands of pieces may have a long beginning in common."""
        return self.offer.prefix(self.run)

    @property
    def kind(self) -> HotPrefixKind:
        """The run's kind."""
        return self.offer.runs[self.run].kind

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return self.last - self.first


def plan(offers: Mapping[str, HotPrefixes], most_blocks: int) -> list[PrefixPart]:
    """Return the pieces to copy in order: saves, public prompts, then by heat; each block once, parents first."""
    holders: dict[bytes, list[str]] = {}
    for peer, hot in offers.items():
        for run in hot.runs:
            for block_hash in split_chain(run.hashes):
                holders.setdefault(block_hash, []).append(peer)
    ranks = {kind: rank for rank, kind in enumerate(KINDS)}
    order = sorted(
        ((ranks[run.kind], -run.heat, number), peer)
        for peer, hot in offers.items()
        for number, run in enumerate(hot.runs)
    )
    pieces: list[PrefixPart] = []
    brought: dict[bytes, int] = {}
    room = most_blocks
    for (_, _, number), peer in order:
        hot = offers[peer]
        run = hot.runs[number]
        hashes = list(split_chain(run.hashes))
        present = sum(1 for block_hash in hashes if block_hash in brought)
        count = min(run.blocks - present, room)
        before = hashes[present - 1] if present else hot.runs[run.parent].tip if run.parent is not None else None
        if count <= 0 or (before is not None and before not in brought):
            continue
        first = sum(hot.runs[i].blocks for i in hot.path(number)[:-1]) + present
        after = None if before is None else brought[before]
        last_hash = hashes[present + count - 1]
        for block_hash in hashes[present : present + count]:
            brought[block_hash] = len(pieces)
        pieces.append(PrefixPart(hot, number, first, first + count, tuple(holders[last_hash]), after))
        room -= count
    return pieces


class Prewarm:
    """One replica's pre-warm."""

    def __init__(self, engine: Engine, peers: Peers, load_adapter: LoadAdapter, config: AppConfig) -> None:
        self._engine = engine
        self._peers = peers
        self._load_adapter = load_adapter
        self._config = config
        self._block_bytes = max(engine.kv_block_bytes, 1)
        self._answer_s = config.prewarm_timeout_s / ANSWER_PART
        self._open: dict[str, int] = {}
        self._planned = 0
        self.receipt = Receipt()

    async def run(self, peers: Sequence[str]) -> Receipt:
        """Copy as much as the budget allows from ``peers``, ids of running replicas; raises nothing."""
        receipt, started_s = self.receipt, time.monotonic()
        try:
            if peers:
                async with asyncio.timeout(self._config.prewarm_timeout_s):
                    most = self._config.prewarm_max_bytes // self._block_bytes
                    offers = await ask_all(
                        peers, lambda peer: self._peers.offer(peer, most), self._answer_s, receipt.lost
                    )
                    receipt.peers = len(offers)
                    free = (await asyncio.to_thread(self._engine.transfer.cache_room)).free_blocks
                    pieces = plan({peer: offer.prefixes for peer, offer in offers.items()}, min(most, free))
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._load_adapters(offers))
                        group.create_task(self._copy_all(pieces, list(offers)))
        except TimeoutError:
            self._skip("time", self._planned - receipt.blocks.total() - receipt.skipped.total())
        except Exception:
            logger.exception("the pre-warm failed; this replica starts with the blocks copied so far")
        receipt.state = "done"
        receipt.seconds = time.monotonic() - started_s
        return receipt

    async def _load_adapters(self, offers: Mapping[str, HotOffer]) -> None:
        """Load the adapters in peers' memory, each peer's last used first."""
        specs: dict[str, AdapterSpec] = {}
        for place in range(max((len(offer.adapters) for offer in offers.values()), default=0)):
            for offer in offers.values():
                for spec in offer.adapters[place : place + 1]:
                    specs.setdefault(spec.key, spec)
        here = set(self._engine.adapters.loaded)
        missing = [spec for key, spec in specs.items() if key not in here]
        for spec in missing[: max(0, self._config.max_cpu_loras - len(here))]:
            refusal = await self._load_adapter(spec)
            if refusal:
                logger.warning("the adapter %s was not loaded ahead: %s", spec.name, refusal)
            else:
                self.receipt.adapters += 1

    async def _copy_all(self, pieces: Sequence[PrefixPart], peers: Sequence[str]) -> None:
        self._open = dict.fromkeys(peers, 0)
        self._planned = sum(piece.blocks for piece in pieces)
        turns, copies = asyncio.Semaphore(PULLS_AT_ONCE), list[asyncio.Task[int]]()

        async def copy(piece: PrefixPart) -> int:
            if piece.after is not None and await copies[piece.after] < piece.first:
                self._skip("parent_missing", piece.blocks)
                return 0
            async with turns:
                return await self._copy(piece)

        async with asyncio.TaskGroup() as group:
            for piece in pieces:
                copies.append(group.create_task(copy(piece)))

    async def _copy(self, piece: PrefixPart) -> int:
        """Copy one piece, trying other holders after a failure; return how many leading blocks are then held."""
        at, prefix = piece.first, piece.prefix
        reason: Skipped | None = None
        step, size = max(1, PIECE_BYTES // self._block_bytes), self._config.block_size
        tried: set[str] = set()
        while at < piece.last:
            open_to = [peer for peer in piece.holders if peer in self._open and peer not in tried]
            if not open_to:
                self._skip(reason or "peer_lost", piece.last - at)
                break
            holder = min(open_to, key=self._open.__getitem__)
            self._open[holder] += 1
            reason = None
            try:
                count = min(step, piece.last - at)
                async with asyncio.timeout(self._answer_s):
                    fetch = self._peers.fetch
                    copied = await copy_part(self._engine, fetch, holder, prefix, at, count, size, demote=False)
                if not isinstance(copied, tuple):
                    reason = "gone"
                else:
                    moved = max(0, min(copied[0], piece.last) - at)
                    self.receipt.moved(piece.kind, moved, self._block_bytes)
                    at += moved
                    if moved < copied[1]:
                        self._skip("no_room", piece.last - at)
                        break
            except (HolderLost, TimeoutError):
                reason = "peer_lost"
            except TransferError as error:
                logger.warning("KV from replica %s was refused: %s", holder, error)
                reason = "refused"
            finally:
                if holder in self._open:
                    self._open[holder] -= 1
            if reason == "gone":
                tried.add(holder)
            elif reason is not None:  # dead, or of another model: it is not asked again
                self._open.pop(holder, None)
                if reason == "peer_lost":
                    self.receipt.lost.add(holder)
        self.receipt.prefixes += at == piece.last
        return at

    def _skip(self, reason: Skipped, blocks: int) -> None:
        if blocks:
            self.receipt.skipped[reason] += blocks
