"""Bounds of waiting times between tenants and within one, in virtual time over the real scheduler and cache."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.isolation.flooding import FloodWorkload, measure_flooding
from serve_app.engine.reports import EngineMeters
from serve_app.engine.scheduling.fair_queue import LEAST_STEP_TOKENS, RECENT_STEPS
from serve_app.engine.scheduling.scheduler import AGING_SHARE, BESIDE_HEAVY_S, HEAVY_DECODES_PART
from tests.serve_app.engine.scheduling.bench import RATE, Bench
from tests.serve_app.engine.tiny import prompt

ROOMY = {"num_blocks": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 2048}


@pytest.mark.parametrize("load", [1.2, 2.0])
def test_a_long_cold_prompt_starts_within_the_bound_under_a_stream_of_short_ones(load: float) -> None:
    """30,000 tokens compete with 500-token requests of the same tenant, which exceed the replica's capacity.

    The bound is one step and the time to compute all requests that arrive within ten times its own time after it.
    """
    bench = Bench(**ROOMY)
    bench.add("long", prompt(30_000, 1), 1, tenant="t")
    window_s = 30_000 / (AGING_SHARE * RATE)
    for i in range(10):
        bench.add(f"b{i}", prompt(500, 1000 + i), 1, tenant="t")
    bound_s = 10 * 500 / RATE + load * window_s + 2048 / RATE
    sent = 0
    while "long" not in bench.started_s:
        while sent * 500 / (load * RATE) <= bench.now_s:
            bench.add(f"s{sent}", prompt(500, 10 + sent), 1, tenant="t")
            sent += 1
        bench.schedule(RATE)
        assert bench.now_s <= bound_s + 1, "the long prompt starves"
    assert bench.started_s["long"] > window_s / 2, "nothing overtook it: the test proves nothing"
    assert bench.started_s["long"] <= bound_s


def test_a_flooding_tenant_delays_anothers_start_by_a_step() -> None:
    """It may borrow while it is alone, and leaves an eighth of the slots. (docs: routing)"""
    bench = Bench("flood", "new", **ROOMY)
    for i in range(200):
        bench.add(f"f{i}", prompt(2000, i), 400, tenant="flood")
    for _ in range(60):
        bench.schedule()
    assert 40 <= len(bench.scheduler.running) <= 56
    before_s = bench.now_s
    bench.add("new", prompt(900, 500), 200, tenant="new")
    while "new" not in bench.started_s:
        bench.schedule()
    assert bench.started_s["new"] - before_s <= 2048 / RATE


@pytest.mark.parametrize(
    ("beside", "max_itl_s", "rate", "computed"),
    [
        ("new", math.inf, 10_000.0, 200),
        ("flood", math.inf, 10_000.0, 1000),
        ("flood", math.inf, 1000.0, LEAST_STEP_TOKENS),
        ("flood", 0.05, 10_000.0, 300),
        ("flood", 0.32, 1000.0, 300),
        ("new", 0.01, 10_000.0, 128),
    ],
)
def test_running_answers_keep_their_pace(beside: str, max_itl_s: float, rate: float, computed: int) -> None:
    """Beside others' decodes, the tenant of the most use computes only for as long as those take.

    ``max_itl`` is the longest step beside a decode, for any tenant's prefill, but each step computes a turn.
    (docs: routing)
    """
    bench = Bench("flood", "new", **{**ROOMY, "max_itl_s": max_itl_s})
    bench.add("used", prompt(4000, 1), 1, tenant="flood")
    bench.add("decodes", prompt(100, 2), 500, tenant=beside)
    while bench.scheduler.waiting or any(sequence.prefilling for sequence in bench.scheduler.running):
        bench.schedule()
    bench.add("cold", prompt(8000, 3), 1, tenant="flood")
    assert bench.step(rate, 0.02) == [("decodes", 1), ("cold", computed)]


def test_only_uncached_tokens_are_charged() -> None:
    """A tenant with cached prompts gets ten times the requests through for the same turns. (docs: routing)"""
    bench = Bench("warm", "cold", **{**ROOMY, "max_num_batched_tokens": 512})
    base = prompt(1440, 7)
    bench.add("prime", base, 1, tenant="warm")
    bench.add("other", prompt(1440, 8), 1, tenant="cold")  # so that both have used as much
    while bench.scheduler.waiting or bench.scheduler.running:
        bench.schedule()
    for i in range(100):
        bench.add(f"w{i}", np.append(base, prompt(160, i)), 1, tenant="warm")
        bench.add(f"c{i}", prompt(1600, 1000 + i), 1, tenant="cold")
    for _ in range(20):
        bench.schedule()
    warm = sum(name.startswith("w") for name in bench.started_s)
    cold = sum(name.startswith("c") for name in bench.started_s)
    assert warm >= 8 * cold > 0


def test_nine_tenants_keep_hits_and_starts_under_a_flood() -> None:
    """They keep 0.9 of the hit rate without the flood, and start within ten quanta and a step. (docs: routing)"""
    flooding: Any = measure_flooding(FloodWorkload(duration_s=30.0))
    assert flooding["hit_rate_ratio"] >= 0.9
    assert flooding["unprotected_hit_rate_ratio"] < 0.8
    assert flooding["answer_p95_ratio"] <= 2.5
    assert flooding["flooded"]["queue_s"]["max"] <= (10 * 512 + 2048) / 10_000
    assert flooding["unprotected"]["queue_s"]["p50"] > 1.0


@given(
    light=st.integers(1, 6), heavy=st.integers(1, 36), others=st.integers(0, 8),
    base_s=st.floats(0.001, 0.05), each_s=st.floats(0.0, 0.005), yielding=st.booleans(),
)  # fmt: skip
@example(light=1, heavy=36, others=0, base_s=0.004, each_s=0.0002, yielding=False)
@example(light=1, heavy=36, others=1, base_s=0.004, each_s=0.0002, yielding=True)
def test_answers_beside_a_flood_of_answers_keep_their_pace(
    light: int, heavy: int, others: int, base_s: float, each_s: float, yielding: bool
) -> None:
    """Each step has all answers of light tenants; the heavy ones make it longer by a half of that at most, in turns.

    Where a sequence costs nothing, as on most GPUs, nobody takes turns. ``others``: of another heavy tenant.
    """
    bench = Bench("flood", "more", "light", **ROOMY)
    order = 2**32 if yielding else 0
    bench.add("used", prompt(4000, 1), 1, tenant="flood", order=order)
    bench.add("used too", prompt(4000, 2), 1, tenant="more")
    bench.schedule()
    bench.schedule()
    bench.schedule()
    counts = {"flood": heavy, "more": others, "light": light}
    for tenant, count in counts.items():
        for number in range(count):
            bench.add(f"{tenant} {number}", prompt(17, number), 1500, tenant=tenant, order=order * (tenant == "flood"))
    while bench.scheduler.waiting or any(sequence.prefilling for sequence in bench.scheduler.running):
        bench.schedule()
    seen: Counter[str] = Counter()
    behind_before, steps = None, 0
    for _ in range(40):
        heavy_ones = {tenant for tenant in counts if bench.scheduler.fair_queue.is_heavy(tenant)}
        behind = {tenant for tenant in heavy_ones | ({"flood"} if yielding else set()) if counts[tenant]}
        first = sum(count for tenant, count in counts.items() if tenant not in behind)
        waiting = sum(counts[tenant] for tenant in behind)
        room = waiting
        if each_s and first:
            room = max(1, int(min(waiting, HEAVY_DECODES_PART * (base_s + each_s * first) / each_s)))
        now = bench.step(RATE, base_s, each_s)
        told = Counter(name.split()[0] for name, _ in now)
        assert sum(told[tenant] for tenant in counts.keys() - behind) == first
        assert sum(told[tenant] for tenant in behind) == min(room, waiting)
        if behind != behind_before:
            seen.clear()
            behind_before, steps = behind, 0
        seen.update(name for name, _ in now)
        steps += 1
        for tenant in behind:  # in turns: none has had two more than another of its tenant
            times = [seen[f"{tenant} {number}"] for number in range(counts[tenant])]
            assert max(times) - min(times) <= 1
        if behind and steps >= 2 * len(behind) * math.ceil(waiting / min(room, waiting)):
            assert all(seen[f"{tenant} {number}"] for tenant in counts for number in range(counts[tenant]))


def test_a_new_tenants_prompt_takes_the_step() -> None:
    """A heavy tenant computes for as long as a step of decodes takes beside it, not for the rest of the step.

    When it has gone, steps are a quarter as long as with nobody else, because it may come back.
    """
    bench = Bench("flood", "new", **ROOMY)
    bench.add("used", prompt(4000, 1), 1, tenant="flood")
    while bench.scheduler.waiting or bench.scheduler.running:
        bench.schedule()
    bench.add("more", prompt(20_000, 2), 1, tenant="flood")
    bench.add("new", prompt(100, 3), 1, tenant="new")
    pace = 10_000.0, 0.02, 0.0
    assert sorted(bench.step(*pace)) == [("more", 200), ("new", 100)]
    assert bench.step(*pace) == [("more", int(10_000 * BESIDE_HEAVY_S))]
    for number in range(10 * RECENT_STEPS):
        if not bench.scheduler.running:
            bench.add("more", prompt(20_000, 4 + number), 1, tenant="flood")
        if bench.step(*pace) == [("more", 1000)]:
            return
    raise AssertionError("a tenant alone never has whole steps again")


@given(
    st.floats(0.0, 0.05), st.floats(0.0, 0.01), st.lists(st.integers(1, 64), min_size=2, max_size=40),
    st.lists(st.tuples(st.integers(1, 64), st.floats(1e-6, 10.0)), max_size=20),
)  # fmt: skip
def test_what_a_sequence_takes_is_learned(
    base_s: float, each_s: float, sizes: list[int], odd: list[tuple[int, float]]
) -> None:
    """From steps of several sizes; until then nobody is held back, and no step makes a time negative."""
    meters = EngineMeters()
    assert meters.decode_line_s == (0.0, 0.0)
    for size in sizes:
        meters.stepped(0, base_s + each_s * size, size)
        meters.stepped(100, 1.0, size)  # a step with prefill says nothing
    if max(sizes) - min(sizes) > 4 and len(sizes) < 10:
        assert meters.decode_line_s == pytest.approx((base_s, each_s), abs=1e-9)
    elif len(set(sizes)) == 1:
        assert meters.decode_line_s == pytest.approx((base_s + each_s * sizes[0], 0.0))
    for size, duration_s in odd:
        meters.stepped(0, duration_s, size)
        assert min(meters.decode_line_s) >= 0.0
