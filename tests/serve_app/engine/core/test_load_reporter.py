"""What an engine tells: committed tokens as a new request finds them, events of its cache, and feeds that lie."""

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.core import RoutingCore
from router.feed.sequencing import FeedSequencer
from router.protocol.block_hash import hash_blocks
from router.protocol.events import BlocksStored, CacheCleared, CacheDigest, Event, LoadReport
from router.protocol.request import RoutedRequest
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.core.load_reporter import LoadReporter
from serve_app.engine.reports import EngineMeters
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.replica.reporter import tell_caches
from tests.harness.tiers import tier_settings
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.scheduling.bench import RATE, Bench
from tests.serve_app.engine.simulated import GatedRunner, MakeSimulated
from tests.serve_app.engine.tiny import prompt, request, run_all

queued = st.lists(
    st.tuples(st.integers(1, 400), st.floats(0.0, 0.3), st.sampled_from("ab"), st.booleans()), min_size=1, max_size=12
)


class Line(Bench):
    """``paced``: a sequence decodes, and steps have space for more turns than a tenant may then take."""

    def __init__(self, tenants: str, *, paced: bool = False) -> None:
        super().__init__(*tenants, num_blocks=2048, max_num_seqs=64, max_num_batched_tokens=1024 if paced else 128)
        self.tenants = tenants
        self.scheduler.schedule(RATE)  # it ages sequences by the pace
        self.decode_step_s = 0.01 if paced else 0.0
        if paced:
            self.add("decoding", prompt(16, 99), 1000, tenant=tenants[-1], arrival_s=0.0)
            self.schedule()
        self.view = LoadReporter(self.settings, EngineMeters(), self.scheduler)

    def queue(self, name: str, ids: np.ndarray, arrival_s: float, tenant: str) -> SequenceState:
        tenant = tenant if tenant in self.tenants else self.tenants[0]
        return self.add(name, ids, 1, tenant=tenant, arrival_s=arrival_s)

    def tokens_before(self, newcomer: SequenceState) -> int:
        """Return the tokens queued now that are computed, or found cached, before the newcomer's."""
        line = [*self.scheduler.running, *self.scheduler.waiting]
        left = {sequence: sequence.uncached_tokens(16) for sequence in line}
        done: Counter[SequenceState] = Counter()
        for _ in range(200):
            for item in self.schedule(RATE, self.decode_step_s):
                sequence = item.sequence
                if sequence is newcomer:
                    return done.total()
                done[sequence] = done[sequence] + item.tokens if sequence.prefilling else left[sequence]
        raise AssertionError("the newcomer starves")

    def build(self, rows: list[tuple[int, float, str, bool]], steps: int) -> None:
        shared = prompt(400, 1)
        for number, (length, arrival_s, tenant, shares_prefix) in enumerate(rows):
            ids = shared[:length] if shares_prefix else prompt(length, 100 + number)
            self.queue(f"r{number}", ids, arrival_s, tenant)
        for _ in range(steps):
            self.schedule(RATE, self.decode_step_s)
        # Hints are refreshed when a step is chosen; here they are refreshed without counting a step.
        for sequence in self.scheduler.ready():
            sequence.cached_blocks_hint = self.cache.index.count_held(
                sequence.chain, self.cache.reusable_blocks(sequence.prefill_tokens)
            )
        self.view.update()


@settings(max_examples=150)
@given(rows=queued, steps=st.integers(0, 4), age_s=st.floats(0.0, 0.2))
def test_with_one_tenant_committed_tokens_are_exactly_those_before_a_newcomer(
    rows: list[tuple[int, float, str, bool]], steps: int, age_s: float
) -> None:
    """With any waiting or partly computed requests, exactly the reported tokens run before a request of one token."""
    line = Line("a")
    line.build([(length, arrival_s, tenant, False) for length, arrival_s, tenant, _ in rows], steps)
    now_s = 0.3 + age_s
    report = line.view.report(now_s)
    newcomer = line.queue("new", prompt(1, 9), now_s, "a")
    assert line.tokens_before(newcomer) == report.committed_prefill_tokens
    assert report.committed_prefill_tokens <= report.queued_prefill_tokens
    assert report.committed_sequences <= report.waiting_sequences


@settings(max_examples=150)
@given(
    rows=queued,
    steps=st.integers(0, 4),
    tenant=st.sampled_from("abc"),
    tenants=st.sampled_from(["a", "abc"]),
    paced=st.booleans(),
)
@example(  # the rest of a turn that the step's end interrupted goes before the newcomer, not a whole turn
    rows=[(1, 0.0, "b", False), (17, 0.0, "a", True), (17, 0.0, "a", True), (111, 0.0, "a", False)],
    steps=1,
    tenant="b",
    tenants="abc",
    paced=False,
)
@example(  # turns decide which sequence computes a prefix shared by two tenants
    rows=[(1, 0.0, "b", False), (31, 0.125, "b", True), (33, 0.0, "a", True), (281, 0.0, "b", False)],
    steps=0,
    tenant="a",
    tenants="abc",
    paced=False,
)
@example(
    rows=[(17, 0.0, "b", True), (17, 0.0, "a", True), (18, 0.0, "a", False)],
    steps=0,
    tenant="b",
    tenants="abc",
    paced=False,
)
@example(  # the tenant with the most recent use has a shorter turn
    rows=[(2, 0.0, "b", False), (38, 0.0, "a", False), (224, 0.0, "a", False), (224, 0.0, "a", False)],
    steps=2,
    tenant="b",
    tenants="abc",
    paced=False,
)
@example(  # tenant b's prompt will wait for a block of a's; a newcomer of b has its turn, which comes before a's
    rows=[(39, 0, "a", True), (144, 0, "a", False), (161, 0, "b", True), (161, 0.25, "a", True), (330, 0, "a", False)],
    steps=2,
    tenant="b",
    tenants="abc",
    paced=True,
)
def test_committed_tokens_are_before_everybodys_newcomer(
    rows: list[tuple[int, float, str, bool]], steps: int, tenant: str, tenants: str, paced: bool
) -> None:
    """With several tenants and shared prefixes in flight, at least that many tokens run before it. (docs: routing)"""
    line = Line(tenants, paced=paced)
    line.build(rows, steps)
    report = line.view.report(0.4)
    newcomer = line.queue("new", prompt(1, 9), 0.4, tenant)
    assert line.tokens_before(newcomer) >= report.committed_prefill_tokens


class Feed:
    """A feed that may lose its events; its ``sequencer`` is the mirror."""

    def __init__(self) -> None:
        self.sequencer = FeedSequencer()
        self.losing = False
        self.events: list[Event] = []

    def __call__(self, events: Sequence[Event]) -> None:
        if not self.losing:
            self.events.extend(events)
            self.sequencer.publish(events)

    def blocks(self) -> dict[str, int]:
        """Return the last digest's blocks by tier; the disk's thread may have announced more since."""
        last = next(event for event in reversed(self.events) if isinstance(event, CacheDigest))
        return {of.tier: of.blocks for of in last.tiers}


@pytest.fixture
def made(tmp_path: Path, make_simulated: MakeSimulated) -> tuple[Feed, TorchEngine]:
    """A small pool over a small host memory and a disk."""
    feed, size = Feed(), GatedRunner().block_bytes
    below = tier_settings(host=12 * size, disk=1000 * size, directory=tmp_path)
    return feed, make_simulated(sink=feed, num_blocks=24, max_num_seqs=4, max_num_batched_tokens=256, tiers=below)


def traffic(engine: TorchEngine, seed: int, requests: int = 8) -> None:
    rng = Random(seed)
    for number in range(requests):
        run_all(engine, [request(f"{seed}-{number}", prompt(rng.randrange(20, 220), rng.randrange(12)), 2)])


@pytest.mark.parametrize("reset", [False, True])
def test_the_digest_is_that_of_the_events(made: tuple[Feed, TorchEngine], reset: bool) -> None:
    """It holds through evictions, spills, a disk with its own thread, and resets, at any moment."""
    feed, engine = made
    for seed in range(6):
        traffic(engine, seed)
        if reset and seed == 3:
            engine.reset_prefix_cache(tiers=False)
        engine.tell_cache()
        assert feed.sequencer.mirror_drifts == 0
    held = feed.blocks()
    assert held["pool"] > 0 and held["host"] == 12 and held["disk"] > 0
    engine.reset_prefix_cache()
    engine.tell_cache()
    assert feed.sequencer.mirror_drifts == 0 and set(feed.blocks().values()) == {0}


def test_events_lost_before_the_feed_are_announced_again(made: tuple[Feed, TorchEngine]) -> None:
    """The next digest reveals the loss; ``anew`` repairs the mirror and the routers that follow it. (docs: routing)"""
    feed, engine = made
    traffic(engine, 0)
    feed.losing = True
    traffic(engine, 1)
    feed.losing = False
    engine.tell_cache()
    assert feed.sequencer.mirror_drifts == 1
    engine.tell_cache(anew=True)
    engine.tell_cache()
    assert feed.sequencer.mirror_drifts == 1
    assert feed.blocks().keys() == {"pool", "host", "disk"}
    cleared = [at for at, event in enumerate(feed.events) if event == CacheCleared()]
    anew = FeedSequencer()
    assert len(anew.publish(feed.events[cleared[-1] :])) > 0
    assert anew.mirror_drifts == 0, "it begins with a cleared cache"


def test_a_replica_tells_its_caches_from_time_to_time_and_anew_after_drift() -> None:
    """The repeats become ever rarer, so an engine that always contradicts its feed does not flood the routers."""
    feed, done = SimpleNamespace(mirror_drifts=0), threading.Event()
    calls: list[bool] = []

    def tell_cache(*, anew: bool) -> None:
        calls.append(anew)
        feed.mirror_drifts += len(calls) > 2
        if len(calls) == 60:
            done.set()

    async def main() -> None:
        engine: Any = SimpleNamespace(tell_cache=tell_cache)
        task = asyncio.create_task(tell_caches(engine, feed, 0.001))
        assert await asyncio.to_thread(done.wait, 60)
        task.cancel()

    asyncio.run(main())
    assert calls[:3] == [False, False, False]
    assert calls[3]
    assert 2 <= sum(calls) <= 12


def test_a_lying_replica_costs_time_and_no_token(make_engine: MakeEngine, reference: Reference) -> None:
    """One replica claims every requested block, an empty queue and an absurd rate; small pools evict.

    It attracts traffic by that, its engine computes the missing blocks, and the router counts the undelivered tokens.
    """
    stored: dict[str, list[Event]] = {"liar": [], "honest": []}
    engines = {name: make_engine(events=stored[name], num_blocks=24, max_num_seqs=4) for name in stored}
    core = RoutingCore("me", clock=lambda: 0.0, rng=Random(0))
    core.update_replicas(stored)
    prompts = {seed: prompt(150 + seed, seed) for seed in range(5)}
    served: dict[str, int] = dict.fromkeys(stored, 0)
    lost = 0
    for turn in range(3):
        for seed, ids in prompts.items():
            sent = request(f"{turn}-{seed}", ids, 6)
            chain = hash_blocks(sent.root, ids, 16)
            core.apply("liar", [BlocksStored(chain), LoadReport(-9, -9, -9, 8, 64, 1e30)])
            core.apply("honest", stored["honest"])
            stored["honest"].clear()
            route = RoutedRequest(sent.request_id, chain, len(ids), bytes([seed]) * 16)
            decision = core.decide(route)
            assert decision is not None
            got = run_all(engines[decision.replica_id], [sent])
            assert got.tokens[sent.request_id] == reference("qwen3", ids, 6), (turn, seed)
            delivered = got.cached[sent.request_id]
            core.release(decision)
            core.record_delivered(decision, delivered, 0.01, chain)
            served[decision.replica_id] += 1
            lost += max(decision.selected_cached_tokens - delivered, 0)
    assert served["liar"] > served["honest"]
    tokens = core.counters.by_policy["estimated_ttft"].by_reason["cached"]
    assert tokens.unused_tokens == lost > 0
    assert tokens.evicted_tokens == 0
