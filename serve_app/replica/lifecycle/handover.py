"""A leaving replica gives its peers the blocks that only it holds, while its streams continue.

Owns the choice of receivers: saves and public prompts first, then the hottest. Each block goes to the peer lacking the
fewest others for it, and only into free or colder space. If that peer is dead or full, the next one gets it.

A receipt of what was taken over, and its counters, are for joining replicas too.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from router.protocol.block_hash import HASH_BYTES, split_chain
from router.protocol.samples import Labels, Sample
from serve_app.cache.prefix.hot_prefixes import HashedTokens, HotPrefixes, HotPrefixKind, PrefixRun, SavedPrefix
from serve_app.engine.protocol import CacheRoom, Engine
from serve_app.replica.peers import HolderLost, Peers, ask_all
from serve_app.replica.pull import PIECE_BYTES

Skipped = Literal["no_peers", "held_by_peer", "no_room", "peer_lost", "refused", "gone", "parent_missing", "time"]
"""Why a block was not moved, in order: there are no peers; a peer has it; it does not fit (nothing colder, a full pool,
a full pin budget); all possible receivers were lost; the part was not the requested one; it was evicted meanwhile; a
block before it did not arrive; the time was over."""


@dataclass(slots=True)
class Receipt:
    """One pre-warm or hand-over. ``blocks``: moved ones, by kind; ``skipped``: the others, by reason.

    ``peers``: number of peers that took part; ``lost``: those that did not answer, at its beginning or later.
    """

    peers: int = 0
    lost: set[str] = field(default_factory=set)
    prefixes: int = 0
    saves: int = 0
    saves_lost: int = 0
    adapters: int = 0
    bytes: int = 0
    seconds: float = 0.0
    state: Literal["running", "done", "returned"] = "running"
    blocks: Counter[HotPrefixKind] = field(default_factory=Counter)
    skipped: Counter[Skipped] = field(default_factory=Counter)

    def moved(self, kind: HotPrefixKind, blocks: int, block_bytes: int) -> None:
        """Count blocks that arrived."""
        if blocks:
            self.blocks[kind] += blocks
            self.bytes += blocks * block_bytes

    def to_json(self) -> dict[str, Any]:
        """Return it in the form of a notice."""
        return {
            "state": self.state,
            "peers": self.peers,
            "peers_lost": len(self.lost),
            "prefixes": self.prefixes,
            "saves": self.saves,
            "saves_lost": self.saves_lost,
            "adapters": self.adapters,
            "blocks": self.blocks.total(),
            "blocks_by_kind": dict(self.blocks),
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "skipped_blocks": dict(self.skipped),
        }


@dataclass(slots=True)
class MoveMeters:
    """Counters of one replica: ``joined`` is its own pre-warm's receipt; the rest counts hand-overs from peers."""

    joined: Receipt | None = None
    taken_blocks: Counter[HotPrefixKind] = field(default_factory=Counter)
    taken_bytes: int = 0
    refused_blocks: int = 0
    taken_saves: Counter[str] = field(default_factory=Counter)

    def samples(self, labels: Labels = ()) -> Iterable[Sample]:
        """Yield all counters."""
        if self.joined is not None:
            for kind, blocks in self.joined.blocks.items():
                yield "warmpath_prewarm_blocks_total", (*labels, ("kind", kind)), float(blocks)
            for reason, blocks in self.joined.skipped.items():
                yield "warmpath_prewarm_skipped_blocks_total", (*labels, ("reason", reason)), float(blocks)
            yield "warmpath_prewarm_bytes_total", labels, float(self.joined.bytes)
            yield "warmpath_prewarm_seconds", labels, self.joined.seconds
        for kind, blocks in self.taken_blocks.items():
            yield "warmpath_handover_blocks_total", (*labels, ("kind", kind)), float(blocks)
        for outcome, saves in self.taken_saves.items():
            yield "warmpath_handover_saves_total", (*labels, ("outcome", outcome)), float(saves)
        yield "warmpath_handover_bytes_total", labels, float(self.taken_bytes)
        yield "warmpath_handover_refused_blocks_total", labels, float(self.refused_blocks)


logger = logging.getLogger(__name__)

PIECES_IN_FLIGHT = 3

BUSY_BYTES_PER_S = 256 * 1024 * 1024
"""Upper limit of the hand-over per second while streams run here: copying takes turns with their steps."""

ANSWER_S = 10.0
"""A peer that does not answer within this time is skipped."""


@dataclass(slots=True)
class _Receiver:
    """A peer. ``known``: leading blocks that it holds of each run; ``used``: blocks promised to it so far."""

    name: str
    known: list[int]
    room: CacheRoom
    used: int = 0
    fails: Skipped | None = None

    def room_for(self, heat: float) -> int:
        """Return how many more blocks of this heat fit there."""
        return max(0, self.room.blocks_for(heat) - self.used)


class HandOver:
    """One replica's hand-over. ``busy``: whether streams run here."""

    def __init__(
        self, engine: Engine, peers: Peers, block_size: int, busy: Callable[[], bool], receipt: Receipt
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._size = block_size
        self._busy = busy
        self._block_bytes = max(engine.kv_block_bytes, 1)
        self._receipt = receipt
        self._hot = HotPrefixes()
        self._receivers: list[_Receiver] = []
        self._cached_before = 0
        self._reasons: dict[int, Skipped] = {}
        self._given: set[bytes] = set()
        self._kept: set[bytes] = set()

    async def run(self, peers: Sequence[str], time_s: float) -> None:
        """Hand over the blocks that no peer holds, within ``time_s``; raises nothing, and may be run again."""
        receipt, started_s = self._receipt, time.monotonic()
        rest: Skipped = "peer_lost"
        try:
            async with asyncio.timeout(time_s):
                self._hot = await asyncio.to_thread(self._engine.transfer.hot_prefixes)
                self._receivers, self._cached_before, self._reasons = [], 0, {}
                runs = [run.hashes for run in self._hot.runs]
                surveys = await ask_all(peers, lambda peer: self._peers.survey(peer, runs), ANSWER_S, receipt.lost)
                self._receivers = [_Receiver(peer, list(each.known), each.room) for peer, each in surveys.items()]
                receipt.peers = max(receipt.peers, len(self._receivers))
                self._cached_before = sum(
                    max(0, self._cached_of(number) - self._given_of(run)) for number, run in enumerate(self._hot.runs)
                )
                await self._move_all()
        except TimeoutError:
            rest = "time"
        except Exception:
            logger.exception("the hand-over failed; blocks cached only here are lost")
            rest = "refused"
        self._count_skipped(rest)
        saves = {save.key for save in self._hot.saves}
        receipt.saves, receipt.saves_lost = len(self._kept), len(saves - self._kept)
        receipt.seconds += time.monotonic() - started_s

    def _cached_of(self, number: int) -> int:
        """Return how many leading blocks of a run any peer holds."""
        return max((receiver.known[number] for receiver in self._alive()), default=0)

    def _given_of(self, run: PrefixRun) -> int:
        return sum(1 for block_hash in split_chain(run.hashes) if block_hash in self._given)

    def _count_skipped(self, rest: Skipped) -> None:
        """Count the blocks that peers held before, and those that none holds now; ``rest``: the default reason."""
        skipped: Counter[Skipped] = Counter()
        for number, run in enumerate(self._hot.runs):
            cached = self._cached_of(number) if self._receivers else self._given_of(run)
            skipped[self._reasons.get(number, rest)] += run.blocks - cached
        skipped["held_by_peer"] += self._cached_before
        self._receipt.skipped = +skipped

    async def _move_all(self) -> None:
        """Move saves, each to one peer as a whole, then runs; each after all moves of parts of its prefix."""
        turns, moves = asyncio.Semaphore(PIECES_IN_FLIGHT), dict[int, asyncio.Task[None]]()

        async def move(path: list[int], save: SavedPrefix | None, before: set[asyncio.Task[None]]) -> None:
            if before:
                await asyncio.wait(before)
            async with turns:
                await (self._move_run(path) if save is None else self._move_save(path, save))

        units: list[tuple[int, SavedPrefix | None]] = [
            (save.run, save) for save in sorted(self._hot.saves, key=lambda save: save.run)
        ]
        units += [(number, None) for number in range(len(self._hot.runs))]
        async with asyncio.TaskGroup() as group:
            for number, save in units:
                path = self._hot.path(number)
                task = group.create_task(move(path, save, {moves[i] for i in path if i in moves}))
                moves |= dict.fromkeys(path if save is not None else path[-1:], task)

    async def _move_run(self, path: list[int]) -> None:
        number = path[-1]
        run = self._hot.runs[number]
        if self._cached_of(number) == run.blocks:
            return
        reason: Skipped = "no_room" if self._alive() else "no_peers"
        while receiver := self._next_receiver(path, run.kind, whole=False):
            failed = await self._give(receiver, path, run.kind)
            if receiver.known[number] == run.blocks:
                self._receipt.prefixes += 1
                return
            reason = failed or "no_room"  # without a failure it took all that fits
            if failed == "gone":
                break
        self._reasons[number] = reason

    async def _move_save(self, path: list[int], save: SavedPrefix) -> None:
        """Give one peer the whole prefix of a save, and have it kept there; on failure try the next peer."""
        tried: set[str] = set()
        if save.key in self._kept:
            return
        while receiver := self._next_receiver(path, "save", whole=True, without=tried):
            tried.add(receiver.name)
            if await self._give(receiver, path, "save") is not None:
                continue
            try:
                async with asyncio.timeout(ANSWER_S):
                    if await self._peers.keep(receiver.name, save, self._hot.prefix(path[-1])):
                        self._kept.add(save.key)
                        return
            except (HolderLost, TimeoutError):
                self._lose(receiver)

    def _lose(self, receiver: _Receiver) -> None:
        receiver.fails = "peer_lost"
        self._receipt.lost.add(receiver.name)

    def _alive(self) -> list[_Receiver]:
        return [receiver for receiver in self._receivers if receiver.fails is None]

    def _next_receiver(
        self, path: list[int], kind: HotPrefixKind, *, whole: bool, without: Collection[str] = ()
    ) -> _Receiver | None:
        """Return the peer that lacks fewest blocks, then has most space (``whole``: for all); None: none fits."""
        heat = self._heat(path[-1], kind)
        fits: list[tuple[int, int, _Receiver]] = []
        for receiver in self._alive():
            lacks, room = self._lacks(receiver, path), receiver.room_for(heat)
            # Blocks before the run must fit too, or none of the run would.
            least = lacks if whole else self._lacks(receiver, path[:-1]) + 1
            if receiver.name not in without and room >= least:
                fits.append((lacks, -room, receiver))
        return min(fits, key=lambda each: each[:2])[2] if fits else None

    def _heat(self, number: int, kind: HotPrefixKind) -> float:
        return self._hot.runs[number].heat if kind == "prefix" else math.inf

    def _lacks(self, receiver: _Receiver, path: Sequence[int]) -> int:
        return sum(self._hot.runs[i].blocks - receiver.known[i] for i in path)

    async def _give(self, receiver: _Receiver, path: list[int], kind: HotPrefixKind) -> Skipped | None:
        """Send a peer the blocks that it lacks of a prefix, as far as they fit; return the reason of a failure."""
        promised = min(receiver.room_for(self._heat(path[-1], kind)), self._lacks(receiver, path))
        receiver.used += promised
        before = 0
        try:
            for i in path:
                run, prefix = self._hot.runs[i], self._hot.prefix(i)
                while promised and receiver.known[i] < run.blocks:
                    first = before + receiver.known[i]
                    count = min(max(1, PIECE_BYTES // self._block_bytes), promised, run.blocks - receiver.known[i])
                    started_s = time.monotonic()
                    arrived = await self._send(receiver, i, prefix, first, count)
                    if not isinstance(arrived, int):
                        return arrived
                    promised -= arrived
                    if self._busy():
                        pace_s = count * self._block_bytes * PIECES_IN_FLIGHT / BUSY_BYTES_PER_S
                        await asyncio.sleep(max(0.0, pace_s - (time.monotonic() - started_s)))
                if receiver.known[i] < run.blocks:
                    return None
                before += run.blocks
        finally:
            receiver.used -= promised
        return None

    async def _send(
        self, receiver: _Receiver, number: int, prefix: HashedTokens, first: int, count: int
    ) -> int | Skipped:
        """Send a part of the prefix that ends with a run; return how many blocks arrived, or why some did not."""
        run = self._hot.runs[number]
        beginning = replace(prefix, token_ids=prefix.token_ids[: (first + count) * self._size])
        part = await asyncio.to_thread(self._engine.transfer.export_prefix, beginning, first, count)
        if part is None:
            return "gone"
        try:
            async with asyncio.timeout(ANSWER_S):
                cached = await self._peers.take(receiver.name, prefix, first, part, run.kind)
        except (HolderLost, TimeoutError):
            self._lose(receiver)
            return "peer_lost"
        if cached < 0:
            receiver.fails = "refused"
            return "refused"
        left = cached
        for i in self._hot.path(number):  # it may have evicted known blocks, or still be computing them
            receiver.known[i] = min(max(0, left), self._hot.runs[i].blocks)
            left -= self._hot.runs[i].blocks
        if cached < first:
            return "parent_missing"
        arrived = min(cached - first, part.header.blocks)
        self._given.update(split_chain(part.header.hashes[: arrived * HASH_BYTES]))
        self._receipt.moved(run.kind, arrived, self._block_bytes)
        if arrived < part.header.blocks:
            receiver.room = CacheRoom(0, b"")
            return "no_room"
        return arrived
