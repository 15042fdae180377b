"""Optimistic admission: a full pool preempts sequences, and the answers do not show it."""

from collections import Counter
from dataclasses import dataclass
from math import inf, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from router.protocol.block_hash import PrefixScope
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import AdapterSpec, Save
from serve_app.engine.scheduling.running_set import RESERVED_TOKENS, blocks_to_reserve, choose_victim
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import EngineSettings
from tests.serve_app.conftest import MakeEngine
from tests.serve_app.engine.checked_kv import BLOCK, CheckedRunner, undisturbed
from tests.serve_app.engine.scheduling.bench import assert_laws
from tests.serve_app.engine.tiny import Collector, prompt, request, run_all, sample


@dataclass(frozen=True)
class Wish:
    """One request of a workload: its base prompt, the shared part of it, and its arrival."""

    step: int
    base: int
    shared: int
    own: int
    max_tokens: int
    tenant: str
    cancelled_after: int | None
    saved: int
    lora: str = ""
    timeout_s: float = inf
    stores: bool = True
    told: bool = False


wishes = st.builds(
    Wish,
    step=st.integers(0, 30),
    base=st.integers(0, 2),
    shared=st.integers(0, 60),
    own=st.integers(1, 40),
    max_tokens=st.one_of(st.integers(0, 170), st.integers(120, 170)),
    tenant=st.sampled_from(["a", "b"]),
    cancelled_after=st.sampled_from([None, None, None, None, 3, 70, 110]),
    saved=st.sampled_from([0, 0, 0, 16, 32]),
    lora=st.sampled_from(["", "", "x@1", "y@1"]),
    timeout_s=st.sampled_from([inf, inf, inf, inf, 0.0, 0.003, 0.07, 0.11]),
    stores=st.sampled_from([True, True, False]),
    told=st.sampled_from([False, False, False, True]),
)


class Stepped:
    """An engine stepped by hand over KV that checks itself; each step takes as long."""

    def __init__(self, **overrides: object) -> None:
        values: dict[str, object] = {"num_blocks": 20, "max_num_seqs": 6, "max_num_batched_tokens": 48, **overrides}
        self.settings = EngineSettings(**values)  # type: ignore[arg-type]
        self.runner = CheckedRunner(max_loras=1)
        for name in "xy":
            self.runner.adapters.load(AdapterSpec(name, "1", ""))
        self.now_s = 0.0
        self.engine = TorchEngine(self.runner, self.settings, lambda _: None, clock=lambda: self.now_s)
        self.collector = Collector()
        self.ids: dict[str, list[int]] = {}
        self.preemptions: Counter[str] = Counter()

    def step(self) -> None:
        assert self.engine.take_in()
        self.engine.step()
        self.now_s += 0.001
        self.check()

    def check(self) -> None:
        scheduler, cache = self.engine.scheduler, self.engine.cache
        self.preemptions.update(sequence.request.request_id for sequence in scheduler.preempted)
        pool = cache.pool
        assert pool.free_blocks + pool.idle_blocks + pool.used_blocks == self.settings.num_blocks
        assert sum(cache.quota.holdings().values()) == pool.idle_blocks + pool.used_blocks
        held = {block for sequence in scheduler.running for block in sequence.blocks}
        pinned = set(cache.pins.counts())
        assert pool.used_blocks == len(held | pinned)
        assert scheduler.reserved_blocks == sum(sequence.reserved_blocks for sequence in scheduler.running)
        assert 0 <= scheduler.reserved_blocks <= cache.available_blocks
        assert len(scheduler.running) <= self.settings.max_num_seqs
        assert not any(sequence.blocks for sequence in scheduler.waiting)
        for sequence in scheduler.running:
            if not sequence.request.store_kv:
                own = sequence.blocks[sequence.published :]
                assert not any(block in cache.index for block in own), "an unstored block is indexed"
        for sequence in [*scheduler.running, *scheduler.waiting]:
            assert_laws(sequence, cache.block_size)

    def run(self, workload: list[Wish]) -> dict[str, list[int]]:
        """Run a workload to its end; return the tokens that each request would generate alone."""
        expected: dict[str, list[int]] = {}
        coming = sorted(enumerate(workload), key=lambda item: item[1].step)
        cancels: dict[int, list[str]] = {}
        for step in range(20_000):
            while coming and (coming[0][1].step <= step or not len(self.engine.scheduler.running)):
                number, wish = coming.pop(0)
                ids = np.append(prompt(60, wish.base)[: wish.shared], prompt(wish.own, 100 + number))
                scope = PrefixScope("tiny", wish.lora)
                sampling = {"seed": number, "prompt_logprobs": 0 if wish.told else None}
                item = request(f"r{number}", ids, wish.max_tokens, scope=scope, tenant=wish.tenant, **sampling)
                item = structs.replace(item, store_kv=wish.stores, timeout_s=wish.timeout_s)
                if wish.saved and wish.stores:
                    item = structs.replace(item, saves=(Save(b"key %d" % number, wish.saved),))
                self.engine.submit(item, self.collector)
                self.ids[f"r{number}"] = ids.tolist()
                expected[f"r{number}"] = undisturbed(ids.tolist(), wish.max_tokens, number, wish.lora)
                if wish.cancelled_after is not None:
                    cancels.setdefault(step + wish.cancelled_after, []).append(f"r{number}")
            for request_id in cancels.pop(step, ()):
                self.engine.cancel(request_id)
            if not coming and len(self.collector.finish) == len(workload):
                return expected
            self.step()
        raise AssertionError("the workload does not end")


@settings(max_examples=150)
@given(
    workload=st.lists(wishes, min_size=4, max_size=20),
    num_blocks=st.sampled_from([18, 18, 20, 30]),
    max_num_seqs=st.sampled_from([2, 4, 8]),
    caching=st.sampled_from([True, True, True, False]),
    shares=st.sampled_from([{}, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 3.0}]),
)
def test_a_full_pool_changes_no_answer_and_keeps_nobody_from_its_end(
    workload: list[Wish], num_blocks: int, max_num_seqs: int, caching: bool, shares: dict[str, float]
) -> None:
    """Any workload on a tiny pool ends with the tokens of undisturbed runs. (docs: caching, routing)"""
    bench = Stepped(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=caching,
        tenant_shares=shares,
        pin_budget_blocks=1,
    )
    expected = bench.run(workload)
    tokens, finish = bench.collector.tokens, bench.collector.finish
    for number, wish in enumerate(workload):
        name = f"r{number}"
        assert tokens[name] == expected[name][: len(tokens[name])]
        if finish[name] == "cancelled":
            assert wish.cancelled_after is not None
        elif finish[name] == "timeout":
            assert wish.timeout_s < inf
        else:
            assert (finish[name], len(tokens[name])) == ("length", wish.max_tokens)
            told = [-one.logprob for one in bench.collector.prompt_logprobs[name]]
            assert told == (bench.ids[name][1:] if wish.told else []), "each token of the prompt is told of once"
            assert not (wish.told and bench.collector.cached[name])
    engine = bench.engine
    scheduler, cache = engine.scheduler, engine.cache
    assert len(scheduler.running) == len(scheduler.waiting) == scheduler.reserved_blocks == 0
    assert cache.pool.used_blocks == cache.pins.blocks
    assert sample(engine, "warmpath_num_preemptions_total") == bench.preemptions.total()
    assert not any(engine.runner.adapters._running.values()), "every slot was given back"
    stored = [bench.ids[f"r{n}"] + expected[f"r{n}"] for n, wish in enumerate(workload) if wish.stores]
    prefixes: dict[int, list[int]] = {}
    for entry in cache.index:
        above = [] if entry.parent is None else prefixes[entry.parent]
        held = prefixes[entry.block] = above + np.frombuffer(entry.token_bytes, "<i4").tolist()
        assert any(one[: len(held)] == held for one in stored), "the cache has blocks that only others computed"
    fresh = sample(engine, "warmpath_prompt_tokens_computed_total")
    asked = sample(engine, "warmpath_prompt_tokens_total")
    if not any(wish.cancelled_after is not None or wish.timeout_s < inf for wish in workload):
        assert fresh == asked - sample(engine, "warmpath_prefix_cache_hits_total")


def test_preemptions_are_bounded_by_the_doublings_of_an_answer() -> None:
    """Eight long answers share a pool for one and a half: the first continues, and all of them finish."""
    bench = Stepped(num_blocks=60, max_num_seqs=8, max_num_batched_tokens=256)
    workload = [Wish(0, 0, 0, 20, 600, "a", None, 0) for _ in range(8)]
    expected = bench.run(workload)
    assert bench.collector.tokens == expected
    assert bench.preemptions["r0"] == 0, "it came first"
    assert bench.preemptions.total() >= 6, "the pool was too large: the test proves nothing"
    assert max(bench.preemptions.values()) <= 1 + log2(600 / RESERVED_TOKENS)
    assert bench.runner.steps <= 8 * 620, "no slower than one after the other"


@pytest.mark.parametrize(("expected", "tokens"), [(0, RESERVED_TOKENS), (20, RESERVED_TOKENS), (300, 300), (9000, 499)])
def test_a_start_reserves_the_expected_answer(expected: int, tokens: int) -> None:
    """Never more than the longest one."""
    asked = structs.replace(request("r", prompt(96), 500), expected_tokens=expected)
    sequence = SequenceState(asked, Collector(), b"", 0.0)
    assert blocks_to_reserve(sequence, BLOCK) == -(-(96 + tokens) // BLOCK)


def test_recomputing_reuses_blocks_still_cached() -> None:
    """A victim finds its complete blocks again unless they were needed. (docs: routing)"""
    bench = Stepped(num_blocks=16, max_num_seqs=2, max_num_batched_tokens=128)
    ids = [prompt(40, 1), prompt(40, 2)]
    for number, row in enumerate(ids):
        bench.engine.submit(request(f"r{number}", row, 120, seed=number), bench.collector)
    while not bench.preemptions:
        bench.step()
    (victim,) = bench.engine.scheduler.waiting
    assert victim.request.request_id == "r1", "the later one"
    assert victim.generated_tokens >= RESERVED_TOKENS
    assert victim.cached_blocks_hint == (victim.length - 1) // BLOCK
    while len(bench.collector.finish) < 2:
        bench.step()
    assert bench.preemptions == {"r1": 1}
    assert bench.collector.cached == {"r0": 0, "r1": 0}
    again = sample(bench.engine, "warmpath_recomputed_tokens_total")
    assert 0 < again < victim.prefill_tokens
    for number, row in enumerate(ids):
        assert bench.collector.tokens[f"r{number}"] == undisturbed(row.tolist(), 120, number)


@pytest.mark.parametrize(
    ("grower", "running", "over", "victim"),
    [
        # (place in the order of arrival, tenant, beyond its reservation)
        (1, [(2, "a", False), (0, "a", False), (1, "a", True)], (), 2),  # the latest, although within its reservation
        (2, [(2, "a", False), (0, "a", False), (1, "a", True)], (), 2),  # never an earlier one for a later one
        (5, [(0, "greedy", True), (5, "modest", False)], ("greedy",), 0),
        (0, [(0, "greedy", True), (5, "modest", False)], ("greedy",), 0),
        (5, [(0, "greedy", False), (5, "modest", False)], ("greedy",), 5),  # a reservation holds against later ones
    ],
)
def test_the_choice_of_a_victim(
    grower: int, running: list[tuple[int, str, bool]], over: tuple[str, ...], victim: int
) -> None:
    """Later arrivals before earlier ones, the tenant most over its share first; reservations hold."""
    sequences: dict[int, SequenceState] = {}
    for number, tenant, beyond in running:
        item = request(str(number), prompt(4), 4, tenant=tenant)
        made = sequences[number] = SequenceState(item, lambda _: None, b"", 0.0)
        made.number, made.beyond_reservation = number, beyond
    chosen = choose_victim(sequences[grower], sequences.values(), lambda tenant: 9.0 * (tenant in over))
    assert chosen is sequences[victim]


def test_a_real_model_gives_the_same_answers_with_and_without_preemption(make_engine: MakeEngine) -> None:
    """Greedy and sampled answers: a pool for two of six, against one for all. (docs: caching)"""
    base = prompt(24, 3)
    requests = [
        request(f"r{i}", np.append(base, prompt(10 + i, i)), 150, temperature=0.8 * (i % 2), seed=i) for i in range(6)
    ]
    roomy = run_all(make_engine(num_blocks=256), requests)
    tight_engine = make_engine(num_blocks=26, max_num_seqs=6)
    tight = run_all(tight_engine, requests)
    assert sample(tight_engine, "warmpath_num_preemptions_total", tenant="default") > 0
    assert tight.tokens == roomy.tokens
    assert sample(tight_engine, "warmpath_kv_cache_blocks", state="used") == 0


def test_a_cancelled_request_gives_up_its_claim_on_blocks() -> None:
    """One tenant's cancelled claim on blocks and another's claim on an adapter slot do not wait for each other."""
    bench = Stepped(num_blocks=18)
    engine, x, y = bench.engine, PrefixScope("tiny", "x@1"), PrefixScope("tiny", "y@1")
    for item in (
        request("running", prompt(40, 1), 120, scope=x, tenant="b"),
        request("wants a slot", prompt(1, 2), 120, scope=y, tenant="b"),
        request("wants blocks", prompt(200, 3), 60, tenant="a"),
        request("wants a slot too", prompt(41, 4), 120, scope=y, tenant="a"),
    ):
        engine.submit(item, bench.collector)
        bench.step()
    engine.cancel("wants blocks")
    for _ in range(1000):
        bench.step()
        if len(bench.collector.finish) == 4:
            break
    assert Counter(bench.collector.finish.values()) == {"length": 3, "cancelled": 1}
