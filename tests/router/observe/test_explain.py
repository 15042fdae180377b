"""Explanations name the winner of the next decision, under every policy, and asking changes nothing; demand."""

import json
from collections import Counter
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import RoutingCore
from router.observe import RequestTimes, WorkingSet
from router.policies import POLICIES
from router.protocol.events import BlocksStored, LoadReport
from tests.router.cores import CHAIN, ask, core_of, decided, load

NAMES = ["a", "b", "c", "d"]


def core_with(
    held: dict[str, int], loads: dict[str, LoadReport] | None = None, policy: str = "estimated_ttft"
) -> RoutingCore:
    """``held``: blocks of the chain by replica."""
    reports = {name: (loads or {}).get(name, load()) for name in held}
    return core_of(reports, {name: CHAIN[: 16 * blocks] for name, blocks in held.items()}, policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40)
@given(
    held=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 20)),
    work=st.dictionaries(
        st.sampled_from(NAMES), st.tuples(st.integers(0, 50_000), st.integers(0, 8), st.integers(0, 18))
    ),
    blocked=st.sets(st.sampled_from(NAMES)),
    before=st.integers(0, 3),
)
def test_the_winner_is_the_next_decision(
    policy: str, held: dict[str, int], work: dict[str, tuple[int, int, int]], blocked: set[str], before: int
) -> None:
    """The acting policy's winner, reason and estimate equal those of the next decision. (docs: routing)"""
    core = core_with(held, {name: load(*row) for name, row in work.items()}, policy)
    for number in range(before):
        core.decide(ask(number, CHAIN[:160]))
    core.follow(lambda _: True, lambda: blocked)
    state, counters = core.state(), repr(core.counters)
    said = json.loads(json.dumps(core.explain(ask(), list(POLICIES))))
    assert (core.state(), repr(core.counters)) == (state, counters)
    assert said == json.loads(json.dumps(core.explain(ask(), list(POLICIES))))
    decision = core.decide(ask(), blocked)
    winner = said["winners"][policy]
    assert winner["because"]
    if decision is None:
        assert winner["replica_id"] is None
        return
    assert (winner["replica_id"], winner["reason"]) == (decision.replica_id, decision.reason)
    assert said["best_cached_tokens"] == decision.best_cached_tokens
    shown = {replica["replica_id"]: replica for replica in said["replicas"]}
    assert set(shown) == set(held)
    chosen = shown[decision.replica_id]
    assert chosen["policies"][policy]["rank"] == 1
    assert chosen["cached_tokens"] == decision.selected_cached_tokens
    assert chosen["estimated_ttft_s"] == pytest.approx(decision.estimated_ttft_s)


def test_facts_of_each_replica() -> None:
    core = core_with({"a": 0, "b": 20, "c": 0}, {"b": load(900, 3, 1), "c": load(0, 8, 16)})
    core.apply("b", [BlocksStored(CHAIN[:80], "host")])
    said = core.explain(ask(), ["estimated_ttft", "lmetric"])
    by_id = {replica["replica_id"]: replica for replica in said["replicas"]}
    assert by_id["b"]["cached_tokens"] == 320
    assert by_id["b"]["cached_tokens_by_tier"] == {"pool": 320, "host": 80}
    assert by_id["b"]["uncached_tokens"] == 5
    assert by_id["b"]["queued_prefill_tokens"] == 900
    assert by_id["b"]["running_sequences"] == 3
    assert by_id["b"]["prefill_tokens_per_s"] == 1000.0
    assert by_id["a"]["estimated_ttft_s"] == pytest.approx(0.325)
    assert by_id["c"]["full"]
    assert by_id["c"]["policies"] == {"estimated_ttft": None, "lmetric": None}
    assert [replica["replica_id"] for replica in said["replicas"]] == ["b", "a", "c"]
    core.decide(ask())
    follow = core.explain(ask(), ["estimated_ttft"])
    assert {replica["in_flight_tokens"] for replica in follow["replicas"]} == {0, 320}


@pytest.mark.parametrize(
    ("held", "loads", "said"),
    [
        ({"a": 20, "b": 3}, {}, "holds 320 of 325 prompt tokens, the most"),
        ({"a": 20, "b": 20}, {}, "as 2 replicas do"),
        ({"a": 0, "b": 0}, {}, "no replica holds any"),
        ({"a": 0, "b": 9}, {"b": load(90_000, 8, 3)}, "b, which holds 144 tokens where it holds 0"),
        ({"a": 0, "b": 9, "c": 0}, {"b": load(0, 8, 16)}, "b, which holds 144 tokens, is full"),
        ({"a": 5}, {}, "the only replica"),
        ({}, {}, "there are no replicas"),
        ({"a": 5}, {"a": load(0, 8, 16)}, "every replica is full or blocked"),
    ],
)
def test_sentences_tell_why(held: dict[str, int], loads: dict[str, LoadReport], said: str) -> None:
    explained = core_with(held, loads).explain(ask(), ["estimated_ttft"])
    assert said in explained["winners"]["estimated_ttft"]["because"]


def test_a_prefill_under_way_is_named() -> None:
    core = core_with({"a": 0, "b": 0, "c": 0})
    first = decided(core, ask())
    winner = core.explain(ask(), ["estimated_ttft"])["winners"]["estimated_ttft"]
    assert (winner["replica_id"], winner["reason"]) == (first.replica_id, "in_flight")
    assert "computing a prompt of the same beginning" in winner["because"]


def test_a_spill_of_bounded_hashing_names_the_bound_even_where_nobody_holds_anything() -> None:
    core = core_with({"a": 0, "b": 0}, {"a": load(0, 0, 9)})
    winners = [
        core.explain(ask(key=bytes([key]) * 16), ["bounded_hash"])["winners"]["bounded_hash"] for key in range(20)
    ]
    assert {winner["replica_id"] for winner in winners} == {"b"}
    assert {winner["reason"] for winner in winners} == {"load_spill", "placement"}
    assert all(("over their bound" in w["because"]) == (w["reason"] == "load_spill") for w in winners)


@given(st.lists(st.tuples(st.floats(0.0, 90.0), st.floats(0.001, 500.0)), max_size=100))
def test_times_are_those_of_the_last_minute(requests: list[tuple[float, float]]) -> None:
    times = RequestTimes()
    for at_s, ttft_s in sorted(requests):
        times.add(ttft_s, ttft_s / 2, at_s)
    recent, expected = times.recent(90.0), sorted(ttft_s for at_s, ttft_s in requests if at_s > 30.0)
    assert recent.requests == len(expected)
    assert recent.p90_ttft_s == (expected[ceil(0.9 * len(expected)) - 1] if expected else 0.0)
    assert recent.p90_own_s == recent.p90_ttft_s / 2
    assert recent.mean_own_s == pytest.approx(sum(expected) / 2 / max(len(expected), 1))


def test_of_many_requests_the_latest_stand_for_all() -> None:
    """A thousand requests per second for half a minute: all are counted, and few are kept."""
    times = RequestTimes()
    for number in range(30_000):
        times.add(number / 1000, 0.0, number / 1000)
    recent = times.recent(30.0)
    assert recent.requests == pytest.approx(60_000, rel=0.01)
    assert recent.p90_ttft_s == pytest.approx(29.6, abs=0.1)


@given(st.integers(0, 2**32), st.integers(2, 30))
def test_the_working_set_counts_reused_blocks_once(seed: int, prefixes: int) -> None:
    """The count of distinct blocks used three times or more is right within the sampling error."""
    rng = np.random.default_rng(seed)
    working_set, uses = WorkingSet(), Counter[bytes]()
    chains = [rng.bytes(16 * 400) for _ in range(prefixes)]
    for each in chains:
        times, blocks = int(rng.integers(1, 8)), int(rng.integers(200, 401))
        for _ in range(times):
            working_set.add(each, blocks, 10.0)
            uses.update(each[16 * n : 16 * n + 16] for n in range(blocks))
    exact = sum(count >= 3 for count in uses.values())
    assert abs(working_set.blocks(20.0) - exact) <= 6 * 8 * (exact + 64) ** 0.5
    assert working_set.blocks(20.0 + 600.0) == 0


def test_it_stays_small_and_close_for_any_load() -> None:
    """Of a million blocks at most some thousands are kept, and the estimate is within a few per cent."""
    rng = np.random.default_rng(0)
    working_set = WorkingSet()
    for number in range(100):
        each = rng.bytes(16 * 10_000)
        for _ in range(3):
            working_set.add(each, 10_000, float(number))
    assert sum(len(counts) for _, counts in working_set._slices) <= 5 * 2048
    assert working_set.blocks(100.0) == pytest.approx(1_000_000, rel=0.08)
