"""Directory, its table of keys and its pending prefixes, against naive oracles."""

from itertools import takewhile
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.block_table import KeyTable
from router.directory import Directory, PendingPrefixes
from router.protocol.block_hash import HASH_BYTES, split_chain
from router.protocol.events import ENDS_TIER, BlocksRemoved, BlocksStored, CacheCleared, LoadReport

BLOCK = 16
REPLICAS = [f"replica-{number}" for number in range(5)]
ROOTS = 3
DEPTH = 12


def chain(root: int, depth: int) -> bytes:
    return b"".join(block(root, index) for index in range(depth))


def block(root: int, index: int) -> bytes:
    return Random(root * 1000 + index).randbytes(16)


class NaiveDirectory:
    def __init__(self) -> None:
        self.held: dict[str, dict[str, set[bytes]]] = {}

    def match(self, hashes: bytes, *, below: bool = True) -> dict[str, int]:
        tokens = {}
        for replica_id, tiers in self.held.items():
            blocks = set().union(*(held for tier, held in tiers.items() if below or tier == "pool"))
            depth = next((i for i, piece in enumerate(split_chain(hashes)) if piece not in blocks), len(hashes) // 16)
            if depth:
                tokens[replica_id] = depth * BLOCK
        return tokens


actions = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "truncate", "clear", "leave"]),
        st.sampled_from(REPLICAS),
        st.sampled_from(["pool", "pool", "host"]),
        st.integers(0, ROOTS - 1),
        st.integers(0, DEPTH),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(actions=actions, sweep=st.booleans())
def test_match_equals_oracle(actions: list[tuple[str, str, str, int, int]], sweep: bool) -> None:
    """For prefix-closed caches, in any tiers, through clears and departures, every match is exact."""
    directory, oracle = Directory(BLOCK), NaiveDirectory()
    for action, replica_id, tier, root, depth in actions:
        directory.add_replica(replica_id)
        of_tier = oracle.held.setdefault(replica_id, {}).setdefault(tier, set())
        if action == "truncate":
            tail = chain(root, DEPTH)[16 * depth :]
            directory.apply(replica_id, [BlocksRemoved(tail, tier)])
            of_tier.difference_update(split_chain(tail))
        elif action == "clear":
            directory.apply(replica_id, [CacheCleared()])
            oracle.held[replica_id] = {}
        elif action == "leave":
            directory.remove_replica(replica_id)
            oracle.held.pop(replica_id)
        else:
            directory.apply(replica_id, [BlocksStored(chain(root, depth), tier)])
            of_tier.update(split_chain(chain(root, depth)))
        if sweep:
            directory.sweep(7)
        for wanted in range(ROOTS):
            assert directory.match(chain(wanted, DEPTH)) == oracle.match(chain(wanted, DEPTH))
            near = directory.match(chain(wanted, DEPTH), below=False)
            assert near == oracle.match(chain(wanted, DEPTH), below=False)
        counts = {name: {t: len(b) for t, b in tiers.items() if b} for name, tiers in oracle.held.items()}
        assert {n: {t: c for t, c in directory.blocks_held(n).items() if c} for n in counts} == counts
    while directory.sweep(64):
        pass
    live = {piece for tiers in oracle.held.values() for blocks in tiers.values() for piece in blocks}
    assert directory.num_blocks == len(live)
    for wanted in range(ROOTS):
        assert directory.match(chain(wanted, DEPTH)) == oracle.match(chain(wanted, DEPTH))


def test_unknown_replicas_and_odd_lengths_are_harmless() -> None:
    """Events of an unknown replica change nothing; a trailing partial hash is ignored."""
    directory = Directory(BLOCK)
    directory.apply("ghost", [BlocksStored(chain(0, 3))])
    assert directory.num_blocks == 0
    directory.add_replica("a")
    directory.apply("a", [BlocksStored(chain(0, 3)[:-5]), LoadReport(0, 0, 0, 0, 0, 0.0)])
    assert directory.match(chain(0, 3)) == {"a": 32}
    assert directory.match(chain(0, 3)[:-1]) == {"a": 32}
    assert directory.match(b"") == {}
    directory.remove_replica("ghost")


def test_a_cleared_cache_is_swept_in_bounded_steps() -> None:
    """Its blocks are invisible at once, and later calls free their memory."""
    directory = Directory(BLOCK, max_blocks=100_000)
    for name in ("a", "b"):
        directory.add_replica(name)
    directory.apply("a", [BlocksStored(Random(0).randbytes(16 * 20_000)), BlocksStored(chain(0, 4))])
    directory.apply("b", [BlocksStored(chain(0, 2))])
    directory.apply("a", [CacheCleared()])
    assert directory.match(chain(0, 4)) == {"b": 32}
    assert directory.num_blocks > 19_000, "clearing did not sweep the blocks at once"
    calls = 0
    while directory.sweep(0):
        directory.apply("b", [])
        calls += 1
    assert 10 < calls < 1000
    assert directory.num_blocks == 2
    assert directory.match(chain(0, 4)) == {"b": 32}


def test_bound_refuses_and_counts() -> None:
    directory = Directory(BLOCK, max_blocks=10)
    directory.add_replica("a")
    directory.apply("a", [BlocksStored(chain(0, 12))])
    assert (directory.num_blocks, directory.refused_blocks) == (10, 2)
    assert directory.match(chain(0, 12)) == {"a": 160}


def test_memory_per_block_is_small() -> None:
    """100,000 blocks with three holders each need less than 60 bytes per block by the directory's own count."""
    directory = Directory(BLOCK)
    names = [f"r{n}" for n in range(64)]
    rng = Random(3)
    for name in names:
        directory.add_replica(name)
    for _ in range(160):
        hashes = rng.randbytes(16 * 625)
        for name in rng.sample(names, 3):
            directory.apply(name, [BlocksStored(hashes)])
    assert directory.num_blocks == 100_000
    assert directory.size_bytes / directory.num_blocks < 60


@pytest.mark.parametrize(("block_size", "max_blocks"), [(0, 1), (16, 0), (16, 1 << 40)])
def test_sizes_are_checked(block_size: int, max_blocks: int) -> None:
    """Sizes below one are refused, and more blocks than a table can number."""
    with pytest.raises(ValueError, match="at least 1"):
        Directory(block_size, max_blocks)


def test_the_deepest_known_end_gives_the_match() -> None:
    """Replica "whole" holds all blocks of a prefix, "ends" only reports ends. Removals and departures take effect."""
    directory = Directory(BLOCK)
    for replica_id in ("whole", "ends"):
        directory.add_replica(replica_id)
    directory.apply("whole", [BlocksStored(chain(0, 5))])
    directory.apply("ends", [BlocksStored(block(0, 2) + block(0, 7), ENDS_TIER)])
    assert directory.match(chain(0, 10)) == {"whole": 5 * BLOCK, "ends": 8 * BLOCK}
    assert directory.match(chain(0, 7)) == {"whole": 5 * BLOCK, "ends": 3 * BLOCK}
    assert directory.match(chain(0, 2)) == {"whole": 2 * BLOCK}
    assert directory.tiers(chain(0, 7), {"ends": 3 * BLOCK}) == {"ends": {ENDS_TIER: 3 * BLOCK}}
    directory.apply("ends", [BlocksRemoved(block(0, 7), ENDS_TIER)])
    assert directory.match(chain(0, 10)) == {"whole": 5 * BLOCK, "ends": 3 * BLOCK}
    directory.remove_replica("ends")
    directory.apply("whole", [BlocksStored(chain(1, 3))])
    assert directory.match(chain(0, 10)) == {"whole": 5 * BLOCK}


keys = st.integers(0, 40).map(lambda n: (n // 3) << 28 | n % 2)
operations = st.lists(st.tuples(st.lists(keys, max_size=12), st.sampled_from(["add", "remove", "bump"])), max_size=60)


def step_of(operation: str, value: int) -> int:
    return {"add": value or 1, "remove": 0, "bump": value + 1 if value else 0}[operation]


@settings(max_examples=200)
@given(operations=operations)
def test_table_equals_dict(operations: list[tuple[list[int], str]]) -> None:
    """Colliding keys, removals and growth never lose, duplicate or confuse an entry, and the counts agree."""
    table, oracle = KeyTable(10_000), dict[int, int]()
    for some_keys, operation in operations:
        changes, xor = table.update(some_keys, lambda value, operation=operation: step_of(operation, value))
        moved = moved_xor = 0
        for key in some_keys:
            old = oracle.get(key, 0)
            new = step_of(operation, old)
            moved += new != old
            moved_xor ^= (key >> 28) * (key % 2**28) if new != old else 0
            oracle.pop(key, None)
            if new:
                oracle[key] = new
        assert (sum(count for _, _, count in changes), xor) == (moved, moved_xor)
        assert table.num_entries == len(oracle)
    for number in range(41):
        key = (number // 3) << 28 | number % 2
        assert table.get(key) == oracle.get(key, 0)


SIZE, MOST_KEYS, CHAINS_A_KEY = 16, 3, 4
CHAINS = st.lists(st.sampled_from("xy"), max_size=5).map("".join)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 4), st.sampled_from("abc"), CHAINS),
        st.tuples(st.just("add"), st.just(0), st.sampled_from("abc"), CHAINS),
        st.tuples(st.just("discard"), st.integers(0, 30)),
    ),
    max_size=30,
)


def packed(chain: str) -> bytes:
    return b"".join(chain[: end + 1].encode().ljust(HASH_BYTES, b".") for end in range(len(chain)))


@settings(max_examples=300)
@given(STEPS, CHAINS)
def test_a_prefix_is_in_progress_as_long_as_one_of_the_last_decisions_computes_it(
    steps: list[tuple[Any, ...]], asked: str
) -> None:
    """Of a key's decisions the last four count, even after later ones ended; of the keys the last ones."""
    pending = PendingPrefixes(SIZE, MOST_KEYS)
    keys: dict[int, list[tuple[int, str, str]]] = {}
    for number, (kind, *how) in enumerate(steps):
        if kind == "add":
            key, replica, chain = how
            pending.add(bytes([key]), number, replica, packed(chain))
            keys[key] = [*keys.get(key, []), (number, replica, chain)][-CHAINS_A_KEY:]
            if len(keys) > MOST_KEYS:
                del keys[next(iter(keys))]
        else:
            pending.discard(how[0])
            left = {key: [row for row in rows if row[0] != how[0]] for key, rows in keys.items()}
            keys = {key: rows for key, rows in left.items() if rows}
        for key in range(5):
            found: dict[str, int] = {}
            for _, replica, chain in keys.get(key, ()):
                equal = takewhile(lambda pair: pair[0] == pair[1], zip(asked, chain, strict=False))
                if tokens := sum(SIZE for _ in equal):
                    found[replica] = max(found.get(replica, 0), tokens)
            assert pending.match(bytes([key]), packed(asked)) == found
        assert {number for rows in keys.values() for number, *_ in rows} == pending._key_of.keys()
        assert {bytes([key]) for key in keys} == pending._chains.keys()
