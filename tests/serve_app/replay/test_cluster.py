"""Laws of a simulated cluster: requests and blocks are conserved through every change of replicas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.settings import POLICY_NAMES
from serve_app.replay.cluster import PoolView, ReplayCluster, Replayed
from serve_app.replay.copies import hand_over, warm
from serve_app.replay.pool import Holders, SegmentPool
from serve_app.replay.prompts import ModelTraffic
from serve_app.replay.reuse import ReusedSegments
from serve_app.replay.router import ReplayRouter
from serve_app.replay.setup import Rates, Setup

SIZE = 16
RATES = Rates(5000.0, decode_step_s=0.01, decode_each_s=0.0005, pull_tokens_per_s=60_000.0)


def traffic(seed: int, count: int = 150, span_s: float = 300.0) -> ModelTraffic:
    """Return requests over a tree of segments, some too long for a pool."""
    rng = np.random.default_rng(seed)
    segments = 40
    sizes = rng.integers(1, 60, segments).tolist()
    parents = [-1, *(int(rng.integers(-1, place)) for place in range(1, segments))]
    paths: list[int] = []
    starts = [0]
    prompts = []
    for segment in rng.integers(0, segments, count).tolist():
        path = [segment]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        paths += path
        starts.append(len(paths))
        prompts.append(sum(sizes[one] for one in path) * SIZE + int(rng.integers(0, SIZE)))
    none = np.full(count, -1, np.int32)
    return ModelTraffic(
        SIZE, np.sort(rng.random(count) * span_s), np.array(prompts, np.int32),
        rng.integers(1, 200, count).astype(np.int32), rng.integers(0, 3, count), np.array(paths, np.int32),
        np.array(starts, np.int64), sizes, none, np.zeros(count, np.int32),
    )  # fmt: skip


class Script:
    """A rule that wants what it was told, in turn, and at least one replica once requests wait for one."""

    period_s = 7.0

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def target(self, pool: PoolView, now_s: float) -> int:
        """Return the next number."""
        wanted = self.sizes.pop(0) if self.sizes else 0
        assert len(pool.figures(now_s)) <= pool.wanted
        return max(wanted, 1) if pool.waiting_without_replica() else wanted


def check_conserved(cluster: ReplayCluster, prompts: ModelTraffic, result: Replayed) -> None:
    """All requests are accounted for, and so are all blocks of the replicas that are left."""
    answered = int((~np.isnan(result.ttft_s)).sum())
    assert answered + result.too_long + cluster.waiting_without_replica() == len(prompts)
    whole: dict[int, int] = {}
    for life in cluster._lives.values():
        pool = life.replica.pool
        assert pool.free + sum(pool.held.values()) == pool.capacity and not pool.refs
        for segment, blocks in pool.held.items():
            if segment >= 0 and blocks == prompts.sizes[segment]:
                whole[segment] = whole.get(segment, 0) | pool.bit
    assert cluster._holders.whole == whole
    assert not cluster._router._pending
    limits = np.maximum(prompts.prompt_tokens - 1, 0)
    assert (result.cached_tokens <= limits).all() and (result.predicted_tokens <= limits).all()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_answers_all(policy: str) -> None:
    """Each policy answers everything, and the same seed gives the same run."""
    prompts = traffic(1)
    setup = Setup("s", RATES, replicas=3, pool_tokens=6000, policy=policy)
    runs = []
    for _ in range(2):
        cluster = ReplayCluster(prompts, setup, seed=5)
        runs.append(cluster.run())
        check_conserved(cluster, prompts, runs[-1])
    first, second = runs
    assert np.array_equal(first.ttft_s, second.ttft_s, equal_nan=True)
    assert np.array_equal(first.served_by, second.served_by)
    assert first.replica_s == pytest.approx(3 * first.end_s)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 1000),
    st.lists(st.integers(0, 5), max_size=30),
    st.integers(0, 4),
    st.sampled_from([0.0, 3.0, 40.0]),
    st.integers(40, 900),
)
def test_changes_of_replicas_lose_nothing(
    seed: int, sizes: list[int], first: int, start_s: float, pool_blocks: int
) -> None:
    """Whatever a rule wants, also none at all, every request that fits is answered, and replicas are paid for."""
    prompts = traffic(seed, 80, 120.0)
    setup = Setup("s", RATES, pool_tokens=pool_blocks * SIZE, start_s=start_s)
    cluster = ReplayCluster(prompts, setup, Script(sizes), first=first)
    result = cluster.run()
    check_conserved(cluster, prompts, result)
    assert not cluster.waiting_without_replica()
    assert result.replica_s >= 0.0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.lists(st.tuples(st.floats(0.0, 150.0), st.integers(0, 4)), max_size=8))
def test_forced_sizes(seed: int, forced: list[tuple[float, int]]) -> None:
    """Recorded sizes are followed at their moments, and requests without a replica wait, at the end for nothing."""
    prompts = traffic(seed, 60, 120.0)
    forced = sorted(forced)
    setup = Setup("s", RATES, replicas=2, pool_tokens=20_000, changes=tuple(forced))
    cluster = ReplayCluster(prompts, setup)
    result = cluster.run()
    check_conserved(cluster, prompts, result)
    assert result.sizes == [(0.0, 2), *forced]
    if not forced or forced[-1][1]:
        assert not cluster.waiting_without_replica()


def test_replica_seconds_are_the_integral_of_replicas() -> None:
    """A replica is paid for from its decision to its last answer's end."""
    prompts = traffic(3, 50, 100.0)
    setup = Setup("s", Rates(1e9), pool_tokens=100_000, replicas=1, changes=((20.0, 3), (70.0, 2)))
    result = ReplayCluster(prompts, setup).run()
    assert result.replica_s == pytest.approx(20.0 + 3 * 50.0 + 2 * (result.end_s - 70.0), abs=0.01)


def pool_with(holders: Holders, bit: int, sizes: list[int], capacity: int, *paths: list[int]) -> SegmentPool:
    """Return a pool that holds these paths, used one after another, so that the last one is the hottest."""
    pool = SegmentPool(capacity, sizes, bit, holders)
    for moment, path in enumerate(paths):
        count, blocks = pool.match(path)
        pool.acquire(path, count)
        assert pool.take(sum(sizes[one] for one in path) - blocks)
        pool.publish(path, count, float(moment))
        pool.release(path)
    return pool


def test_a_join_copies_what_is_hottest() -> None:
    """A part is copied as a part, after its beginning; what does not fit is left."""
    sizes, holders = [2, 3, 4], Holders()
    other = pool_with(holders, 1, sizes, 9, [0, 1], [2])
    other.take(2)  # evicts two blocks of the segment 1
    new = SegmentPool(20, sizes, 2, holders)
    assert warm(new, [other], 100, 9.0) == 7
    assert new.held == {0: 2, 1: 1, 2: 4} and new.free == 13
    assert list(new.idle) == [2, 1, 0]  # as copied, but a beginning after its end
    small = SegmentPool(20, sizes, 4, holders)
    assert warm(small, [other], 5, 9.0) == 5 and small.held == {2: 4, 0: 1}


def test_a_hit_prefix_is_hotter_than_a_newer_one() -> None:
    """One request that matched it outweighs that another prefix came later."""
    sizes, holders = [2, 3], Holders()
    other = pool_with(holders, 1, sizes, 9, [0], [1])
    other.hit(0, 5.0)
    new = SegmentPool(2, sizes, 2, holders)
    assert warm(new, [other], 100, 9.0) == 2 and new.held == {0: 2}


def test_a_hand_over_keeps_paths_together() -> None:
    """A child goes where its parent is; what a receiver has a part of already takes only the rest."""
    sizes, holders = [2, 3, 4], Holders()
    leaving = pool_with(holders, 1, sizes, 9, [2], [0, 1])
    part = SegmentPool(40, sizes, 2, holders)
    part.take(1)
    part.grow(2, 1, None, 0.0)
    roomy = SegmentPool(30, sizes, 4, holders)
    assert hand_over(leaving, [part, roomy], 100, 9.0) == 8
    assert part.held == {0: 2, 1: 3, 2: 4} and part.free == 31 and not roomy.held


def test_a_hand_over_takes_the_room_of_what_is_colder() -> None:
    """A full pool gives up what was used before, and keeps what is as hot."""
    sizes, holders = [2, 2, 2], Holders()
    leaving = pool_with(holders, 1, sizes, 4, [0])
    leaving.hit(0, 5.0)
    full = pool_with(holders, 2, sizes, 4, [1], [2])
    assert hand_over(leaving, [full], 100, 9.0) == 2 and full.held == {2: 2, 0: 2}
    colder = pool_with(holders, 4, sizes, 2, [1])
    full.hit(2, 8.0)
    assert hand_over(colder, [full], 100, 9.0) == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5))
@example(370, 2)  # a prompt of which nothing can be reused
def test_matches_are_what_pools_hold(seed: int, replicas: int) -> None:
    """A router's match of a path is each pool's own, at most the reusable part."""
    prompts = traffic(seed, 30, 30.0)
    setup = Setup("s", RATES, replicas=replicas, pool_tokens=4000)
    cluster = ReplayCluster(prompts, setup)
    cluster.run()
    router: ReplayRouter = cluster._router
    for number in range(len(prompts)):
        job = prompts.job(number, grows=False)
        expected = {
            life.replica.name: tokens
            for life in cluster._lives.values()
            if (tokens := min(life.replica.pool.match(job.path)[1], job.limit_blocks) * SIZE)
        }
        assert router.matches(job.path, job.limit_blocks) == expected


def test_what_is_reused_again_and_again_is_the_working_set() -> None:
    """Three uses within five minutes count, with their blocks; older ones do not."""
    seen = ReusedSegments([5, 7])
    for at_s in (0.0, 1.0, 70.0):
        seen.add([0, 1], 5, at_s)
    seen.add([0, 1], 12, 71.0)
    assert seen.blocks(72.0) == 5
    assert seen.blocks(400.0) == 0
