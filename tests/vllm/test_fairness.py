"""A flooding tenant and a calm one on a vLLM, and its line of waiting requests. One vLLM serves all tests."""

import random
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from vllm import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from router.protocol.block_hash import PrefixScope
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.config.app import AppConfig
from serve_app.engine.vllm.engine import VllmEngine
from serve_app.engine.vllm.scheduling import probe as probe_module
from serve_app.engine.vllm.scheduling.probe import SIZE, SchedulerProbe, prompt
from serve_app.engine.vllm.scheduling.scheduler import AsyncTenantScheduler
from serve_app.engine.vllm.scheduling.tenant import order_of, tenant_args, tenant_of
from serve_app.engine.vllm.scheduling.waiting_line import FairRequestQueue
from serve_app.fairness.queue import YIELDING_ORDER
from serve_app.fairness.shares import ACTIVE_S
from serve_app.replica.engine_factory import make_engine
from tests.harness.eventually import eventually
from tests.router.vllm_events.pool_model import Routers
from tests.serve_app.engine.tiny import Collector, request, run_all
from tests.vllm.engines import BLOCK, BLOCKS, prefix_of

SCOPES = {name: PrefixScope("tiny", salt=name.encode()) for name in ("flood", "calm")}


class Tenants:
    """One engine of 4 places, and requests of its two tenants. Only prompts of equal numbers share a prefix."""

    def __init__(self, engine: Any, vocab_size: int) -> None:
        self.engine: VllmEngine = engine
        self._vocab_size = vocab_size

    def asked(self, tenant: str, number: int, tokens: int, answer: int = 1) -> Any:
        ids = np.random.default_rng(number).integers(0, self._vocab_size, tokens, dtype=np.int32)
        return request(f"{tenant} {number}", ids, answer, scope=SCOPES[tenant], tenant=tenant)

    def run(self, *asked: Any) -> Collector:
        return run_all(self.engine, asked)  # type: ignore[arg-type]

    def hit(self, asked: Any) -> int:
        """Return the blocks that a request gets from the cache, which must be the predicted ones."""
        self.run(self.asked("flood", 77, 2))  # brings all earlier events at the latest
        chain = prefix_of(asked.token_ids, asked.scope).chain
        known = self.engine.cached_blocks(chain, (len(asked.token_ids) - 1) // BLOCK)
        cached = self.run(asked).cached[asked.request_id]
        assert cached == BLOCK * known
        return known

    def flood(self, first: int, count: int = 12) -> None:
        self.run(*(self.asked("flood", first + number, 600) for number in range(count)))

    def preemptions(self) -> dict[str, float]:
        samples = self.engine.stats().samples
        return {dict(labels)["tenant"]: n for name, labels, n in samples if name == "warmpath_num_preemptions_total"}


@pytest.fixture(scope="module")
def tenants(demo_model_path: Path) -> Iterator[Tenants]:
    info = load_checkpoint_info(demo_model_path)
    config = AppConfig(
        engine="vllm",
        tenants=[{"name": name, "key_sha256": [digit * 64]} for name, digit in (("flood", "a"), ("calm", "b"))],
        block_size=BLOCK,
        num_blocks=BLOCKS,
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        max_waiting_requests=64,
        dtype="float32",
        device="cpu",
        enforce_eager=True,
        kv_pull=True,
        num_threads=1,  # tests of several files run at once
    )
    engine = make_engine(config, info, Routers())
    engine.start()
    yield Tenants(engine, info.vocab_size)
    engine.stop()


def test_a_flood_leaves_a_share_of_the_cache(tenants: Tenants) -> None:
    """Blocks within a tenant's share are hit after any flood; changed weights apply at once."""
    asked = tenants.asked("calm", 1, 40 * BLOCK + 1)
    tenants.run(asked)
    tenants.flood(100)
    assert tenants.hit(asked) == 40
    tenants.engine.set_tenant_shares({"flood": 3.0, "calm": 1.0})
    tenants.flood(200)
    assert 20 <= tenants.hit(asked) <= 26, "a quarter of 96, the first blocks"
    tenants.engine.set_tenant_shares({"flood": 1.0, "calm": 1.0})


def test_a_short_prompt_is_not_served_after_a_flood(tenants: Tenants) -> None:
    """It gets a turn in the next step, and a place, although the flood would take all of them."""
    collector = Collector()
    for number in range(20):
        tenants.engine.submit(tenants.asked("flood", 300 + number, 600, 4), collector)
    collector.wait_tokens("flood 300", 1)
    before = len(collector.finish)
    tenants.engine.submit(tenants.asked("calm", 2, 100, 4), collector)
    collector.wait(["calm 2"])
    assert len(collector.finish) - before <= 6
    collector.wait([f"flood {300 + number}" for number in range(20)], 120)
    eventually(lambda: tenants.engine.load().queued_prefill_tokens == 0)


def test_a_tenants_order_is_kept(tenants: Tenants) -> None:
    """The latest requests start before a dozen of a later order, without regard to the other tenant's."""
    collector, flex = Collector(), [f"flood {350 + number}" for number in range(12)]
    for number in range(12):
        tenants.engine.submit(structs.replace(tenants.asked("flood", 350 + number, 600, 4), order=2**32), collector)
    collector.wait_tokens(flex[0], 1)
    before = len(collector.finish)
    urgent = [structs.replace(tenants.asked("flood", 370, 600, 4), order=-1), tenants.asked("flood", 371, 600, 4)]
    for asked in urgent:
        tenants.engine.submit(asked, collector)
    collector.wait([*flex, *(asked.request_id for asked in urgent)], 120)
    assert {asked.request_id for asked in urgent} <= set(list(collector.finish)[: before + 6])


def test_copies_go_before_all_turns(tenants: Tenants) -> None:
    asked, collector = tenants.asked("calm", 3, 10 * BLOCK), Collector()
    tenants.run(asked)
    tenants.hit(asked)
    for number in range(8):
        tenants.engine.submit(tenants.asked("flood", 400 + number, 600), collector)
    part = tenants.engine.transfer.export_prefix(prefix_of(asked.token_ids, asked.scope))
    assert part is not None
    assert len(collector.finish) <= 2
    collector.wait([f"flood {400 + number}" for number in range(8)], 120)


def test_a_tenant_over_its_share_is_preempted(tenants: Tenants) -> None:
    """Answers fill the pool; the answer of the tenant within its share continues, though it came last."""
    collector, flood = Collector(), ["flood 500", "flood 501"]
    for number in (500, 501):
        tenants.engine.submit(tenants.asked("flood", number, 20 * BLOCK, 36 * BLOCK), collector)
    for name in flood:
        collector.wait_tokens(name, 1, 120)
    tenants.engine.submit(tenants.asked("calm", 4, 2 * BLOCK, 34 * BLOCK), collector)
    collector.wait(["calm 4", *flood], 240)
    assert {tenant for tenant, number in tenants.preemptions().items() if number} == {"flood"}
    assert set(collector.finish.values()) == {"length"}


def test_a_tenant_whose_answers_take_long_still_competes() -> None:
    """It is preempted for a tenant that arrives when its own last request is long ago."""
    probe, now_s = SchedulerProbe("turns"), 0.0
    probe.scheduler._turns.shares._clock = lambda: now_s
    large = probe.ask("flood", prompt(0, 20))
    while large.num_tokens <= 20 * SIZE + 1:
        probe.step()
    now_s = ACTIVE_S + 1.0
    small = probe.ask("calm", prompt(1, 5))
    while not large.num_preemptions + small.num_preemptions:
        probe.step()
    assert (large.num_preemptions, small.num_preemptions) == (1, 0)


class VirtualTime:
    """A probe of eight places whose steps take 16 ms and their prompt tokens, 4,500 a second. ``now_s``: the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe_module, "BLOCKS", 520)
        monkeypatch.setattr(probe_module, "STEP", 2048)
        self.now_s, self.probe = 0.0, SchedulerProbe("turns", "shares", "predictions")
        self._schedule, scheduler = self.probe.scheduler.schedule, self.probe.scheduler
        for clocked in (scheduler, scheduler._turns, scheduler._turns.shares):
            monkeypatch.setattr(clocked, "_clock", lambda: self.now_s)
        monkeypatch.setattr(scheduler, "schedule", self._compute)
        self._numbers = random.Random(0)

    def _compute(self, *arguments: Any) -> Any:
        plan = self._schedule(*arguments)
        self.now_s += 0.016 + sum(tokens for tokens in plan.num_scheduled_tokens.values() if tokens > 1) / 4500.0
        return plan

    def ask(self, tenant: str, start: list[int], blocks: int, most: int) -> Any:
        new = [self._numbers.randrange(1, 60) for _ in range(blocks * SIZE - 1)]
        return self.probe.ask(tenant, start + new, most=most)

    def answer_s(self, clients: int, *, answers: int = 40) -> float:
        """Return a tenant's median time to four tokens over a long cached prompt, one question after another.

        ``clients``: of another tenant, which send prompts of 1,600 tokens, one after another.
        """
        cached, flood, times_s = prompt(60, 40)[:-1], list[Any](), list[float]()
        for _ in range(answers):
            asked, from_s = self.ask("calm", cached, 1, 4), self.now_s
            while not asked.is_finished():
                flood = [one for one in flood if not one.is_finished()]
                flood += [self.ask("flood", [], 50, 32) for _ in range(clients - len(flood))]
                self.probe.step()
            times_s.append(self.now_s - from_s)
        return sorted(times_s[answers // 4 :])[answers * 3 // 8]


def test_answers_beside_a_flood_take_at_most_twice_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a time of steps that is the same on any machine."""
    alone, beside = (VirtualTime(monkeypatch).answer_s(clients) for clients in (0, 8))
    assert alone < beside <= 2 * alone


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


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.integers(0, 99), st.integers(1, 8), st.integers(1, 60), st.booleans(),
            st.integers(0, 9),
        ),
        max_size=60,
    )
)  # fmt: skip
def test_everything_ends_whatever_gives_way(coming: list[Any]) -> None:
    """And flex work that starts overtakes nobody who waits for a place."""
    probe, flex = SchedulerProbe("turns", "shares", "predictions"), set()
    for tenant, number, blocks, answer, late, steps in coming:
        asked = probe.ask(tenant, prompt(number, blocks), most=answer, order=YIELDING_ORDER if late else 0)
        flex |= {asked.request_id} if late else set()
        for _ in range(steps):
            before = {one.request_id for one in probe.scheduler.running}
            step = probe.step()
            if any(one.request_id not in flex for one in probe.scheduler.waiting.in_order()):
                assert not flex & step.keys() - before
    for _ in range(20_000):
        if not probe.scheduler.requests:
            break
        probe.step()
    assert not probe.scheduler.requests


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_whole_whatever_gives_way(seed: int, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if steps are planned ``ahead``: each token comes once, in its place. A model's token is its position."""
    monkeypatch.setattr(probe_module, "TenantScheduler", AsyncTenantScheduler)
    probe, rng = SchedulerProbe("turns", "shares", "predictions"), random.Random(seed)
    scheduler, asked, got = probe.scheduler, list[Any](), defaultdict[str, list[int]](list)
    under_way: deque[tuple[Any, ModelRunnerOutput]] = deque()
    for step in range(20_000):
        if step < 300 and not rng.randrange(5):
            order, numbers = rng.choice([0, YIELDING_ORDER, YIELDING_ORDER]), (rng.randrange(999), rng.randrange(1, 6))
            asked.append(probe.ask(rng.choice("ab"), prompt(*numbers), most=rng.randrange(1, 60), order=order))
        plan = scheduler.schedule()
        ran = [scheduler.requests[name] for name in plan.num_scheduled_tokens]
        tokens = [[] if one.is_prefill_chunk else [one.num_computed_tokens] for one in ran]
        places = {one.request_id: at for at, one in enumerate(ran)}
        under_way.append((plan, ModelRunnerOutput([*places], places, tokens)))
        while len(under_way) > (ahead if scheduler.requests else 0):
            for outputs in scheduler.update_from_output(*under_way.popleft()).values():
                for one in outputs.outputs:
                    got[one.request_id] += one.new_token_ids
        if step >= 300 and not scheduler.requests:
            break
    assert sum(one.num_preemptions for one in asked) > 5
    for one in asked:
        first = one.num_prompt_tokens
        assert got[one.request_id] == [*range(first, first + one.max_tokens)]


@pytest.mark.parametrize("tenant", ["flood", "calm"])
def test_who_comes_is_answered_before_flex_work(tenants: Tenants, tenant: str) -> None:
    """Answers of flex work go on beside it, and end."""
    flex = [structs.replace(tenants.asked("flood", 600 + at, 100, 400), order=2**32) for at in range(3)]
    collector, asked = Collector(), tenants.asked(tenant, 610, 300, 4)
    for one in flex:
        tenants.engine.submit(one, collector)
    for one in flex:
        collector.wait_tokens(one.request_id, 1, 120)
    tenants.engine.submit(asked, collector)
    collector.wait([asked.request_id], 120)
    assert {one.request_id for one in flex} - set(collector.finish)
    collector.wait([one.request_id for one in flex], 240)
    assert {len(collector.tokens[one.request_id]) for one in flex} == {400}
