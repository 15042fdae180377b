"""Bad replicas and restarts send nonsense, floods and changing sets. Nothing raises, memory stays bounded."""

import json
from math import inf, nan
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.directory import Directory
from router.protocol.events import BlocksRemoved, BlocksStored, CacheCleared, Event, LoadReport, StatsReport
from tests.router.cores import ask, core_of, decided, load

CHAIN = Random(0).randbytes(16 * 40)
NAMES = [f"r{number}" for number in range(6)]

whole = st.integers(-(1 << 62), 1 << 62)
number = st.floats(allow_nan=True, allow_infinity=True)
names = st.text(max_size=6)
loads = st.builds(
    LoadReport, whole, whole, whole, whole, whole, number,
    st.dictionaries(st.sampled_from(["me", "other"]), whole), whole,
)  # fmt: skip
stats = st.builds(
    StatsReport,
    st.lists(st.tuples(names, st.lists(st.tuples(names, names), max_size=2).map(tuple), number), max_size=3).map(tuple),
)
blocks = st.builds(
    lambda kind, start, length, cut, tier: kind(CHAIN[16 * start : 16 * (start + length) + cut], tier),
    st.sampled_from([BlocksStored, BlocksRemoved]), st.integers(0, 39), st.integers(0, 40), st.integers(0, 3), names,
)  # fmt: skip
events = st.lists(st.one_of(loads, stats, blocks, st.just(CacheCleared())), max_size=4)


@settings(max_examples=150)
@given(steps=st.lists(st.tuples(st.sampled_from(["a", "b"]), events), max_size=8))
def test_nonsense_reports_leave_every_answer_possible(steps: list[tuple[str, list[Event]]]) -> None:
    """Decisions are made, predictions stay within the prompt, and documents are JSON. (docs: routing)"""
    core = core_of("abh")
    for replica_id, said in steps:
        core.apply(replica_id, said)
        decision = decided(core, ask(chain=CHAIN))
        assert 0 <= decision.selected_cached_tokens <= decision.best_cached_tokens <= 640
        assert 0.0 < decision.estimated_ttft_s < inf
        core.explain(ask(chain=CHAIN), ["estimated_ttft", "lmetric"])
        core.record_delivered(decision, 0, 0.1, CHAIN)
        core.release(decision)
        json.dumps(core.state(), allow_nan=False)
        for report in core.stats().values():
            assert all(value == value and abs(value) < inf and name for name, _, value in report.samples)


def test_metrics_that_cannot_be_shown_are_left_out() -> None:
    """Names outside Prometheus' alphabet and values that are not numbers never reach /metrics."""
    core = core_of("a")
    good = ("warmpath_x_total", (("label", 'any\n"text'),), 1.0)
    bad: list[Any] = [("a b", (), 1.0), ("x", (), nan), ("x", (), inf), ("x", (("l l", "v"),), 1.0), ("", (), 1.0)]
    core.apply("a", [StatsReport((good, *bad))])
    assert core.stats()["a"].samples == (good,)


def test_invented_tiers_are_bounded() -> None:
    directory = Directory(16)
    directory.add_replica("a")
    for tier in range(1000):
        directory.apply("a", [BlocksStored(CHAIN[:32], str(tier))])
    assert len(directory.blocks_held("a")) == 8
    assert directory.match(CHAIN) == {"a": 32}


@settings(max_examples=25)
@given(
    flood=st.integers(1, 40), replicas=st.integers(2, 6), seed=st.integers(1, 9), tier=st.sampled_from(["pool", "host"])
)
def test_a_flood_of_blocks_leaves_the_others_room(flood: int, replicas: int, seed: int, tier: str) -> None:
    """One replica fills at most seven eighths; another's blocks get the rest of its share. (docs: routing)"""
    bound = 800
    directory = Directory(16, max_blocks=bound)
    rng = Random(seed)
    for name in NAMES[:replicas]:
        directory.add_replica(name)
    for _ in range(flood):
        directory.apply(NAMES[0], [BlocksStored(rng.randbytes(16 * 64), tier)])
    assert directory.num_blocks <= bound - bound // 8
    directory.apply(NAMES[1], [BlocksStored(CHAIN)])
    assert directory.match(CHAIN) == {NAMES[1]: 640}
    assert directory.num_blocks <= bound


def test_churn_of_replicas_leaves_nothing_behind() -> None:
    core = core_of("", max_blocks=2000)
    rng = Random(1)
    for life in range(5_000):
        core.update_replicas([f"r{life}", "stays"])
        core.apply(f"r{life}", [BlocksStored(rng.randbytes(160)), load()])
        core.apply("stays", [load()])
        core.decide(ask(life, key=rng.randbytes(16)))
    core.update_replicas(["stays"])
    while core.directory.sweep(64):
        pass
    assert core.directory.num_blocks == 0
    assert core.directory.size_bytes < 1_000_000
    assert len(core.directory._owner) < 600
    assert len(core.directory._sets.masks) < 600
    assert set(core.counters.decisions_by_replica) == {"stays"}
    assert len(core._replicas.pending._chains) <= 4096
