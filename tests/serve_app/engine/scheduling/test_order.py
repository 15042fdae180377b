"""A tenant decides which of its own requests starts first, but moves no turn of another tenant's."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve_app.engine.adapter_slots import LoadedAdapters
from serve_app.engine.core.load_reporter import LoadReporter
from serve_app.engine.metrics import EngineMeters
from serve_app.engine.protocol import AdapterSpec
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


def test_the_next_request_for_an_adapters_slot_starts_under_a_stream_of_earlier_orders() -> None:
    """No tenant overtakes it there; otherwise another tenant would wait as long as the stream lasts."""
    bench = Bench("a", "b", num_blocks=4096, max_num_seqs=4, max_num_batched_tokens=64)
    slots: LoadedAdapters[str] = LoadedAdapters(lambda spec: spec.key, max_loras=1, max_cpu_loras=3)
    specs = [AdapterSpec(name, "1", "") for name in ("first", "second", "third")]
    for spec in specs:
        slots.load(spec)
    bench.scheduler = Scheduler(bench.settings, bench.cache, slots)
    first, second, third = (replace(SCOPE, lora=spec.key) for spec in specs)
    bench.add("hold", prompt(64, 1), 20, tenant="a", scope=first)
    bench.step()
    bench.add("flex", prompt(64, 2), 1, tenant="a", order=2**32, scope=second)
    bench.step()
    bench.add("behind", prompt(64, 3), 1, tenant="b", scope=third)
    for number in range(400):
        bench.add(f"priority {number}", prompt(64, 10 + number), 1, tenant="a", order=-(2**32))
        bench.step()
    assert {"flex", "behind"} <= bench.started_s.keys()


def test_routers_learn_which_requests_a_usual_one_overtakes() -> None:
    """A request of the usual order waits for an earlier order that has just arrived, and for no later one."""
    bench = Bench(num_blocks=512, max_num_seqs=1, max_num_batched_tokens=64)
    bench.add("hold", prompt(64, 1), 9)
    bench.step()
    reporter = LoadReporter(bench.settings, EngineMeters(), bench.scheduler)
    bench.add("flex", prompt(160, 2), 1, arrival_s=-1e6, order=2**32)
    reporter.update()
    assert (reporter.report(0.0).committed_prefill_tokens, reporter.report(0.0).queued_prefill_tokens) == (0, 160)
    bench.add("priority", prompt(96, 3), 1, order=-(2**32))
    reporter.update()
    assert reporter.report(0.0).committed_prefill_tokens == 96
