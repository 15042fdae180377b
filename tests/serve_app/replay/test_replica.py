"""Laws of a simulated replica: every job is answered once, nothing is left, and equal steps in a row change nothing."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine.scheduling.fair_queue import LEAST_STEP_TOKENS
from serve_app.replay.pool import Holders, SegmentPool, TierStore
from serve_app.replay.replica import NOTHING, ReplayJob, ReplayReplica
from serve_app.replay.router import ModelledLoads
from serve_app.replay.setup import CacheTier, Rates, Setup

SIZE = 16


class StepByStep(ReplayReplica):
    """The oracle: it decides before every step anew."""

    def _begin_step(self, now_s: float) -> None:
        super()._begin_step(now_s)
        if self._step is not None:
            self._step.times = 1


@dataclass(frozen=True)
class Came:
    """A request: its path and tokens, the segment that its answer begins, and blocks pulled in so many seconds."""

    at_s: float
    path: tuple[int, ...]
    more_tokens: int
    output_tokens: int
    tenant: int = 0
    grown: tuple[int, int] = NOTHING
    pulled: tuple[int, float] = (0, 0.0)


@dataclass
class World:
    """One replica on its own clock. ``first``, ``ends``: moments by job; ``starts``: jobs by their first token."""

    rates: Rates
    sizes: list[int]
    capacity: int
    kind: type[ReplayReplica] = ReplayReplica
    shortest_first: bool = True
    tiers: list[TierStore] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.holders = Holders()
        self.pool = SegmentPool(self.capacity, self.sizes, 1, self.holders, self.tiers)
        self.events: list[tuple[float, int]] = []
        self.first: dict[int, float] = {}
        self.ends: dict[int, float] = {}
        self.cached: dict[int, int] = {}
        self.most_running = 0
        self.replica = self.kind(
            "r", self.rates, self.pool, SIZE, shortest_first=self.shortest_first,
            wake=lambda _, at_s: heapq.heappush(self.events, (at_s, len(self.events))),
            first_token=self._first, ended=self._ended,
        )  # fmt: skip
        setup = Setup("alone", self.rates, shortest_first=self.shortest_first)
        self.loads = ModelledLoads([self.replica], setup)

    def _first(self, replica: ReplayReplica, job: ReplayJob, now_s: float) -> None:
        assert job.number not in self.first
        self.first[job.number] = now_s
        self.cached[job.number] = job.cached_tokens

    def _ended(self, replica: ReplayReplica, job: ReplayJob, now_s: float) -> None:
        assert job.number in self.first and job.number not in self.ends
        self.ends[job.number] = now_s

    def run(self, requests: list[Came]) -> None:
        """Let all arrive and be answered; time never runs backwards, and it never stands still for long."""
        now_s, place, still = 0.0, 0, 0
        while place < len(requests) or self.events:
            arrives_s = requests[place].at_s if place < len(requests) else float("inf")
            if not self.events or arrives_s <= self.events[0][0]:
                moment_s = arrives_s
                self.replica.submit(self.job(place, requests[place]), moment_s)
                place += 1
            else:
                moment_s = heapq.heappop(self.events)[0]
                if moment_s == self.replica.due_s:
                    self.replica.tick(moment_s)
            assert moment_s >= now_s
            still = still + 1 if moment_s == now_s else 0
            assert still < 200, "time stands still"
            now_s = moment_s
            self.check(now_s)

    def job(self, number: int, came: Came) -> ReplayJob:
        """Return a request as a job."""
        tokens = sum(self.sizes[one] for one in came.path) * SIZE + came.more_tokens
        job = ReplayJob(
            number, came.at_s, tokens, came.output_tokens, came.tenant, list(came.path), (tokens - 1) // SIZE,
            came.grown,
        )  # fmt: skip
        if came.pulled[0]:
            job.pulled_blocks, job.pulled_s = came.pulled[0], came.at_s + came.pulled[1]
        return job

    def check(self, now_s: float) -> None:
        """The bounds hold, and a router sees sane numbers."""
        replica, pool = self.replica, self.pool
        assert pool.free >= 0 and pool.idle_blocks >= 0
        loads = self.loads
        loads.changed(replica)
        loads.refresh(now_s)
        loads.written("r")
        seen = loads.replicas["r"]
        assert 0 <= seen.committed_tokens <= seen.queued_tokens
        assert (seen.queued_tokens, seen.committed_tokens) == (loads.queued_tokens[0], loads.committed_tokens[0])
        assert loads.overtakable_tokens[0] == seen.queued_tokens - seen.committed_tokens
        assert (seen.falloff, seen.waiting) == (loads.falloff[0], replica.waiting)
        self.most_running = max(self.most_running, replica.running)
        assert replica.running <= self.rates.max_num_seqs
        assert 0 <= replica.waiting <= replica.unfinished

    def nothing_left(self, count: int) -> None:
        """Every job had one first token and one end, and the pool is only a cache again."""
        replica, pool = self.replica, self.pool
        assert set(self.first) == set(self.ends) == set(range(count))
        assert (replica.queued_tokens, replica.unfinished, replica.running) == (0, 0, 0)
        assert not replica.computing and not replica.decoding and not pool.refs
        assert pool.available == pool.capacity == pool.free + sum(pool.held.values())


@st.composite
def traffics(draw: st.DrawFn, tenants: int = 3) -> tuple[list[int], list[Came]]:
    """Return segments' sizes, and requests over a tree of them."""
    sizes = draw(st.lists(st.integers(1, 200), min_size=1, max_size=8))
    parents = [draw(st.integers(-1, place - 1)) for place in range(len(sizes))]
    came: list[Came] = []
    now_s = 0.0
    for _ in range(draw(st.integers(1, 20))):
        now_s += draw(st.sampled_from([0.0, 0.0, 0.013, 0.11, 0.5, 7.0]))
        segment = draw(st.integers(0, len(sizes) - 1))
        path = [segment]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        output = draw(st.sampled_from([1, 2, 5, 40, 300]))
        children = [one for one, parent in enumerate(parents) if parent == segment]
        grown = NOTHING
        if children and output > SIZE:
            child = draw(st.sampled_from(children))
            grown = child, min(output // SIZE, sizes[child])
        more = draw(st.integers(1, SIZE - 1))
        whole = sum(sizes[one] for one in path)
        pulled = draw(st.integers(1, whole)), draw(st.sampled_from([0.001, 0.07, 0.9]))
        pulled = pulled if draw(st.integers(0, 3)) == 0 else (0, 0.0)
        came.append(Came(now_s, tuple(path), more, output, draw(st.integers(0, tenants - 1)), grown, pulled))
    return sizes, came


RATES = st.sampled_from(
    [
        Rates(5000.0),
        Rates(5000.0, decode_step_s=0.01, decode_each_s=0.0005),
        Rates(20_000.0, decode_step_s=0.02, decode_each_s=0.001, max_itl_s=0.05),
        Rates(5000.0, decode_step_s=0.01, decode_each_s=0.0005, max_num_seqs=3),
        Rates(200_000.0, decode_step_s=1e-4, decode_each_s=1e-6, step_tokens=512),
    ]
)


def largest(sizes: list[int], requests: list[Came]) -> int:
    """Return the blocks that the largest request needs."""
    return max(
        sum(sizes[one] for one in came.path) + -(-(came.more_tokens + came.output_tokens) // SIZE) for came in requests
    )


@settings(max_examples=80, deadline=None)
@given(traffics(), RATES, st.booleans(), st.integers(0, 400), st.sampled_from([0.0, 3_000_000.0]), st.booleans())
def test_every_job_is_answered_once(
    traffic: tuple[list[int], list[Came]],
    rates: Rates,
    shortest_first: bool,
    spare: int,
    later_s: float,
    tiers: bool,
) -> None:
    """Whatever comes, in a pool that is barely large enough, weeks after the beginning, with and without tiers."""
    sizes, requests = traffic
    requests = [Came(one.at_s + later_s, *list(vars(one).values())[1:]) for one in requests]
    stores = [TierStore(CacheTier("host", 0, 50_000.0), 300)] if tiers else []
    world = World(rates, sizes, largest(sizes, requests) + spare, shortest_first=shortest_first, tiers=stores)
    world.run(requests)
    world.nothing_left(len(requests))


@settings(max_examples=80, deadline=None)
@given(traffics(tenants=1), RATES, st.booleans(), st.integers(0, 400))
def test_equal_steps_in_a_row_are_as_step_by_step(
    traffic: tuple[list[int], list[Came]], rates: Rates, shortest_first: bool, spare: int
) -> None:
    """Steps that are one event give the same first tokens, hits and ends as steps that are decided one by one."""
    sizes, requests = traffic
    worlds = [
        World(rates, sizes, largest(sizes, requests) + spare, kind, shortest_first)
        for kind in (ReplayReplica, StepByStep)
    ]
    for world in worlds:
        world.run(requests)
    fast, slow = worlds
    assert fast.first == pytest.approx(slow.first, abs=1e-6)
    assert fast.ends == pytest.approx(slow.ends, abs=1e-6)
    assert fast.cached == slow.cached


@settings(max_examples=60, deadline=None)
@given(traffics(tenants=3), st.booleans())
def test_equal_steps_of_several_tenants_are_as_step_by_step(
    traffic: tuple[list[int], list[Came]], shortest_first: bool
) -> None:
    """Steps in a row are one event only where the next one would be the same."""
    sizes, requests = traffic
    worlds = [World(Rates(5000.0), sizes, 20_000, kind, shortest_first) for kind in (ReplayReplica, StepByStep)]
    for world in worlds:
        world.run(requests)
    fast, slow = worlds
    assert fast.first == pytest.approx(slow.first, abs=1e-6)


def test_a_lone_request_takes_its_tokens_at_the_rate() -> None:
    """Its first token comes after its prompt's tokens / rate, and its answer takes a step for each other token."""
    rates = Rates(5000.0, decode_step_s=0.01, decode_each_s=0.001)
    world = World(rates, [300], 1000)
    world.run([Came(1.0, (0,), 7, 21)])
    assert world.first[0] == pytest.approx(1.0 + 4807 / 5000.0)
    assert world.ends[0] == pytest.approx(world.first[0] + 20 * 0.011)


def test_a_repeated_request_computes_its_last_block_alone() -> None:
    """A prompt that ends with a block is cached but for that block: its last token is never reused."""
    world = World(Rates(1000.0), [10], 30)
    world.run([Came(0.0, (0,), 0, 1), Came(10.0, (0,), 0, 1)])
    assert world.cached == {0: 0, 1: 9 * SIZE}
    assert world.first[1] == pytest.approx(10.0 + SIZE / 1000.0)
    world.nothing_left(2)


def test_steps_beside_decodes_take_longer() -> None:
    """A prompt that is computed while another answer decodes waits for the step in progress, then pays for decodes."""
    rates = Rates(5000.0, decode_step_s=0.01, decode_each_s=0.001)
    world = World(rates, [32, 32], 1000)
    world.run([Came(0.0, (0,), 1, 400), Came(1.0, (1,), 1, 1)])
    first_s = 513 / 5000.0
    steps = -(-(1.0 - first_s) // 0.011)
    begins_s = first_s + steps * 0.011
    # A step has 0.1 s of prefill, at least 512 tokens, with one decode: the last token is in a second step.
    assert world.first[1] == pytest.approx(begins_s + 513 / 5000.0 + 2 * 0.011)


def test_answers_that_end_make_the_steps_shorter() -> None:
    """A long prompt's steps cost less as soon as the answers beside them end."""
    rates = Rates(5000.0, decode_step_s=0.01, decode_each_s=0.05)
    world = World(rates, [1, 1000], 3000)
    world.run([Came(0.0, (0,), 1, 4), Came(0.5, (1,), 1, 1)])
    alone = World(rates, [1, 1000], 3000)
    alone.run([Came(0.5, (1,), 1, 1)])
    assert world.first[1] <= alone.first[0] + 4 * 0.06


def test_first_come_first_served() -> None:
    """Without our order, first tokens come in the order of arrival, whatever the requests' sizes."""
    world = World(Rates(5000.0), [500, 3, 80], 3000, shortest_first=False)
    world.run([Came(0.0, (0,), 1, 1), Came(0.01, (2,), 1, 1), Came(0.02, (1,), 1, 1), Came(0.02, (0,), 2, 1)])
    assert sorted(world.first, key=world.first.__getitem__) == [0, 1, 2, 3]
    quick = World(Rates(5000.0), [500, 3, 80], 3000)
    quick.run([Came(0.0, (0,), 1, 1), Came(0.01, (2,), 1, 1), Came(0.02, (1,), 1, 1)])
    assert sorted(quick.first, key=quick.first.__getitem__) == [2, 1, 0]


def test_a_prefix_in_progress_is_awaited() -> None:
    """Two requests with one prefix compute it once."""
    world = World(Rates(5000.0), [500], 3000)
    world.run([Came(0.0, (0,), 1, 1), Came(0.01, (0,), 5, 1)])
    assert world.cached == {0: 0, 1: 500 * SIZE}


def test_a_new_tenant_gets_its_half_at_once() -> None:
    """A tenant that comes owes the others nothing, nor do they owe it what they had before."""
    world = World(Rates(5000.0), [600, 600, 600], 9000)
    world.run([Came(0.0, (0,), 1, 1, 0), Came(10.0, (1,), 1, 1, 0), Came(10.05, (2,), 1, 1, 1)])
    served_s = 9601 / 5000.0
    assert world.first[1] == pytest.approx(10.0 + 2 * served_s, rel=0.06)
    assert world.first[2] == pytest.approx(10.0 + 2 * served_s, rel=0.06)


def test_more_tenants_than_turns_take_turns() -> None:
    """A step serves four tenants of eight, so that long prompts of all of them end at about the same time."""
    count = 8
    world = World(Rates(5000.0), [40] * count, 9000)
    world.run([Came(0.0, (tenant,), 1, 1, tenant) for tenant in range(count)])
    last_s = count * 641 / 5000.0
    assert min(world.first.values()) > 0.75 * last_s
    assert max(world.first.values()) == pytest.approx(last_s)


def test_a_step_is_full_when_one_tenant_has_little() -> None:
    """What a tenant leaves of its part, the others get."""
    world = World(Rates(5120.0), [1, 100], 9000)
    world.run([Came(0.0, (0,), 1, 1, 0), Came(0.0, (1,), 1, 1, 1)])
    assert world.first[1] == pytest.approx((17 + 1601) / 5120.0)
    assert world.first[0] == pytest.approx(512 / 5120.0)


def test_what_a_tier_has_is_loaded_at_its_rate() -> None:
    """Evicted blocks cost their tokens at the tier's rate; a tier that is slower than computing is not read."""
    for tier_rate, expected_s in ((50_000.0, 160 / 50_000.0 + 1 / 1000.0), (900.0, 161 / 1000.0)):
        store = TierStore(CacheTier("host", 0, tier_rate), 100)
        world = World(Rates(1000.0), [10, 10], 11, tiers=[store])
        world.run([Came(0.0, (0,), 1, 1), Came(10.0, (1,), 1, 1), Came(20.0, (0,), 1, 1)])
        assert world.first[2] == pytest.approx(20.0 + expected_s)
        world.nothing_left(3)


def test_a_prompt_waits_for_what_it_pulls() -> None:
    """Others are computed meanwhile; then its blocks count as cached, and only its own tokens are computed."""
    world = World(Rates(1000.0, pull_tokens_per_s=1e6), [10, 10], 60)
    world.run([Came(0.0, (0,), 1, 1, pulled=(10, 0.1)), Came(0.01, (1,), 1, 1)])
    assert world.first[1] == pytest.approx(0.01 + 0.161)
    assert world.cached == {0: 160, 1: 0}
    assert world.first[0] == pytest.approx(0.01 + 0.161 + 0.001)
    world.nothing_left(2)


def test_a_pull_is_told_at_the_rate_it_had() -> None:
    """Waiting for the holder's step counts, as it does in the product."""
    world = World(Rates(1000.0, pull_tokens_per_s=1e6), [100], 600)
    world.run([Came(0.0, (0,), 1, 1, pulled=(100, 2.0))])
    assert world.replica.pulls.tokens_per_s(2.0) < 1e4 < 1e6 == world.replica.pulls.tokens_per_s(1e6)


def test_routers_see_the_work_as_of_the_last_step() -> None:
    """As engines report it: within a step nothing is told of what it has done."""
    world = World(Rates(1000.0), [], 100)
    tokens = 2 * LEAST_STEP_TOKENS
    world.replica.submit(ReplayJob(0, 0.0, tokens, 1, 0, [], tokens // SIZE), 0.0)
    world.replica.tick(0.0)
    step_s = LEAST_STEP_TOKENS / 1000.0

    def told(now_s: float) -> tuple[float, float]:
        world.check(now_s)
        return world.loads.queued_tokens[0], world.loads.committed_tokens[0]

    seen = [told(part * step_s) for part in (0.0, 0.9, 1.1, 1.9)]
    assert seen == [(tokens, LEAST_STEP_TOKENS)] * 2 + [(LEAST_STEP_TOKENS, LEAST_STEP_TOKENS)] * 2
