"""A tenant decides which of its own requests starts first, but moves no turn of another's; steps; shared prefills."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve_app.engine.adapter_slots import LoadedAdapters
from serve_app.engine.core.load_reporter import LoadReporter
from serve_app.engine.protocol import AdapterSpec
from serve_app.engine.reports import EngineMeters
from serve_app.engine.scheduling.scheduler import Scheduler
from tests.serve_app.engine.scheduling.bench import Bench
from tests.serve_app.engine.tiny import SCOPE, prompt

COMING = st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.integers(-2, 2)), min_size=8, max_size=24)
"""(milliseconds after the previous one, tenant, order)"""


def run(coming: Sequence[tuple[int, str, int]], slots: int, tokens: int) -> tuple[list[tuple[str, int]], list[str]]:
    """Serve requests of equal cost; return (tenant, tokens) in turn, and the requests in order of their start."""
    bench = Bench("a", "b", "c", num_blocks=4096, max_num_seqs=slots, max_num_batched_tokens=64)
    served: list[tuple[str, int]] = []
    started: list[str] = []
    left, at_s = list(enumerate(coming)), coming[0][0] / 1000
    while left or bench.scheduler.waiting or bench.scheduler.running:
        while left and at_s <= bench.now_s:
            number, (_, tenant, order) = left.pop(0)
            bench.add(f"{number}", prompt(tokens, number), 3, tenant=tenant, arrival_s=at_s, order=order)
            at_s += 1e-6 + (left[0][1][0] / 1000 if left else 0.0)
        if not (bench.scheduler.waiting or bench.scheduler.running):
            bench.now_s = at_s
            continue
        for item in bench.schedule():
            served.append((item.sequence.request.tenant, item.tokens))
            if item.admitted:
                started.append(item.sequence.request.request_id)
    assert len(started) == len(coming), "a request never started"
    return served, started


@example([(0, "c", 0), (0, "a", 1), (1, "b", 0), (1, "a", -1), (1, "b", 0), (1, "a", -1), (1, "b", 0)], 1, 48)
@given(COMING, st.integers(1, 3), st.sampled_from([16, 48, 100]))
def test_tenants_are_served_as_without_an_order(coming: list[tuple[int, str, int]], slots: int, tokens: int) -> None:
    """Any orders give the same tokens to the same tenants in the same steps; only a tenant's own starts differ.

    docs: routing
    """
    served, started = run(coming, slots, tokens)
    plain, first_come = run([(gap, tenant, 0) for gap, tenant, _ in coming], slots, tokens)
    assert served == plain
    assert [coming[int(name)][1] for name in started] == [coming[int(name)][1] for name in first_come]


@given(st.lists(st.tuples(st.just(0), st.sampled_from("abc"), st.integers(-2, 2)), min_size=2, max_size=30))
def test_a_tenants_turns_are_used_in_its_order(coming: list[tuple[int, str, int]]) -> None:
    """By a naive oracle, each turn starts the tenant's lowest order present, the earliest of equals."""
    hold = (0, "c", 0)
    _, started = run([hold, *coming], 1, 64)
    assert started[0] == "0"
    left = dict(enumerate(coming, 1))
    for name in started[1:]:
        tenant = left[int(name)][1]
        mine = [(order, number) for number, (_, owner, order) in left.items() if owner == tenant]
        assert int(name) == min(mine)[1]
        del left[int(name)]


@pytest.mark.parametrize("order", [-1, 1])
def test_order_goes_before_cached_tokens(order: int) -> None:
    """A long uncached prompt starts before a short one of a later order, and after an earlier one's."""
    bench = Bench(num_blocks=512, max_num_seqs=1, max_num_batched_tokens=64)
    bench.add("hold", prompt(64, 1), 2)
    bench.step()
    bench.add("short", prompt(16, 2), 1)
    bench.add("long", prompt(2000, 3), 1, order=order)
    while bench.scheduler.waiting:
        bench.step()
    assert (bench.started_s["long"] < bench.started_s["short"]) == (order < 0)


def test_a_begun_request_is_finished_under_a_stream_of_earlier_orders() -> None:
    """Otherwise another tenant that needs the prefix it computes would wait as long as the stream lasts."""
    bench = Bench("a", "b", num_blocks=4096, max_num_seqs=8, max_num_batched_tokens=64)
    shared = prompt(640, 1)
    bench.add("flex", shared, 1, tenant="a", order=2**32)
    bench.step()
    bench.add("behind", shared, 1, tenant="b")
    for number in range(400):
        bench.add(f"priority {number}", prompt(64, 10 + number), 1, tenant="a", order=-(2**32))
        bench.step()
        if "behind" in bench.started_s:
            break
    assert "behind" in bench.started_s, "it starves behind another tenant's order"
    assert any(name.startswith("priority") for name in bench.started_s), "nothing overtook: the test proves nothing"


@pytest.mark.parametrize("order", [1, 2**32])
def test_the_next_request_for_an_adapters_slot_starts_under_a_stream_of_earlier_orders(order: int) -> None:
    """No tenant overtakes it there; otherwise another tenant would wait as long as the stream lasts.

    One that yields takes no slot that another needs, and waits for the end of the stream.
    """
    bench = Bench("a", "b", num_blocks=4096, max_num_seqs=4, max_num_batched_tokens=64)
    slots: LoadedAdapters[str] = LoadedAdapters(lambda spec: spec.key, max_loras=1, max_cpu_loras=3)
    specs = [AdapterSpec(name, "1", "") for name in ("first", "second", "third")]
    for spec in specs:
        slots.load(spec)
    bench.scheduler = Scheduler(bench.settings, bench.cache, slots)
    first, second, third = (replace(SCOPE, lora=spec.key) for spec in specs)
    bench.add("hold", prompt(64, 1), 20, tenant="a", scope=first)
    bench.step()
    bench.add("later", prompt(64, 2), 1, tenant="a", order=order, scope=second)
    bench.step()
    bench.add("behind", prompt(64, 3), 1, tenant="b", scope=third)
    for number in range(400):
        bench.add(f"priority {number}", prompt(64, 10 + number), 1, tenant="a", order=-(2**32))
        bench.step()
    assert "behind" in bench.started_s
    assert ("later" in bench.started_s) == (order == 1)
    while bench.scheduler.waiting:
        bench.step()


def test_routers_learn_which_requests_a_usual_one_overtakes() -> None:
    """A request of the usual order waits for an earlier order that has just arrived, and for no later one."""
    bench = Bench(num_blocks=512, max_num_seqs=1, max_num_batched_tokens=64)
    bench.add("hold", prompt(64, 1), 9)
    bench.step()
    reporter = LoadReporter(bench.settings, EngineMeters(), bench.scheduler)
    bench.add("yields", prompt(160, 4), 1, order=2**32)
    reporter.update()
    assert reporter.report(0.0).queued_prefill_tokens == 0, "everybody goes first"
    bench.add("later", prompt(160, 2), 1, arrival_s=-1e6, order=2)
    reporter.update()
    assert (reporter.report(0.0).committed_prefill_tokens, reporter.report(0.0).queued_prefill_tokens) == (0, 160)
    bench.add("priority", prompt(96, 3), 1, order=-(2**32))
    reporter.update()
    assert reporter.report(0.0).committed_prefill_tokens == 96


def test_decodes_come_first_then_the_least_uncached_work() -> None:
    bench = Bench()
    bench.add("old", prompt(20, 1))
    assert bench.step() == [("old", 20)]
    bench.add("long", prompt(100, 2))
    bench.add("short", prompt(30, 3))
    assert bench.step() == [("old", 1), ("short", 30), ("long", 33)]


@pytest.mark.parametrize(("rate", "tokens"), [(0.0, 2048), (50.0, 512), (8000.0, 800), (1e6, 2048)])
def test_a_step_prefills_for_a_tenth_of_a_second(rate: float, tokens: int) -> None:
    """A newcomer waits for the step in progress, so a slow engine's steps are short. (docs: routing)"""
    bench = Bench(num_blocks=512, max_num_batched_tokens=2048)
    bench.add("old", prompt(20, 1))
    bench.step()
    bench.add("long", prompt(6000, 2))
    assert bench.step(rate) == [("old", 1), ("long", min(tokens, 2047))]


def test_cached_tokens_are_no_work() -> None:
    """A long prompt with a cached prefix goes before a shorter cold one."""
    bench = Bench(max_num_batched_tokens=20)
    bench.add("warm", prompt(16), 1)
    bench.step()
    bench.add("cold", prompt(15, 5))
    bench.add("hit", np.append(prompt(16), prompt(4, 6)))
    assert bench.step() == [("hit", 4), ("cold", 15)]


@pytest.mark.parametrize("tenants", ["aaa", "abc"])
def test_nobody_overtakes_a_request_waiting_for_blocks(tenants: str) -> None:
    """Nine blocks: 5 + 5 do not fit together; a small later request of any tenant does not take the freed blocks."""
    bench = Bench(*sorted(set(tenants)), num_blocks=9)
    first = bench.add("a", prompt(16, 1), 81, tenant=tenants[0])
    assert bench.step() == [("a", 16)]
    bench.add("b", prompt(16, 2), 65, tenant=tenants[1], arrival_s=0.0)
    bench.add("late", prompt(16, 3), 1, tenant=tenants[2], arrival_s=1.0)
    assert bench.step() == [("a", 1)]
    bench.scheduler.remove(first)
    assert bench.step() == [("b", 16), ("late", 16)]


def test_blocks_that_a_request_would_hit_are_not_counted_as_space_for_it() -> None:
    """Eight cached blocks, one free, one reserved: a hit on the eight that needs one more must wait."""
    bench = Bench(num_blocks=10, max_num_batched_tokens=256)
    bench.add("warm", prompt(128), 1)
    bench.step()
    first = bench.add("a", prompt(16, 1), 17)
    assert bench.step() == [("a", 16)]
    bench.add("hit", np.append(prompt(128), [1, 2]), 4)
    assert bench.step() == [("a", 1)]
    bench.scheduler.remove(first)
    assert bench.step() == [("hit", 2)]


def test_nobody_waits_for_unstored_blocks() -> None:
    """A request that stores computes the same prompt beside it."""
    bench = Bench()
    bench.add("passing", np.append(prompt(160), 1), store_kv=False)
    assert bench.step() == [("passing", 64)]
    bench.add("storing", np.append(prompt(160), 1))
    assert bench.step() == [("passing", 64)]
    assert bench.step() == [("passing", 33), ("storing", 31)]


def test_a_start_first_evicts_blocks_that_nobody_waits_for() -> None:
    """Two prompts are cached, and a waiting request continues the older one."""
    bench = Bench(num_blocks=24, max_num_seqs=1, max_num_batched_tokens=256)
    for name, seed in (("old", 1), ("young", 2)):
        bench.add(name, prompt(128, seed), 1)
        bench.step()
    bench.add("cold", prompt(160, 3), 1, arrival_s=-100.0)  # has waited so long that it is no longer overtaken
    again = bench.add("again", prompt(128, 1), 1)
    bench.step()
    assert "cold" in bench.started_s and "again" not in bench.started_s
    while "again" not in bench.started_s:
        bench.step()
    assert again.cached_tokens >= 112
