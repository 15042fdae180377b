"""Deficit round robin: every tenant with work gets its turn, the shorter the more it used lately."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.scheduling.fair_queue import QUANTUM_TOKENS, RECENT_STEPS, SHORTEST_TURN_PART, FairQueue


def serve(
    queue: FairQueue,
    work: dict[str, int],
    budget: int,
    decodes: Mapping[str, int] | None = None,
    awaited: Collection[str] = (),
) -> list[tuple[str, int]]:
    """One step: spend ``budget`` on the tenants' remaining work; return who got what, in order."""
    queue.begin([tenant for tenant, left in work.items() if left], decodes or {}, awaited)
    served = []
    while budget and (turn := queue.head()):
        tenant, credit = turn
        tokens = min(credit, budget, work[tenant])
        work[tenant] -= tokens
        budget -= tokens
        served.append((tenant, tokens))
        queue.charge(tenant, tokens)
        if not work[tenant]:
            queue.leave(tenant)
    return served


def test_hungry_tenants_get_equal_tokens_whatever_the_step() -> None:
    """After any number of steps two tenants with work differ by at most a quantum."""
    queue = FairQueue(2048)
    work = {"a": 10**6, "b": 10**6, "c": 10**6}
    got: Counter[str] = Counter()
    for step in range(50):
        for tenant, tokens in serve(queue, work, 700 + 37 * step):
            got[tenant] += tokens
        assert max(got.values()) - min(got.get(tenant, 0) for tenant in work) <= queue.quantum_tokens


def test_a_newcomer_waits_for_at_most_a_quantum_of_each_other() -> None:
    queue = FairQueue(2048)
    work = {f"t{i}": 10**6 for i in range(9)}
    serve(queue, work, 1800)
    work["new"] = 10
    before = 0
    while True:
        for tenant, tokens in serve(queue, work, 300):
            if tenant == "new":
                assert before <= 9 * queue.quantum_tokens
                return
            before += tokens


def test_who_used_little_comes_first_and_is_equal_soon() -> None:
    """Beside one that computed alone until now a tenant gets two thirds of its first steps, and half of the later.

    docs/scheduling.md
    """
    queue = FairQueue(2048)
    work = {"busy": 10**9, "idle": 5}
    for _ in range(3 * RECENT_STEPS):
        serve(queue, work, 512)
    work["idle"] = 10**9
    early, late = Counter[str](), Counter[str]()
    for step in range(10 * RECENT_STEPS):
        for tenant, tokens in serve(queue, work, 512):
            (early if step < 10 else late if step >= 5 * RECENT_STEPS else Counter())[tenant] += tokens
    assert early["idle"] >= 2 * early["busy"]
    assert abs(late["idle"] - late["busy"]) <= 0.02 * late.total()


def test_what_was_long_ago_does_not_count() -> None:
    queue = FairQueue(2048)
    serve(queue, {"then": 10**9}, 10**6)
    for _ in range(20 * RECENT_STEPS):
        serve(queue, {"since": 10**9}, 512)
    got = Counter(dict(serve(queue, {"then": 10**9, "since": 10**9}, 512)))
    assert got["then"] >= got["since"]


@given(
    st.lists(st.integers(0, 64), min_size=2, max_size=6),
    st.lists(st.tuples(st.integers(1, 2048), st.integers(0, 5)), min_size=1, max_size=60),
)
def test_nobody_is_stopped_whatever_it_used(decodes: list[int], steps: list[tuple[int, int]]) -> None:
    """Every round of turns serves all, each by a sixteenth of a quantum at least and a quantum at most.

    docs/scheduling.md
    """
    queue = FairQueue(2048)
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


def test_who_is_waited_for_has_whole_turns() -> None:
    """Else a prefix that all need would be as slow as the one that happens to compute it. (docs/scheduling.md)"""
    queue = FairQueue(2048)
    work = {"busy": 10**9, "other": 10**9}
    for awaited, least, most in ((["busy"], 0.98, 1.02), ([], 0.3, 0.7)):
        got = Counter[str]()
        for _ in range(RECENT_STEPS):
            for tenant, tokens in serve(queue, work, 512, {"busy": 64}, awaited):
                got[tenant] += tokens
        assert least <= got["busy"] / got["other"] <= most


def test_a_lone_tenant_gets_the_whole_step() -> None:
    assert sum(tokens for _, tokens in serve(FairQueue(2048), {"a": 10**6}, 2048)) == 2048


def test_decodes_count_as_use_and_never_stop_a_tenant() -> None:
    """The part of steps that a tenant's decodes take is not given to its prompts once more."""
    for decodes, least, most in ((0, 0.98, 1.02), (14, 0.5, 0.9), (4096, 0.22, 0.28)):
        queue = FairQueue(2048)
        got: Counter[str] = Counter()
        for _ in range(5 * RECENT_STEPS):
            for tenant, tokens in serve(queue, {"few": 10**9, "many": 10**9}, 512, {"many": decodes}):
                got[tenant] += tokens
        assert least <= got["many"] / got["few"] <= most


def test_a_lone_tenants_decodes_cost_it_nothing() -> None:
    assert sum(tokens for _, tokens in serve(FairQueue(2048), {"a": 10**6}, 2048, {"a": 64})) == 2048


def test_a_quantum_is_at_most_a_quarter_of_a_step() -> None:
    """So that one step serves four tenants."""
    assert FairQueue(8192).quantum_tokens == QUANTUM_TOKENS
    assert FairQueue(64).quantum_tokens == 16
    assert FairQueue(2).quantum_tokens == 1
