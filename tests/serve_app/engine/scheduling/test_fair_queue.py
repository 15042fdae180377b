"""Deficit round robin: every tenant with work gets its turn, which is shorter after more recent use."""

from collections import Counter, deque
from collections.abc import Collection, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine.scheduling.fair_queue import QUANTUM_TOKENS, RECENT_STEPS, SHORTEST_TURN_PART, FairQueue


def serve(
    queue: FairQueue[str],
    work: dict[str, int],
    budget: int,
    decodes: Mapping[str, int] | None = None,
    awaited: Collection[str] = (),
) -> list[tuple[str, int]]:
    """Run one step: spend ``budget`` on the tenants' remaining work; return (tenant, tokens) in order."""
    queue.begin({tenant: deque([tenant]) for tenant, left in work.items() if left}, decodes or {}, awaited)
    served: list[tuple[str, int]] = []

    def spend(tenant: str, line: deque[str], most: int) -> int:
        tokens = min(most, work[tenant])
        work[tenant] -= tokens
        served.append((tenant, tokens))
        if not work[tenant]:
            line.clear()
        return tokens

    queue.hand_out(budget, spend)
    return served


@given(
    st.lists(st.integers(0, 64), min_size=2, max_size=6),
    st.lists(st.tuples(st.integers(1, 2048), st.integers(0, 5)), min_size=1, max_size=60),
)
def test_no_use_stops_a_tenant(decodes: list[int], steps: list[tuple[int, int]]) -> None:
    """A round serves all, by a sixteenth of a quantum at least and a quantum at most. (docs: routing)"""
    queue: FairQueue[str] = FairQueue(2048)
    tenants = [f"t{i}" for i in range(len(decodes))]
    for budget, only in steps:
        work = {tenant: 10**9 for tenant in tenants if only == 0 or tenant != tenants[only % len(tenants)]}
        served = serve(queue, work, budget, dict(zip(tenants, decodes, strict=True)))
        assert all(1 <= tokens <= queue.quantum_tokens for _, tokens in served)
    rounds = [tenant for tenant, _ in serve(queue, dict.fromkeys(tenants, 10**9), 10**5)]
    for start in range(len(tenants), len(rounds) - len(tenants), len(tenants)):
        assert set(rounds[start : start + len(tenants)]) == set(tenants)
    got = Counter[str]()
    for tenant, tokens in serve(queue, dict.fromkeys(tenants, 10**9), 10**5):
        got[tenant] += tokens
    assert min(got.values()) >= got.total() / len(tenants) / (SHORTEST_TURN_PART + 1)


def ratio(queue: FairQueue[str], steps: int, decodes: int = 0, awaited: Collection[str] = ()) -> float:
    """Serve two tenants with endless work; return the tokens of "a" divided by those of "b". ``decodes``: of "a"."""
    got: Counter[str] = Counter()
    work = {"a": 10**9, "b": 10**9}
    for _ in range(steps):
        for tenant, tokens in serve(queue, work, 512, {"a": decodes}, awaited):
            got[tenant] += tokens
    return got["a"] / got["b"]


def test_a_tenant_of_little_use_comes_first_and_is_equal_soon() -> None:
    """Beside a tenant that was alone, it gets two thirds of its first steps, later half. (docs: routing)"""
    queue: FairQueue[str] = FairQueue(2048)
    for _ in range(3 * RECENT_STEPS):
        assert sum(tokens for _, tokens in serve(queue, {"a": 10**9}, 512, {"a": 64})) == 512, "alone it gets all"
    assert ratio(queue, 10) <= 0.5
    ratio(queue, 5 * RECENT_STEPS)
    assert 0.96 <= ratio(queue, 5 * RECENT_STEPS) <= 1.04


@pytest.mark.parametrize(
    ("decodes", "awaited", "least", "most"),
    [(0, "", 0.98, 1.02), (14, "", 0.5, 0.9), (64, "", 0.3, 0.7), (4096, "", 0.22, 0.28), (64, "a", 0.98, 1.02)],
)
def test_decodes_count_as_use_and_an_awaited_tenant_has_whole_turns(
    decodes: int, awaited: str, least: float, most: float
) -> None:
    """Otherwise a prefix that all need would be as slow as the tenant that happens to compute it. (docs: routing)"""
    assert least <= ratio(FairQueue(2048), 2 * RECENT_STEPS, decodes, awaited) <= most


def test_a_quantum_is_at_most_a_quarter_of_a_step() -> None:
    """One step then serves four tenants."""
    assert [FairQueue(tokens).quantum_tokens for tokens in (8192, 64, 2)] == [QUANTUM_TOKENS, 16, 1]


@given(passing=st.integers(1, 300), idle_steps=st.integers(10 * RECENT_STEPS, 12 * RECENT_STEPS))
@settings(max_examples=10)
def test_tenants_that_left_shorten_nobodys_turns_and_are_forgotten(passing: int, idle_steps: int) -> None:
    """Else the mean use would fall with each of them, and all tenants of equal use would count as heavy."""
    queue: FairQueue[str] = FairQueue(2048)
    for number in range(passing):
        serve(queue, {f"passing {number}": 10}, 10)
    equal = {"a": 4, "b": 4}
    for _ in range(idle_steps):
        queue.begin({}, equal)
    assert queue._used.keys() == equal.keys()
    assert queue.coming(list(equal), equal) == dict.fromkeys(equal, queue.quantum_tokens)
    assert not queue.is_heavy("a")
