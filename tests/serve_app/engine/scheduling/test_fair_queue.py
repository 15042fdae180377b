"""Deficit round robin: every tenant with work gets its quantum in turn, and nobody saves up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from serve_app.engine.scheduling.fair_queue import DECODE_TOKENS, QUANTUM_TOKENS, FairQueue


def serve(
    queue: FairQueue, work: dict[str, int], budget: int, decodes: Mapping[str, int] | None = None
) -> list[tuple[str, int]]:
    """One step: spend ``budget`` on the tenants' remaining work; return who got what, in order."""
    queue.begin((tenant for tenant, left in work.items() if left), decodes or {})
    served = []
    while budget and (turn := queue.head()):
        tenant, credit = turn
        tokens = min(credit, budget, work[tenant])
        work[tenant] -= tokens
        budget -= tokens
        served.append((tenant, tokens))
        if work[tenant]:
            queue.charge(tenant, tokens)
        else:
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


def test_who_has_no_work_saves_nothing_up() -> None:
    """A tenant that was idle for long gets one quantum in its turn, like everybody."""
    queue = FairQueue(2048)
    work = {"busy": 10**6, "idle": 5}
    serve(queue, work, 2048)
    for _ in range(20):
        serve(queue, work, 2048)
    work["idle"] = 10**6
    got = Counter(dict.fromkeys(work, 0))
    for tenant, tokens in serve(queue, work, 2048):
        got[tenant] += tokens
    assert abs(got["busy"] - got["idle"]) <= queue.quantum_tokens


def test_a_lone_tenant_gets_the_whole_step() -> None:
    assert sum(tokens for _, tokens in serve(FairQueue(2048), {"a": 10**6}, 2048)) == 2048


def test_decodes_shorten_a_tenants_turns_and_never_stop_it() -> None:
    """The part of a step that a tenant's decodes take is not given to its prompts once more."""
    for decodes, turn in ((0, 128), (5, 128 - 5 * DECODE_TOKENS), (14, 16), (4096, 16)):
        queue = FairQueue(2048)
        got: Counter[str] = Counter()
        for _ in range(100):
            for tenant, tokens in serve(queue, {"few": 10**6, "many": 10**6}, 512, {"many": decodes}):
                got[tenant] += tokens
        assert abs(got["many"] * queue.quantum_tokens - got["few"] * turn) <= queue.quantum_tokens**2


def test_a_lone_tenants_decodes_cost_it_nothing() -> None:
    assert sum(tokens for _, tokens in serve(FairQueue(2048), {"a": 10**6}, 2048, {"a": 64})) == 2048


def test_a_quantum_is_at_most_a_quarter_of_a_step() -> None:
    """So that one step serves four tenants."""
    assert FairQueue(8192).quantum_tokens == QUANTUM_TOKENS
    assert FairQueue(64).quantum_tokens == 16
    assert FairQueue(2).quantum_tokens == 1
