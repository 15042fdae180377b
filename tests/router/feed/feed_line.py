"""One replica's caches and feed, and one router; the test controls every message between them."""

from functools import reduce
from hashlib import blake2b
from operator import xor
from random import Random
from typing import Any

from hypothesis import strategies as st

from router.core import RoutingCore
from router.feed.sequencing import FeedResequencer, FeedSequencer
from router.protocol.events import BlocksRemoved, BlocksStored, CacheCleared, CacheDigest, Event, LoadReport, TierDigest
from router.settings import RouterSettings

NUMBERS = 40
HASHES = [blake2b(bytes([number]), digest_size=16).digest() for number in range(NUMBERS)]
TIERS = ("pool", "host")
LOAD = LoadReport(7, 1, 2, 8, 64, 1000.0)

Held = dict[str, set[int]]


def packed(numbers: list[int] | set[int]) -> bytes:
    return b"".join(HASHES[number] for number in numbers)


def word(block_hash: bytes) -> int:
    key = int.from_bytes(block_hash[:8], "little")
    return (key // 2**28) * (key % 2**28)


def digest_of(held: Held) -> CacheDigest:
    """Return an honest replica's digest, computed one block at a time."""
    words = {tier: [word(HASHES[number]) for number in held[tier]] for tier in TIERS}
    return CacheDigest(tuple(TierDigest(tier, len(words[tier]), reduce(xor, words[tier], 0)) for tier in TIERS))


class Replica:
    def __init__(self, seed: int = 0, max_blocks: int = 1000) -> None:
        self.now_s = 0.0
        self.rng = Random(seed)
        self.core = RoutingCore("me", RouterSettings(max_blocks=max_blocks), clock=lambda: self.now_s)
        self.core.update_replicas(["a"])
        self.begin_life()
        self.core.follow(lambda _: self.resequencer.live, resync=lambda _: self.resequencer.resync())

    def begin_life(self) -> None:
        self.sequencer = FeedSequencer(3)
        self.resequencer = FeedResequencer(
            lambda events: self.core.apply("a", events), self.core.counters.feed, self.rng, self.now_s
        )
        self.held: Held = {tier: set() for tier in TIERS}

    def does(self, events: list[Any]) -> list[bytes]:
        """Change the caches and return the resulting messages; "digest" adds a digest of the blocks held then."""
        told: list[Event] = []
        for event in events:
            match event:
                case ("store", tier, numbers):
                    self.held[tier] |= set(numbers)
                    told.append(BlocksStored(packed(numbers), tier))
                case ("remove", tier, numbers):
                    self.held[tier] -= set(numbers)
                    told.append(BlocksRemoved(packed(numbers), tier))
                case "clear":
                    self.held = {tier: set() for tier in TIERS}
                    told.append(CacheCleared())
                case "digest":
                    told.append(digest_of(self.held))
                case _:
                    told.append(LOAD)
        return self.sequencer.publish(told)

    def hears(self, messages: list[bytes]) -> None:
        for message in messages:
            self.resequencer.on_delta(message, self.now_s)

    def settle(self) -> None:
        """Deliver everything until nothing is known to be missing."""
        for _ in range(50):
            self.hears(self.does(["load"]))
            self.now_s += 11.0
            nonce = self.resequencer.poll(self.now_s)
            for chunk in self.sequencer.snapshot(nonce) if nonce is not None else ():
                self.resequencer.on_chunk(chunk, self.now_s)
            if self.resequencer.live:
                return
        raise AssertionError("the feed never became live")

    def known(self) -> Held:
        """Return the replica's blocks according to the directory, looked up one by one."""
        found: Held = {tier: set() for tier in TIERS}
        for number, block_hash in enumerate(HASHES):
            match = self.core.directory.match(block_hash)
            for tier, tokens in self.core.directory.tiers(block_hash, match).get("a", {}).items():
                if tokens:
                    found[tier].add(number)
        return found

    @property
    def found(self) -> int:
        return sum(kinds.total() for kinds in self.core.drift.differences.values())


numbers = st.lists(st.integers(0, NUMBERS - 1), max_size=6)
tiers = st.sampled_from(TIERS)
changes = st.one_of(
    st.tuples(st.just("store"), tiers, numbers),
    st.tuples(st.just("store"), tiers, numbers),
    st.tuples(st.just("remove"), tiers, numbers),
    st.sampled_from(["clear", "digest", "digest", "load"]),
)
steps = st.lists(
    st.tuples(st.lists(changes, max_size=4), st.sampled_from(["send", "poll", "wait", "restart", "garbage"])),
    max_size=25,
)
