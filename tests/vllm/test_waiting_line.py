"""A tenant decides which of its requests starts first in vLLM, but moves no turn of another tenant's."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.request import Request

from serve_app.engine.vllm.scheduling.tenant import order_of, tenant_args, tenant_of
from serve_app.engine.vllm.scheduling.waiting_line import FairRequestQueue

STEPS = st.lists(
    st.one_of(st.tuples(st.sampled_from("abc"), st.integers(-2, 2)), st.just("start"), st.just("preempt")),
    min_size=2,
    max_size=40,
)
"""A request of a tenant and an order arrives; the next one starts; the last that started waits again."""


def run(steps: list[Any], *, ordered: bool) -> list[Any]:
    """Return the started requests, in turn. Not ``ordered``: as if all had the usual order."""
    line, started = FairRequestQueue(), []
    for number, step in enumerate([*steps, *(["start"] * len(steps))]):
        if step == "start":
            if line:
                assert line.peek_request() is line.in_order()[0]
                started.append(line.pop_request())
        elif step == "preempt":
            if started and not started[-1].num_preemptions:
                started[-1].num_preemptions = 1
                line.prepend_request(started.pop())
        else:
            tenant, order = step
            extra = tenant_args(tenant, order if ordered else 0)
            params = SamplingParams(max_tokens=1, extra_args=extra)
            request = Request(f"{number}", [1], params, None, arrival_time=float(number))
            line.make_way(request)
            line.add_request(request)
    return started


@given(STEPS)
def test_tenants_start_as_without_an_order(steps: list[Any]) -> None:
    found, plain = run(steps, ordered=True), run(steps, ordered=False)
    assert list(map(tenant_of, found)) == list(map(tenant_of, plain))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2)), max_size=20))
def test_each_tenant_starts_its_lowest_order_first(coming: list[Any]) -> None:
    """Requests of one order start by arrival; without orders it is first come, first served."""
    found = run(coming, ordered=True)
    for tenant in "abc":
        mine = [(order_of(request), int(request.request_id)) for request in found if tenant_of(request) == tenant]
        assert mine == sorted(mine)
    assert [int(request.request_id) for request in run(coming, ordered=False)] == list(range(len(coming)))
