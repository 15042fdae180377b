"""A leaving replica gives peers what only it holds, beside its running streams.

Owns who gets what: saves and public prompts first, then the hottest; each block to the peer that needs the fewest
others for it, and no more than is free or colder there. Peers are reached through ``HandOverPeers``; a peer that dies
or is full is replaced by the next.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from router.protocol.block_hash import HASH_BYTES, split_chain
from serve_app.cache.kv_chain import KvChain
from serve_app.cache.prefix.hot_prefixes import HashedTokens, HotPrefixes, Kind, PrefixRun, SavedPrefix
from serve_app.engine.protocol import CacheRoom, Engine
from serve_app.replica.lifecycle.receipt import Receipt, Skipped
from serve_app.replica.lifecycle.takeover import Survey
from serve_app.replica.pull import PIECE_BYTES, HolderLost

logger = logging.getLogger(__name__)

PIECES_IN_FLIGHT = 3

BUSY_BYTES_PER_S = 256 * 1024 * 1024
"""Handed over a second at most while streams run here: copying takes turns with their steps."""

ANSWER_S = 10.0
"""A peer that does not answer for so long is left alone."""


class HandOverPeers(Protocol):
    """The other replicas, as one that leaves uses them. Every method raises HolderLost."""

    async def survey(self, peer: str, runs: Sequence[bytes]) -> Survey:
        """Ask what a peer knows of runs of blocks, and what room it has."""

    async def take(self, peer: str, prefix: HashedTokens, first: int, part: KvChain, kind: Kind) -> int:
        """Give a peer blocks; returns how many leading ones of the prefix it holds then, -1 where it refused them."""

    async def keep(self, peer: str, saved: SavedPrefix, prefix: HashedTokens) -> bool:
        """Have a peer keep a save; returns whether it does."""


@dataclass(slots=True)
class _Receiver:
    """A peer. ``known``: leading blocks that it holds of each run; ``used``: blocks promised to it so far."""

    name: str
    known: list[int]
    room: CacheRoom
    used: int = 0
    fails: Skipped | None = None

    def room_for(self, heat: float) -> int:
        """Return how many more blocks of that heat it has room for."""
        return max(0, self.room.blocks_for(heat) - self.used)


class HandOver:
    """One replica's hand-over. ``busy``: whether streams run here."""

    def __init__(
        self, engine: Engine, peers: HandOverPeers, block_size: int, busy: Callable[[], bool], receipt: Receipt
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._size = block_size
        self._busy = busy
        self._block_bytes = max(engine.kv_block_bytes, 1)
        self._receipt = receipt
        self._hot = HotPrefixes()
        self._receivers: list[_Receiver] = []
        self._under_way: dict[int, asyncio.Event] = {}
        self._left: dict[int, int] = {}
        self._given: set[bytes] = set()
        self._kept: set[bytes] = set()

    async def run(self, peers: Sequence[str], time_s: float) -> None:
        """Hand over everything that nobody else holds, for ``time_s`` at most; raises nothing.

        May be run again: what was cached meanwhile follows.
        """
        receipt, started_s = self._receipt, time.monotonic()
        try:
            async with asyncio.timeout(time_s):
                self._hot = await asyncio.to_thread(self._engine.hot_prefixes)
                receipt.skipped.clear()
                self._left = {number: run.blocks - self._given_of(run) for number, run in enumerate(self._hot.runs)}
                self._receivers = await self._survey(peers)
                receipt.peers = max(receipt.peers, len(self._receivers))
                self._count_held()
                await self._move_all()
        except TimeoutError:
            self._skip_rest("time")
        except Exception:
            logger.exception("the hand-over failed; what is cached here alone is lost")
            self._skip_rest("refused")
        saves = {save.key for save in self._hot.saves}
        receipt.saves, receipt.saves_lost = len(self._kept), len(saves - self._kept)
        receipt.seconds += time.monotonic() - started_s

    async def _survey(self, peers: Sequence[str]) -> list[_Receiver]:
        runs = [run.hashes for run in self._hot.runs]

        async def ask(peer: str) -> _Receiver | None:
            try:
                async with asyncio.timeout(ANSWER_S):
                    answer = await self._peers.survey(peer, runs)
            except (HolderLost, TimeoutError) as error:
                logger.info("replica %s takes nothing over: %s", peer, error)
                self._receipt.lost.add(peer)
                return None
            return _Receiver(peer, list(answer.known), answer.room)

        return [receiver for receiver in await asyncio.gather(*map(ask, peers)) if receiver is not None]

    def _count_held(self) -> None:
        """Count what peers held before, as skipped: nobody else's copy is missed."""
        for number, run in enumerate(self._hot.runs):
            known = max((receiver.known[number] for receiver in self._receivers), default=0)
            self._left[number] = run.blocks - known
            self._skipped("held_by_peer", known - self._given_of(run))

    def _given_of(self, run: PrefixRun) -> int:
        return sum(1 for block_hash in split_chain(run.hashes) if block_hash in self._given)

    async def _move_all(self) -> None:
        # A save goes to one peer as a whole; after that its runs are held there.
        units: list[tuple[int, SavedPrefix | None]] = [
            (save.run, save) for save in sorted(self._hot.saves, key=lambda save: save.run)
        ]
        units += [(number, None) for number in range(len(self._hot.runs))]
        line = iter(units)

        async def work() -> None:
            for number, save in line:
                await self._move_in_turn(number, save)

        async with asyncio.TaskGroup() as group:
            for _ in range(PIECES_IN_FLIGHT):
                group.create_task(work())

    async def _move_in_turn(self, number: int, save: SavedPrefix | None) -> None:
        """Move a run, or a save, after whatever moves a part of its prefix now."""
        path = self._hot.path(number)
        moves = path if save is not None else path[-1:]
        done = asyncio.Event()
        before = [self._under_way[i] for i in path if i in self._under_way]
        self._under_way.update(dict.fromkeys(moves, done))
        try:
            for event in before:
                await event.wait()
            if save is None:
                await self._move_run(path)
            else:
                await self._move_save(path, save)
        finally:
            done.set()
            for i in moves:
                if self._under_way.get(i) is done:
                    del self._under_way[i]

    async def _move_run(self, path: list[int]) -> None:
        number = path[-1]
        run = self._hot.runs[number]
        self._left[number] = run.blocks - max((receiver.known[number] for receiver in self._alive()), default=0)
        reason: Skipped = "no_room" if self._alive() else "no_peers"
        while self._left[number] and (receiver := self._next_receiver(path, run.kind, whole=False)):
            failed = await self._give(receiver, path, run.kind)
            if receiver.known[number] == run.blocks:
                self._receipt.prefixes += 1
                return
            reason = failed or "no_room"  # without a failure it took what it has room for
            if failed == "gone":
                break
        self._skip(number, reason)

    async def _move_save(self, path: list[int], save: SavedPrefix) -> None:
        """Give one peer the whole prefix of a save, and have it kept there; the next peer where that fails."""
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
        self, path: list[int], kind: Kind, *, whole: bool, without: set[str] | frozenset[str] = frozenset()
    ) -> _Receiver | None:
        """Return the peer that lacks the fewest blocks of a prefix, and then the one with most room; None: none fits.

        ``whole``: only one that has room for all of it.
        """
        heat = self._heat(path[-1], kind)
        fits: list[tuple[int, int, _Receiver]] = []
        for receiver in self._alive():
            lacks, room = self._lacks(receiver, path), receiver.room_for(heat)
            # Blocks before those of the run have to fit too, or nothing of the run would.
            least = lacks if whole else self._lacks(receiver, path[:-1]) + 1
            if receiver.name not in without and room >= least:
                fits.append((lacks, -room, receiver))
        return min(fits, key=lambda each: each[:2])[2] if fits else None

    def _heat(self, number: int, kind: Kind) -> float:
        return self._hot.runs[number].heat if kind == "prefix" else math.inf

    def _lacks(self, receiver: _Receiver, path: Sequence[int]) -> int:
        return sum(self._hot.runs[i].blocks - receiver.known[i] for i in path)

    async def _give(self, receiver: _Receiver, path: list[int], kind: Kind) -> Skipped | None:
        """Send a peer what it lacks of a prefix, as far as it has room; return why it failed, None: it did not."""
        room = receiver.room_for(self._heat(path[-1], kind))
        promised = min(room, self._lacks(receiver, path))
        receiver.used += promised
        try:
            for i in path:
                failed, promised = await self._give_run(receiver, i, promised)
                if failed is not None:
                    return failed
                if receiver.known[i] < self._hot.runs[i].blocks:
                    return None
        finally:
            receiver.used -= promised
        return None

    async def _give_run(self, receiver: _Receiver, number: int, promised: int) -> tuple[Skipped | None, int]:
        """Send what is lacking of one run, ``promised`` blocks at most; return why it failed and what is unused."""
        run, step = self._hot.runs[number], max(1, PIECE_BYTES // self._block_bytes)
        prefix = self._hot.prefix(number)
        before = len(prefix.chain) // HASH_BYTES - run.blocks
        while promised and receiver.known[number] < run.blocks:
            first = before + receiver.known[number]
            count = min(step, promised, run.blocks - receiver.known[number])
            wanted = replace(prefix, token_ids=prefix.token_ids[: (first + count) * self._size])
            started_s = time.monotonic()
            part = await asyncio.to_thread(self._engine.export_prefix, wanted, first, count)
            if part is None:
                return "gone", promised
            try:
                async with asyncio.timeout(ANSWER_S):
                    held = await self._peers.take(receiver.name, prefix, first, part, run.kind)
            except (HolderLost, TimeoutError):
                self._lose(receiver)
                return "peer_lost", promised
            if held < 0:
                receiver.fails = "refused"
                return "refused", promised
            self._note_held(receiver, number, held)
            if held < first:
                return "parent_missing", promised
            arrived = min(held - first, part.header.blocks)
            promised -= arrived
            self._left[number] = min(self._left[number], run.blocks - receiver.known[number])
            self._given.update(split_chain(part.header.hashes[: arrived * HASH_BYTES]))
            self._receipt.moved(run.kind, arrived, self._block_bytes)
            if arrived < part.header.blocks:
                receiver.room = CacheRoom(0, b"")
                return "no_room", promised
            if self._busy():
                pace_s = count * self._block_bytes * PIECES_IN_FLIGHT / BUSY_BYTES_PER_S
                await asyncio.sleep(max(0.0, pace_s - (time.monotonic() - started_s)))
        return None, promised

    def _note_held(self, receiver: _Receiver, number: int, held: int) -> None:
        """Note how many leading blocks of a prefix a peer has: it may have evicted, or still compute, what it knew."""
        for i in self._hot.path(number):
            receiver.known[i] = min(max(0, held), self._hot.runs[i].blocks)
            held -= self._hot.runs[i].blocks

    def _skip(self, number: int, reason: Skipped) -> None:
        """Count what is left of a run as skipped."""
        self._skipped(reason, self._left[number])
        self._left[number] = 0

    def _skip_rest(self, reason: Skipped) -> None:
        self._skipped(reason, sum(self._left.values()))
        self._left.clear()

    def _skipped(self, reason: Skipped, blocks: int) -> None:
        if blocks > 0:
            self._receipt.skipped[reason] += blocks
