"""The sending half of a feed without its sockets: events in, numbered messages and snapshots out, as bytes.

Its mirror of the held hashes keeps snapshots consistent with sequence numbers, and checks digests. One thread owns it.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

from router.feed.messages import FeedMessage, SnapshotChunk, encode
from router.protocol.block_hash import HASH_BYTES, split_chain, xor_of_words
from router.protocol.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheDigest,
    Event,
    LoadReport,
    StatsReport,
    TierDigest,
)


class BlockMirror:
    """The hashes a replica holds, by tier, in the order in which they were stored (parents first)."""

    def __init__(self) -> None:
        self._tiers: dict[str, dict[bytes, None]] = {}
        self._xors: dict[str, int] = {}

    def apply(self, event: Event) -> None:
        """Apply one cache event. Other events change nothing."""
        if isinstance(event, BlocksStored):
            held = self._tiers.setdefault(event.tier, {})
            new = {block_hash: None for block_hash in split_chain(event.hashes) if block_hash not in held}
            held.update(new)
            self._toggle(event.tier, new)
        elif isinstance(event, BlocksRemoved):
            held = self._tiers.get(event.tier, {})
            self._toggle(event.tier, [one for one in split_chain(event.hashes) if held.pop(one, one) is None])
        elif isinstance(event, CacheCleared):
            self._tiers.clear()
            self._xors.clear()

    def holds(self, digest: CacheDigest) -> bool:
        """Return whether the mirror agrees with a digest."""
        told = {of.tier: of for of in digest.tiers if of.blocks}
        held = {tier: TierDigest(tier, len(blocks), self._xors[tier]) for tier, blocks in self._tiers.items() if blocks}
        return told == held

    def tiers(self) -> dict[str, bytes]:
        """Return the packed hashes of each tier that has any."""
        return {tier: b"".join(held) for tier, held in self._tiers.items() if held}

    def _toggle(self, tier: str, changed: Iterable[bytes]) -> None:
        self._xors[tier] = self._xors.get(tier, 0) ^ xor_of_words(b"".join(changed))


class FeedSequencer:
    """Numbers and encodes the events of one replica, which has one feed in its lifetime."""

    def __init__(self, max_blocks_per_message: int = 2048) -> None:
        self.seq = 0
        self.mirror = BlockMirror()
        self.mirror_drifts = 0
        """The digests that the mirror disagreed with. They are not published, because routers follow the mirror."""
        self._max_bytes = max_blocks_per_message * HASH_BYTES
        self._latest: dict[type[Event], Event] = {}

    def publish(self, events: Iterable[Event]) -> list[bytes]:
        """Apply events to the mirror and return their messages, usually one, each too small to stall a listener."""
        messages: list[bytes] = []
        batch: list[Event] = []
        room = self._max_bytes
        for event in events:
            self.mirror.apply(event)
            if isinstance(event, CacheDigest) and not self.mirror.holds(event):
                self.mirror_drifts += 1
                continue
            if isinstance(event, LoadReport | StatsReport):
                self._latest[type(event)] = event
            for piece in self._pieces(event):
                size = len(piece.hashes) if isinstance(piece, BlocksStored | BlocksRemoved) else 0
                if size > room:
                    messages.append(self._message(batch))
                    batch, room = [], self._max_bytes
                batch.append(piece)
                room -= size
        if batch:
            messages.append(self._message(batch))
        return messages

    def snapshot(self, nonce: bytes) -> Iterator[bytes]:
        """Return the chunks of a snapshot of the current state. Later events do not change them."""
        return self._chunks(nonce, self.seq, self.mirror.tiers(), tuple(self._latest.values()))

    def _chunks(self, nonce: bytes, seq: int, tiers: dict[str, bytes], reports: tuple[Event, ...]) -> Iterator[bytes]:
        pieces = (piece for tier, hashes in tiers.items() for piece in self._pieces(BlocksStored(hashes, tier)))
        index, events = 0, tuple(islice(pieces, 1))
        while True:
            following = tuple(islice(pieces, 1))
            last = not following
            yield encode(SnapshotChunk(seq, nonce, index, last, events + reports if last else events))
            if last:
                return
            index, events = index + 1, following

    def _pieces(self, event: Event) -> Iterator[Event]:
        if not isinstance(event, BlocksStored | BlocksRemoved) or len(event.hashes) <= self._max_bytes:
            yield event
            return
        for start in range(0, len(event.hashes), self._max_bytes):
            yield type(event)(event.hashes[start : start + self._max_bytes], event.tier)

    def _message(self, events: list[Event]) -> bytes:
        self.seq += 1
        return encode(FeedMessage(self.seq, tuple(events)))
