"""RoutingCore decides and reserves in one step, also while replicas are away; its counts and documents are right."""

from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from router.core import RoutingCore
from router.policies import POLICIES
from router.protocol.block_hash import HASH_BYTES
from router.protocol.events import BlocksRemoved, BlocksStored, CacheCleared, StatsReport, pack_adapters
from router.serve.core_registry import core_for
from router.settings import PolicySettings, RouterSettings
from tests.router import cores
from tests.router.cores import ask, core_of, decided, load

CHAIN = cores.CHAIN[:160]
"""Ten blocks of 16 tokens."""


def test_decision_predicts_and_counts() -> None:
    core = core_of("abc", {"b": CHAIN})
    decision = decided(core, ask(chain=CHAIN))
    assert (decision.replica_id, decision.reason) == ("b", "cached")
    assert (decision.best_cached_tokens, decision.selected_cached_tokens) == (160, 160)
    assert decision.estimated_ttft_s == pytest.approx(0.005)
    core.record_delivered(decision, 144, 0.02)
    tokens = core.counters.by_policy["estimated_ttft"].by_reason["cached"]
    assert (tokens.decisions, tokens.prompt_tokens, tokens.best_cached_tokens) == (1, 165, 160)
    assert (tokens.selected_cached_tokens, tokens.delivered_cached_tokens) == (160, 144)
    assert core.counters.decisions_by_replica == {"b": 1}
    assert core.counters.decision_s.count == 1


def test_a_request_that_reads_no_kv_is_predicted_none_and_leaves_its_blocks() -> None:
    """It goes where the work is least, is counted without a hit, and the next request follows its blocks."""
    core = core_of("abc", {"b": CHAIN})
    core.apply("b", [load(5000, 1, 16)])
    anew = structs.replace(ask(chain=CHAIN), reads_kv=False)
    decision = decided(core, anew)
    assert (decision.replica_id != "b", decision.reason) == (True, "cold")
    assert (decision.best_cached_tokens, decision.selected_cached_tokens, decision.pull_from) == (0, 0, "")
    assert (core.holders(ask(chain=CHAIN)), core.holders(anew)) == ({"b": 160}, {})
    assert decided(core, ask(chain=CHAIN)).replica_id == decision.replica_id, "it follows the prefill"
    core.record_delivered(decision, 0, 0.02, CHAIN)
    tokens = core.counters.by_policy["estimated_ttft"].by_reason["cold"]
    assert (tokens.best_cached_tokens, tokens.delivered_cached_tokens) == (0, 0)


def test_which_replica_gets_a_request() -> None:
    """The last prompt token is never cached. Full or blocked replicas get nothing; avoided ones are the last choice."""
    core = core_of("ab", {"a": CHAIN})
    for tokens, cached in ((160, 144), (161, 160), (0, 0)):
        core.release(decision := decided(core, ask(chain=CHAIN, tokens=tokens)))
        assert decision.best_cached_tokens == cached
    for avoid, chosen in ((("a",), "b"), (("a", "b"), "a")):
        core.release(decision := decided(core, ask(chain=CHAIN, avoid=avoid)))
        assert decision.replica_id == chosen
    core.apply("a", [load(0, 8, 16)])
    assert core.decide(ask(), blocked=["b"]) is None
    assert (core.counters.all_full, core.state()["open_reservations"]) == (1, 0)
    assert core.decide_unkeyed(["b"]) is None
    assert core.decide_unkeyed() == "b"
    assert RoutingCore("x").decide(ask()) is None


def test_simultaneous_requests_spread_and_users_of_one_cold_prompt_follow_the_first() -> None:
    """Without any report, a herd stays together until its suffixes outweigh the prefix. (docs: routing)"""
    core = core_of("abcdefgh")
    apart = [decided(core, ask(n, Random(n + 1).randbytes(160), key=Random(n).randbytes(16))) for n in range(8)]
    assert len({decision.replica_id for decision in apart}) == 8
    core = core_of("abcdefgh")
    herd = [decided(core, ask(n, CHAIN + Random(n).randbytes(16))) for n in range(5)]
    assert len({decision.replica_id for decision in herd}) == 1
    assert [decision.reason for decision in herd] == ["cold"] + ["in_flight"] * 4
    for decision in herd:
        core.release(decision)
    assert len(core._replicas.pending._chains) == core.state()["open_reservations"] == 0


def test_update_replicas_reports_differences() -> None:
    core = core_of("ab", {"a": CHAIN})
    core.apply("a", [StatsReport((("x", (), 1.0),)), load(adapters=pack_adapters(["style"]))])
    decision = decided(core, ask(chain=CHAIN))
    assert core.update_replicas("ba") == ((), ())
    assert core.update_replicas("bc") == (("c",), ("a",))
    assert core.loads.open_reservations == 0
    assert (core.stats(), core._replicas.adapters._holders) == ({}, {})
    core.release(decision)
    core.apply("a", [BlocksStored(CHAIN), load()])
    assert decided(core, ask(chain=CHAIN)).best_cached_tokens == 0
    core.drop_replica("b")
    assert core.replica_ids == ("c",)


def test_settings_from_json_and_reconfiguration() -> None:
    """Settings come from JSON; unknown policies are refused; another block size empties the directory."""
    settings = RouterSettings.from_json({"policy": "lmetric", "scoring": {"max_holders": 7}})
    assert settings.scoring == PolicySettings(max_holders=7)
    with pytest.raises(ValueError, match="unknown routing policy"):
        RouterSettings(policy="best")
    with pytest.raises(TypeError):
        RouterSettings.from_json({"polcy": "lmetric"})
    core = core_of("a", {"a": CHAIN})
    decided(core, ask(1))
    core.configure(RouterSettings(policy="round_robin", block_size=16))
    decided(core, ask(2))
    assert [shown["decisions"] for shown in core.state()["regret"].values()] == [1, 1], "each under its own policy"
    assert core.directory.num_blocks == 10
    core.configure(RouterSettings(block_size=32))
    assert core.directory.num_blocks == 0
    core.apply("a", [BlocksStored(CHAIN)])
    assert decided(core, ask(chain=CHAIN, tokens=325)).selected_cached_tokens == 320


def test_core_for_is_one_per_key_and_takes_settings() -> None:
    """Threads that ask at once get one core; a Serve router's settings reach the core that its ingress made first."""
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: core_for("test#one"), range(8)))
    assert len({id(core) for core in found}) == 1
    core = core_for("test#one", RouterSettings(policy="lmetric"))
    assert core is found[0]
    assert core_for("test#one").settings.policy == "lmetric"
    core.configure(RouterSettings(policy="sglang"))
    core_for("test#one", RouterSettings(policy="lmetric"))  # a router that starts late
    assert core.settings.policy == "sglang"
    core_for("test#one", RouterSettings(policy="round_robin"))
    assert core.settings.policy == "round_robin"
    assert core_for("test#two").router_id != core.router_id


def test_regret_counts_tokens_not_selected_and_reasons_for_fewer_delivered() -> None:
    """Tokens not selected, evicted since, held but unused, and delivered unpredicted are separate. (docs: routing)"""
    core = core_of("ab", {"b": CHAIN})
    for number, delivered in enumerate((160, 100, 170)):
        decision = decided(core, ask(number, CHAIN))
        core.release(decision)
        core.record_delivered(decision, delivered, 0.01, CHAIN)
    decision = decided(core, ask(3, CHAIN))
    core.apply("b", [BlocksRemoved(CHAIN[16 * 6 :])])
    core.record_delivered(decision, 90, 0.01, CHAIN)
    core.release(decision)
    tokens = core.counters.by_policy["estimated_ttft"].by_reason["cached"]
    assert (tokens.evicted_tokens, tokens.unused_tokens, tokens.unpredicted_tokens) == (64, 60 + 6, 10)
    assert tokens.not_selected_tokens == 0
    core.apply("b", [BlocksStored(CHAIN), structs.replace(load(90_000, 0, 1), committed_prefill_tokens=90_000)])
    assert decided(core, ask(4, CHAIN)).reason == "load_spill"
    spilled = core.state()["regret"]["estimated_ttft"]["by_reason"]["load_spill"]
    assert (spilled["best_cached_tokens"], spilled["selected_cached_tokens"]) == (160, 0)
    assert spilled["not_selected_tokens"] == 160


@pytest.mark.parametrize("policy", ["estimated_ttft", "round_robin"])
def test_estimates_are_compared_with_actual_times(policy: str) -> None:
    """This holds under every policy; lateness and earliness are counted separately. (docs: routing)"""
    core = core_of("a", policy=policy)
    for number, ttft_s in enumerate((0.33, 0.065)):
        decision = decided(core, ask(number, CHAIN))
        core.release(decision)
        assert decision.estimated_ttft_s == pytest.approx(0.165)
        core.record_delivered(decision, 0, ttft_s, CHAIN)
    shown = core.state()["regret"][policy]["ttft"]
    assert shown == {"requests": 2, "estimated_s": 0.33, "actual_s": 0.395, "late_s": 0.165, "early_s": 0.1}
    assert core.counters.by_policy[policy].estimates.ratio.total == pytest.approx(0.395 / 0.165)


NAMES = "abcd"
CHAINS = [Random(number).randbytes(HASH_BYTES * 4) for number in range(3)]

steps = st.lists(
    st.tuples(
        st.sampled_from(("stored", "removed", "cleared", "left", "returned", "forgotten", "died")),
        st.sampled_from(NAMES),
        st.integers(0, len(CHAINS) - 1),
    ),
    max_size=40,
)


@given(steps, st.sampled_from(sorted(POLICIES)))
def test_the_directory_equals_the_caches_of_all_that_are_here_or_away(
    taken: list[tuple[str, str, int]], policy: str
) -> None:
    """Replicas store, forget, leave, return, are given up and die in any order. (docs: routing)"""
    core = core_of(NAMES, policy=policy)
    here, away = set(NAMES), set[str]()
    caches: dict[str, set[int]] = {name: set() for name in NAMES}
    known = set(NAMES)
    for action, name, index in taken:
        if action == "stored":
            core.apply(name, [BlocksStored(CHAINS[index])])
            caches[name] |= {index} if name in known else set()
        elif action == "removed":
            core.apply(name, [BlocksRemoved(CHAINS[index])])
            caches[name] -= {index}
        elif action == "cleared":
            core.apply(name, [CacheCleared()])
            caches[name].clear()
        elif action == "left" and name in here:
            here.remove(name)
            away.add(name)
        elif action == "returned":
            away.discard(name)
            here.add(name)
            known.add(name)
        elif action == "forgotten" and name in away:
            away.remove(name)
            known.remove(name)
            caches[name].clear()
        elif action == "died":
            here.discard(name)
            away.discard(name)
            known.discard(name)
            caches[name].clear()
            core.drop_replica(name)
        core.update_replicas(here, away)
        assert {row["replica_id"] for row in core.state()["replicas"] if row["away"]} == away
        assert set(core.replica_ids) == here
        for number, chain in enumerate(CHAINS):
            holders = {name for name in NAMES if number in caches[name]}
            assert set(core.directory.match(chain)) == holders
            decision = core.decide(ask(chain=chain, tokens=65))
            assert (decision is not None and decision.replica_id in here) or not here
            if decision is not None:
                core.release(decision)
        unkeyed = core.decide_unkeyed()
        assert unkeyed in here if here else unkeyed is None


def test_a_pull_may_come_from_a_replica_that_is_away_and_not_from_a_dead_one() -> None:
    """A leaving replica can export its blocks until it ends; a caller may know of a death before the router does."""
    pulling = dict.fromkeys("ab", load(pull_tokens_per_s=1e6))
    core = core_of(pulling, {"a": CHAINS[0]}, scoring={"min_pull_tokens": 16})
    core.update_replicas("b", away="a")
    decision = decided(core, ask(chain=CHAINS[0]))
    assert (decision.replica_id, decision.pull_from) == ("b", "a")
    again = decided(core, ask(chain=CHAINS[0], avoid=("a",), dead=("a",)))
    assert (again.replica_id, again.pull_from, again.best_cached_tokens) == ("b", "", 0)
