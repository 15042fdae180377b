"""Bounds of waiting times between tenants and within one, in virtual time over the real scheduler and cache."""

import math
from typing import Any

import numpy as np
import pytest

from benchmarks.isolation.flooding import FloodWorkload, measure_flooding
from serve_app.engine.scheduling.fair_queue import LEAST_STEP_TOKENS
from serve_app.engine.scheduling.scheduler import AGING_SHARE
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
