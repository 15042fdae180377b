"""Replicas that are away: the router's knowledge of them stays true, and nothing is sent there."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from router.policy.policies import POLICIES
from router.protocol.block_hash import HASH_BYTES
from router.protocol.events import BlocksRemoved, BlocksStored, CacheCleared
from tests.router.cores import ask, core_of, decided, load

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
