"""Plans of steps over requests in vLLM's form, without vLLM."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.protocol import Clock
from serve_app.engine.vllm.scheduling.tenant import shares_args, shares_of, tenant_args, tenant_of
from serve_app.engine.vllm.scheduling.turns import Need, Plan, TenantTurns
from serve_app.fairness.queue import YIELDING_ORDER

REQUESTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 900)), max_size=12)


def asked(name: str, tenant: str, tokens: int, priority: int = 0, order: int = 0) -> Any:
    """Return a request with this many prompt tokens left; 0: it decodes."""
    params = SimpleNamespace(extra_args=tenant_args(tenant, order))
    return SimpleNamespace(
        request_id=name,
        sampling_params=params,
        num_tokens=tokens + 100,
        num_prompt_tokens=tokens + 100,
        max_tokens=0,
        num_computed_tokens=100,
        is_prefill_chunk=tokens > 0,
        priority=priority,
        spec_token_ids=[],
    )


class Turns(TenantTurns):
    """Steps of 512 tokens, 8 places, 100 blocks of 10 tokens, tenants a, b and c."""

    def __init__(self, tokens: int = 512, blocks: int = 100, clock: Clock = lambda: 0.0) -> None:
        super().__init__(tokens, 8, blocks, lambda tokens: -(-tokens // 10), clock)
        self.cached = Counter[str]()
        self.shares.set_weights(dict.fromkeys("abc", 1.0))
        for tenant in "abc":
            self.shares.touch(tenant)

    def step(self, running: list[Any], waiting: list[Any], gentle: int = 512, **in_use: int) -> Plan:
        return self.plan(running, waiting, in_use, self, gentle)

    def need_of(self, request: Any) -> Need:
        tokens = request.num_tokens - 100
        return Need(tokens, tokens // 10)

    def protected(self, tenant: str) -> int:
        return self.cached.total() - self.cached[tenant]


def names(plan: Plan) -> list[str]:
    return [request.request_id for request in plan.starts]


@given(running=REQUESTS, waiting=REQUESTS)
def test_a_step_is_not_exceeded_and_no_eligible_request_is_idle(
    running: list[tuple[str, int]], waiting: list[tuple[str, int]]
) -> None:
    """Limits never exceed the remaining tokens, each start has one, and tokens remain only without takers."""
    runs = [asked(f"r{i}", *item) for i, item in enumerate(running[:8])]
    waits = [asked(f"w{i}", tenant, tokens + 1) for i, (tenant, tokens) in enumerate(waiting)]
    plan = Turns().step(runs, waits)
    left = {request.request_id: request.num_tokens - 100 for request in (*runs, *waits)}
    prefills = [request.request_id for request in runs if request.is_prefill_chunk]
    room = 512 - (len(runs) - len(prefills))
    assert sum(plan.limits.values()) <= room
    assert all(tokens <= left[name] for name, tokens in plan.limits.items())
    assert all(plan.limits[name] > 0 for name in names(plan))
    assert plan.limits.keys() == {*prefills, *names(plan)}
    assert sum(plan.limits.values()) >= min(room, sum(left[name] for name in prefills))
    assert len(runs) + len(plan.starts) <= 8
    for tenant in "abc":
        line = [request.request_id for request in waits if tenant_of(request) == tenant]
        started = [name for name in names(plan) if name in line]
        assert started == line[: len(started)], "first come, first served"


def test_tenants_with_work_get_the_same_tokens() -> None:
    """This holds for any number of prompts, running or waiting."""
    turns, got = Turns(), Counter[str]()
    runs = [asked(f"a{i}", "a", 9000) for i in range(4)]
    for number in range(20):
        plan = turns.step(runs, [asked(f"b{number}", "b", 700), asked(f"c{number}", "c", 700)])
        for name, tokens in plan.limits.items():
            got[name[0]] += tokens
    assert max(got.values()) - min(got.values()) <= 2 * 128


def test_a_flood_fills_no_long_step_beside_others() -> None:
    """It does while nobody else had any lately, and not between others' requests."""
    turns, flood = Turns(4096, 9000), [asked(f"a{i}", "a", 9000) for i in range(4)]
    assert sum(turns.step(flood, []).limits.values()) == 4096
    turns.step(flood, [asked("b", "b", 40)])
    for number in range(20):
        beside = turns.step(flood, [asked("b", "b", 40)] * (number % 2)).limits
        assert beside.pop("b", 40) == 40
        assert sum(beside.values()) == 512
    for _ in range(2000):  # the other's use is forgotten
        turns.step([asked("a", "a", 1)], [])
    assert sum(turns.step(flood, []).limits.values()) == 4096


def test_a_flood_is_gentle_beside_others() -> None:
    """Beside an answer, or a prompt that is computed, and just after; not beside work that yields or has no place."""
    now_s = 0.0
    turns, flood = Turns(4096, 9000, lambda: now_s), [asked(f"a{i}", "a", 9000) for i in range(4)]
    answer, own = asked("b", "b", 0), asked("a", "a", 0)
    flex = asked("flex", "b", 0, order=YIELDING_ORDER)
    full = [asked(f"o{i}", "a", 0) for i in range(4)]

    def sent(running: list[Any], *waiting: Any) -> int:
        limits = turns.step(running, [*waiting], gentle=30).limits
        return sum(tokens for name, tokens in limits.items() if name[0] == "a")

    turns.step(flood, [asked("b", "b", 40)])
    for _ in range(5):
        assert sent([*flood, answer]) == 30
        now_s += 0.1
        assert sent([*flood, own]) == 30
        now_s += 0.2
        assert sent([*flood, own]) == 512
        assert sent(flood, asked("c", "c", 40)) == 30
        now_s += 1.0
        assert sent([*flood, flex]) == 512
        assert sent([*flood, *full], asked("late", "b", 900)) == 512


@given(
    steps=st.lists(st.tuples(REQUESTS, REQUESTS, st.sampled_from([0.0, 0.1, 0.5])), min_size=1, max_size=6),
    gentle=st.integers(16, 512),
)
def test_only_what_has_more_than_the_mean_is_gentle(
    steps: list[tuple[list[tuple[str, int]], list[tuple[str, int]], float]], gentle: int
) -> None:
    """The rule, over an account of each tenant's use that is kept here. Others lose nothing by it."""
    now_s, used, answered_s = 0.0, Counter[str](), dict[str, float]()
    turns = Turns(8192, 9000, lambda: now_s)
    for running, waiting, later_s in steps:
        now_s += later_s
        runs = [asked(f"r{i}", *item) for i, item in enumerate(running[:8])]
        waits = [asked(f"w{i}", tenant, tokens + 1) for i, (tenant, tokens) in enumerate(waiting)]
        answers = Counter(tenant_of(request) for request in runs if not request.is_prefill_chunk)
        answered_s |= dict.fromkeys(answers, now_s)
        asks = Counter[str]()
        for request in (*runs, *waits):
            asks[tenant_of(request)] += request.num_tokens - 100
        used = Counter({tenant: 0.99 * n for tenant, n in used.items() if n >= 1})  # type: ignore[misc]
        for tenant, number in answers.items():
            used[tenant] += 8 * number
        newcomer = bool(asks.keys() - used.keys())  # beside one alone, that one has more than the mean
        mean = sum(used.values()) / max(1 + newcomer, len(used))
        plan, sent = turns.step(runs, waits, gentle=gentle), Counter[str]()
        for request in (*runs, *waits):
            sent[tenant_of(request)] += plan.limits.get(request.request_id, 0)
        heavy = {tenant for tenant in asks if used[tenant] > mean}
        for tenant in heavy & sent.keys():
            soon = any(other != tenant and now_s - at_s < 0.2 for other, at_s in answered_s.items())
            assert sent[tenant] <= (gentle if soon else 512)
        if len(runs) + len(waits) <= 7:  # there is room for all
            for tenant in asks.keys() - heavy:
                assert sent[tenant] == asks[tenant]
        used += sent


def test_flex_work_does_not_start_beside_a_flood_that_waits() -> None:
    """The flood's prompts that wait for their turn are others' too."""
    turns = Turns(4096, 9000)
    flood = [asked(f"a{i}", "a", 9000) for i in range(3)]
    turns.step(flood[:1], [])
    flex = asked("flex", "c", 900, order=YIELDING_ORDER)
    plan = turns.step([asked("b", "b", 0), flood[0]], [*flood[1:], flex], gentle=30)
    assert (names(plan), plan.limits) == ([], {"a0": 30})
    assert names(turns.step([asked("b", "b", 0), flood[0]], [flex], gentle=30)) == ["flex"]


def test_places_and_blocks_are_left_to_others() -> None:
    """A tenant over its share leaves an eighth; one within it waits for space, and then nobody overtakes it."""
    many = [asked(f"a{i}", "a", 10) for i in range(8)]
    assert names(Turns().step([], many)) == [f"a{i}" for i in range(7)]
    runs = [asked(f"r{i}", "a", 0) for i in range(7)]
    assert names(Turns().step(runs, [*many, asked("b", "b", 10)])) == ["b"]
    assert names(Turns().step(runs[:1], many, a=85)) == ["a0", "a1", "a2"]
    large = asked("b", "b", 200)
    assert names(Turns().step(runs[:1], [large, asked("c", "c", 10)], a=85)) == [], "20 blocks are not free yet"


def test_others_cached_blocks_are_left_to_them() -> None:
    """A tenant over its share leaves them; one with nothing running may start anything that fits, despite pins."""
    turns = Turns()
    turns.cached["b"] = 30
    large = [asked(f"a{i}", "a", 200) for i in range(4)]
    assert names(turns.step([], large)) == ["a0", "a1"]
    turns.cached["b"] = 60
    assert names(turns.step([], large)) == ["a0"]
    assert names(turns.step([], [asked("whole", "a", 500)], a=45)) == ["whole"]


def test_copies_of_kv_go_first() -> None:
    plan = Turns().step(
        [asked("runs", "", 500, -1)], [asked("copy", "a", 500, -1), asked("b", "b", 300), asked("a", "a", 300)]
    )
    assert names(plan)[0] == "copy"
    assert plan.limits.keys() == {"a", "b"}


def test_tenants_and_weights_cross_to_the_core() -> None:
    told = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=shares_args({"a": 2.0})))
    assert (shares_of(told), tenant_of(told)) == ({"a": 2.0}, "")
    nobody = SimpleNamespace(sampling_params=None)
    assert (shares_of(nobody), tenant_of(nobody)) == (None, "")
    with pytest.raises(ValueError, match="finite number over 0"):
        shares_args({"a": 0.0})


def test_what_yields_gets_what_others_leave() -> None:
    """Beside others it has few tokens of a step, after them a short one, and then all of it."""
    now_s = 0.0
    turns = Turns(4096, clock=lambda: now_s)
    flex = asked("flex", "b", 90_000, order=YIELDING_ORDER)
    assert turns.step([flex, asked("a", "a", 300)], []).limits == {"flex": 64, "a": 300}
    assert turns.step([flex, asked("a", "a", 0)], []).limits == {"flex": 64}
    assert turns.step([flex, asked("a", "a", 9000)], []).limits == {"flex": 0, "a": 4095 + 1}
    now_s = 1.0
    assert turns.step([flex], []).limits == {"flex": 512}
    now_s = 20.0
    assert turns.step([flex], []).limits == {"flex": 4096}
    turns.came(asked("a", "a", 1), ["a"])
    assert turns.step([flex], []).limits == {"flex": 512}


def test_what_yields_gives_up_its_place() -> None:
    """To its own tenant's others, too; the last started goes, no more than needed, and none if that does not help."""
    flex = [asked(f"f{i}", "b", 0, order=YIELDING_ORDER) for i in range(7)]
    for tenant in "ab":
        plan = Turns().step([*flex, asked("a", "a", 0)], [asked("next", tenant, 30)])
        assert names(plan) == ["next"]
        assert [one.request_id for one in plan.preempted] == ["f6", "f5"][: 2 - (tenant == "a")], "b leaves an eighth"
    held = [asked(f"h{i}", "a", 0) for i in range(7)]
    plan = Turns().step(
        [*held, flex[0]], [asked("flex", "c", 10, order=YIELDING_ORDER), asked("large", "b", 200)], a=85
    )
    assert (names(plan), plan.preempted) == ([], [])
    long = asked("long", "b", 60, order=YIELDING_ORDER)
    plan = Turns(blocks=20).step([long, flex[0]], [asked("next", "a", 150)], b=12)
    assert [one.request_id for one in plan.preempted] == ["f0", "long"]
    assert (names(plan), plan.limits) == (["next"], {"next": 150})


@given(running=REQUESTS, waiting=REQUESTS, flex=REQUESTS)
def test_others_start_as_if_nothing_yielded(
    running: list[tuple[str, int]], waiting: list[tuple[str, int]], flex: list[tuple[str, int]]
) -> None:
    """The same starts and tokens; what yields has no more than the rest of the step, the places and the blocks."""
    runs = [asked(f"r{i}", tenant, tokens) for i, (tenant, tokens) in enumerate(running[:4])]
    waits = [asked(f"w{i}", tenant, tokens + 1) for i, (tenant, tokens) in enumerate(waiting)]
    yields = [asked(f"y{i}", tenant, tokens + 1, order=YIELDING_ORDER) for i, (tenant, tokens) in enumerate(flex)]
    alone, beside = (
        Turns(blocks=300).step(
            some, [*late, *waits], **{t: 10 * sum(tenant_of(one) == t for one in some) for t in "abc"}
        )
        for some, late in ((runs, []), ([*runs, *yields[:4]], yields[4:]))
    )
    assert [name for name in names(beside) if name[0] == "w"] == names(alone)
    assert {name: n for name, n in beside.limits.items() if name[0] != "y"} == alone.limits
    assert sum(beside.limits.values()) <= 512 - sum(not one.is_prefill_chunk for one in runs)
    assert len(runs) + len(yields[:4]) + len(beside.starts) - len(beside.preempted) <= 8
    assert not {one.request_id for one in beside.preempted} & {*beside.limits, *names(beside)}
