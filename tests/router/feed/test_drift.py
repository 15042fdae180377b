"""If a directory differs from a replica's blocks, the replica's next digest reveals it, and a snapshot repairs it."""

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.directory import FIRST_PAUSE_S, LAST_PAUSE_S, Directory, DriftChecks
from router.feed.sequencing import FeedMessage, decode_message, encode
from router.protocol.events import BlocksRemoved, BlocksStored, CacheCleared, CacheDigest, Event, TierDigest
from router.settings import RouterSettings
from tests.router.feed.feed_line import HASHES, TIERS, Replica, changes, digest_of, packed, steps


@settings(max_examples=150)
@given(steps=steps, seed=st.integers(0, 2**32), loss=st.sampled_from([0.0, 0.2, 0.5]))
def test_no_honest_feed_is_taken_for_drift(steps: list[tuple[list[Any], str]], seed: int, loss: float) -> None:
    """Through lost, repeated and reordered messages, snapshots and new feeds, no honest replica's digest differs.

    Once all messages are delivered, the directory equals the caches. (docs: routing)
    """
    line = Replica(seed)
    rng = Random(seed + 1)
    wire: list[tuple[bool, bytes]] = []
    for events, action in steps:
        wire += [(True, message) for message in line.does(events)]
        if action == "restart":
            line.begin_life()
            wire.clear()
        elif action == "garbage":
            wire.append((bool(rng.getrandbits(1)), rng.randbytes(rng.randrange(20))))
        elif action == "wait":
            line.now_s += rng.random() * 10
        if action in ("poll", "wait") and (nonce := line.resequencer.poll(line.now_s)) is not None:
            wire += [(False, chunk) for chunk in line.sequencer.snapshot(nonce)]
        if action != "poll":
            sent, wire = wire, []
            for is_delta, data in sent:
                fate = rng.random()
                if fate < loss:
                    continue
                if fate < loss + 0.1:
                    wire.append((is_delta, data))  # arrives late (or again)
                (line.resequencer.on_delta if is_delta else line.resequencer.on_chunk)(data, line.now_s)
                if rng.random() < 0.1:
                    rng.shuffle(wire)
    line.settle()
    checks = line.core.drift.checks
    line.hears(line.does(["digest"]))
    assert line.core.drift.checks == checks + 1
    assert line.found == line.sequencer.mirror_drifts == 0
    assert line.known() == line.held


def altered(block_hash: bytes, rng: Random) -> bytes:
    """Flip a bit that the directory uses: it identifies blocks by the upper 36 of 64 bits and a few of the lowest."""
    bit = rng.choice([*range(6), *range(28, 64)])
    return (int.from_bytes(block_hash[:8], "little") ^ (1 << bit)).to_bytes(8, "little") + block_hash[8:]


def lie(events: tuple[Event, ...], before: list[Event], kind: str, rng: Random) -> tuple[Event, ...]:
    """Return the false events that arrive in place of a message's events."""
    at = rng.randrange(len(events))
    told = list(events)
    match kind:
        case "lost":
            del told[at]
        case "doubled":
            told.insert(rng.randrange(len(told) + 1), rng.choice([*before, *events]))
        case "altered":
            event = told[at]
            if isinstance(event, BlocksStored | BlocksRemoved) and event.hashes:
                told[at] = type(event)(altered(event.hashes, rng), event.tier)
        case "moved":
            event = told[at]
            if isinstance(event, BlocksStored | BlocksRemoved):
                told[at] = type(event)(event.hashes, TIERS[TIERS.index(event.tier) - 1])
        case "invented":
            event_type = rng.choice((BlocksStored, BlocksRemoved))
            told.insert(at, event_type(rng.choice(HASHES), rng.choice(TIERS)))
    return tuple(told)


@settings(max_examples=300)
@given(
    batches=st.lists(st.lists(changes.filter(lambda change: change != "digest"), max_size=4), min_size=1, max_size=12),
    lies=st.lists(st.sampled_from(["", "lost", "doubled", "altered", "moved", "invented"]), min_size=12, max_size=12),
    seed=st.integers(0, 2**32),
)
def test_every_lie_is_found_by_the_next_digest_and_mended(batches: list[list[Any]], lies: list[str], seed: int) -> None:
    """Lies are in complete messages in order, and count only if they make the directory wrong. (docs: routing)"""
    line = Replica(seed)
    line.settle()
    before: list[Event] = []
    for batch, kind in zip(batches, lies, strict=False):
        for message in line.does(batch):
            told = decode_message(message)
            events = lie(told.events, before, kind, line.rng) if kind else told.events
            before += told.events
            line.hears([encode(FeedMessage(told.seq, events))])
    assert line.resequencer.live, "nothing is known to be missing"
    foreign = line.core.directory.blocks_held("a").values(), map(len, line.held.values())
    wrong = line.known() != line.held or sum(foreign[0]) != sum(foreign[1])
    line.hears(line.does(["digest"]))
    assert line.found == wrong
    assert line.resequencer.live != wrong
    line.settle()
    assert line.known() == line.held
    line.hears(line.does(["digest"]))
    assert line.found == wrong, "a repaired directory agrees"
    assert line.core.state()["replicas"][0]["drift"].keys() <= {"extra", "missing", "altered"}


@pytest.mark.parametrize(
    ("known", "held", "kind"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 2], "extra"),
        ([1, 2], [1, 2, 3], "missing"),
        ([1, 2], [1, 3], "altered"),
        ([], [], None),
    ],
)
def test_kinds_of_drift_are_distinguished(known: list[int], held: list[int], kind: str | None) -> None:
    directory = Directory(16)
    directory.add_replica("a")
    directory.apply("a", [BlocksStored(packed(known), "host")])
    assert directory.drift("a", digest_of({"pool": set(), "host": set(held)})) == kind
    assert directory.drift("b", digest_of({"pool": set(), "host": {1}})) is None, "b is unknown"


def test_blocks_refused_at_the_bound_are_no_drift_until_there_is_space() -> None:
    """A full directory has holes that no snapshot could fill; once it has space, they are filled."""
    line = Replica(0, max_blocks=16)
    line.core.update_replicas(["a", "b"])
    line.core.apply("b", [BlocksStored(Random(5).randbytes(16 * 10))])
    line.settle()
    line.hears(line.does([("store", "pool", list(range(14))), "digest"]))
    assert line.core.directory.refused_blocks > 0
    assert line.core.drift.checks == 1
    assert line.found == 0
    line.core.drop_replica("b")
    while line.core.directory.sweep():
        pass
    line.hears(line.does(["digest"]))
    assert line.core.drift.differences == {"a": {"missing": 1}}
    line.settle()
    assert line.known() == line.held


@given(
    refused=st.integers(1, 12), held=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
    lost=st.booleans(), empties=st.sampled_from(["clear", "leave"]),
)  # fmt: skip
def test_refusals_before_a_snapshot_excuse_nothing_after_it(
    refused: int, held: list[int], lost: bool, empties: str
) -> None:
    """A crowded directory may lack what it refused. Once a replica's hints begin anew, a gap is drift again."""
    directory = Directory(16, 16)
    for name in ("a", "b"):
        directory.add_replica(name)
    directory.apply("b", [BlocksStored(Random(5).randbytes(16 * 16))])
    directory.apply("a", [BlocksStored(packed(list(range(4, 4 + refused))))])
    assert directory.refused_blocks
    if empties == "clear":
        directory.apply("a", [CacheCleared()])
    else:
        directory.remove_replica("a")
        directory.add_replica("a")
    directory.remove_replica("b")
    while directory.sweep():
        pass
    directory.add_replica("b")
    directory.apply("b", [BlocksStored(Random(6).randbytes(16 * 9))])
    known = held[1:] if lost else held
    directory.apply("a", [BlocksStored(packed(known))])
    directory.apply("b", [BlocksStored(Random(7).randbytes(16 * 16))])
    assert directory.num_blocks > 12, "it is crowded again"
    assert directory.drift("a", digest_of({"pool": set(held), "host": set()})) == ("missing" if lost else None)


def test_another_bound_empties_the_directory_and_snapshots_fill_it_again() -> None:
    line = Replica(0)
    line.settle()
    line.hears(line.does([("store", "pool", [1, 2, 3])]))
    line.core.configure(RouterSettings(max_blocks=500))
    assert line.known() == {tier: set() for tier in TIERS}
    line.settle()
    assert line.known() == line.held
    line.hears(line.does(["digest"]))
    assert (line.core.drift.checks, line.found) == (1, 0)


def test_a_digest_that_never_agrees_is_asked_about_ever_more_rarely() -> None:
    """A replica with false digests costs a snapshot per ten minutes; an agreeing digest resets the pause."""
    checks, directory = DriftChecks(), Directory(16)
    directory.add_replica("a")
    false = CacheDigest((TierDigest("pool", 1, 1),))
    asked = [at_s for at_s in range(0, 7200, 5) if checks.compare(directory, "a", false, float(at_s))]
    assert asked[:3] == [0, FIRST_PAUSE_S, 3 * FIRST_PAUSE_S]
    assert len(asked) <= 7 + 7200 / LAST_PAUSE_S
    assert checks.differences == {"a": {"missing": 1440}}
    assert not checks.compare(directory, "a", CacheDigest(()), 8000.0)
    assert checks.compare(directory, "a", false, 8001.0)
    checks.forget("a")
    assert not checks.differences


@given(events=st.lists(changes, max_size=20), wrong=st.integers(1, 2**63))
def test_a_mirror_that_lies_is_found_by_its_own_replica(events: list[Any], wrong: int) -> None:
    """Routers know the mirror, so the feed drops a digest that contradicts it, and publishes one that agrees."""
    line = Replica(0)
    line.does(events)
    true = digest_of(line.held)
    assert len(line.sequencer.publish([true])) == 1
    false = msgspec.structs.replace(true.tiers[0], xor=true.tiers[0].xor ^ wrong, blocks=true.tiers[0].blocks + 1)
    assert line.sequencer.publish([CacheDigest((false, *true.tiers[1:]))]) == []
    assert line.sequencer.mirror_drifts == 1
    assert len(line.sequencer.publish([true])) == 1
