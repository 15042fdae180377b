"""Explanations name the winner of the next decision, under every policy, and asking changes nothing."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import RoutingCore
from router.policy.policies import POLICIES
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
        ({"a": 0, "b": 9}, {"b": load(90_000, 8, 1)}, "b, which holds 144 tokens where it holds 0"),
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
