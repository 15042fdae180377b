"""How the engine treats requests: single flight, cancellation, refusal, failure, load, stop."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from router.protocol.block_hash import split_chain
from router.protocol.events import BlocksRemoved, BlocksStored, CacheCleared, Event, RouterShare
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import EngineError, EngineRequest, QueueFull, RemoteKv, RequestTooLong, SamplingParams
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import Segment, SegmentResult
from tests.serve_app.conftest import MakeEngine
from tests.serve_app.engine.tiny import Collector, prompt, request, run_all


def sample(engine: TorchEngine, name: str, /, **labels: str) -> float:
    """The sum of a metric's samples that carry ``labels``."""
    return sum(v for n, have, v in engine.stats().samples if n == name and labels.items() <= dict(have).items())


class GatedRunner(SimulatedRunner):
    """A simulated runner whose steps wait for a gate, and that fails on a token it finds poisonous."""

    def __init__(self, poison: int | None = None, gated: bool = False) -> None:
        super().__init__(CostModel(prefill_tokens_per_s=1e9, decode_base_s=0.0, decode_per_sequence_s=0.0))
        self.poison = poison
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.steps: list[list[int]] = []
        if not gated:
            self.gate.set()

    def execute(self, segments: Sequence[Segment]) -> list[SegmentResult]:
        self.entered.set()
        assert self.gate.wait(30)
        self.steps.append([len(segment.token_ids) for segment in segments])
        if self.poison is not None and any(self.poison in segment.token_ids for segment in segments):
            raise RuntimeError("poison")
        return super().execute(segments)


def simulated(runner: SimulatedRunner, events: list[Event] | None = None, **overrides: object) -> TorchEngine:
    values: dict[str, object] = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, **overrides}
    settings = EngineSettings(**values)  # type: ignore[arg-type]
    return TorchEngine(runner, settings, events.extend if events is not None else lambda _: None)


def test_a_hundred_cold_requests_of_one_prompt_cost_one_prefill(make_engine: MakeEngine) -> None:
    """Single flight: 100 simultaneous users of a cold prompt, 800 tokens each, compute it once. (docs/scheduling.md)"""
    engine = make_engine(max_num_seqs=128, num_blocks=1024, max_num_batched_tokens=300, start=False)
    collector = Collector()
    base = prompt(800)
    for i in range(100):
        engine.submit(request(f"r{i}", np.append(base, i), 2), collector)
    engine.start()
    collector.wait(f"r{i}" for i in range(100))
    computed = sample(engine, "warmpath_prompt_tokens_computed_total")
    assert computed == 801 + 99, "the prefix once, and one token of each other request"
    assert sample(engine, "warmpath_prefix_cache_queries_total") == 100 * 801
    assert sample(engine, "warmpath_prefix_cache_hits_total") == 99 * 800


def test_a_hundred_requests_of_two_thousand_cold_tokens_cost_one_prefill() -> None:
    """The same at the length that the requirement names, counted on the scheduler alone (simulated forward)."""
    runner = GatedRunner()
    engine = simulated(runner, max_num_seqs=128, num_blocks=1024, max_num_batched_tokens=2048)
    collector = Collector()
    base = prompt(2000)
    for i in range(100):
        engine.submit(request(f"r{i}", np.append(base, i), 2), collector)
    engine.start()
    collector.wait(f"r{i}" for i in range(100))
    engine.stop()
    prefills = [tokens for step in runner.steps for tokens in step if tokens > 1]
    assert prefills == [2001], "one prefill of the prefix; everybody else computed one token"
    assert sorted(collector.cached.values()) == [0] + [2000] * 99


def test_who_waits_for_a_cancelled_prefill_goes_on() -> None:
    """The one that computes the shared prefix is cancelled mid-way: the next in line takes over, nothing is lost."""
    runner = GatedRunner(gated=True)
    engine = simulated(runner)
    collector = Collector()
    engine.submit(request("first", prompt(200), 2), collector)
    engine.submit(request("second", np.append(prompt(200), 3), 2), collector)
    engine.start()
    assert runner.entered.wait(10)
    engine.cancel("first")
    runner.gate.set()
    collector.wait(["first", "second"])
    engine.stop()
    assert collector.finish == {"first": "cancelled", "second": "length"}
    # The first step computed four blocks for "first"; "second" reuses them.
    assert collector.cached["second"] == 64


def test_a_cancelled_request_frees_its_blocks_within_a_step() -> None:
    """Cancelled while a step runs: when the next one starts, the blocks are free and the request is over."""
    runner = GatedRunner(gated=True)
    engine = simulated(runner)
    collector = Collector()
    engine.start()
    engine.submit(request("gone", prompt(600), 100), collector)
    assert runner.entered.wait(10)
    assert sample(engine, "warmpath_kv_cache_blocks", state="used") == 38
    engine.cancel("gone")
    runner.gate.set()
    collector.wait(["gone"])
    assert len(runner.steps) == 1
    assert sample(engine, "warmpath_kv_cache_blocks", state="used") == 0
    assert collector.finish["gone"] == "cancelled"
    engine.cancel("gone")
    engine.cancel("never heard of")
    assert run_all(engine, [request("gone", prompt(5), 1)]).finish["gone"] == "length"
    engine.stop()


def test_what_is_too_old_ends_within_a_step_running_or_waiting() -> None:
    """A request whose time is over ends with "timeout" and a sentence, and gives its blocks back; others go on."""
    now = [100.0]
    runner = GatedRunner(gated=True)
    settings = EngineSettings(num_blocks=64, max_num_seqs=1, max_num_batched_tokens=64)
    engine = TorchEngine(runner, settings, lambda _: None, clock=lambda: now[0])
    collector = Collector()
    engine.start()
    engine.submit(replace(request("running", prompt(600), 100), timeout_s=5.0), collector)
    assert runner.entered.wait(10)
    engine.submit(replace(request("waiting", prompt(20, 1), 100), timeout_s=3.0), collector)
    engine.submit(replace(request("patient", prompt(20, 2), 2), timeout_s=50.0), collector)
    assert sample(engine, "warmpath_kv_cache_blocks", state="used") == 38
    now[0] = 105.0
    runner.gate.set()
    collector.wait(["running", "waiting", "patient"])
    assert collector.finish == {"running": "timeout", "waiting": "timeout", "patient": "length"}
    assert "took too long" in collector.errors["running"]
    assert sum(tokens > 20 for step in runner.steps for tokens in step) == 1, "no second step of the long prompt"
    assert sample(engine, "warmpath_kv_cache_blocks", state="used") == 0
    assert sample(engine, "warmpath_requests_finished_total", finished_reason="timeout") == 2
    engine.stop()


def test_an_idle_loop_wakes_for_a_deadline() -> None:
    """A request that only waits for KV from elsewhere, which never comes, ends on time without any other news."""
    engine = simulated_started()
    waits = replace(request("waits", prompt(40), 2), remote_kv=RemoteKv(32), timeout_s=0.2)
    assert run_all(engine, [waits]).finish["waits"] == "timeout"
    engine.stop()


def test_refusals_name_the_reason_before_anything_is_queued() -> None:
    engine = simulated(GatedRunner(), num_blocks=8, max_model_len=200)
    good = request("x", prompt(10), 1)
    bad = [
        (request("x", prompt(150), 51), RequestTooLong, "limit of 200"),
        (request("x", prompt(100), 40), RequestTooLong, "pool of 128"),
        (request("x", [], 1), ValueError, "at least one id"),
        (request("x", [-1], 1), ValueError, "0 to"),
        (request("x", [32000], 1), ValueError, "0 to 31999"),
        (request("x", [1], -1), ValueError, "max_tokens"),
        (request("x", [1], 1, temperature=float("nan")), ValueError, "temperature"),
        (request("x", [1], 1, top_p=0.0), ValueError, "top_p"),
        (EngineRequest("x", good.token_ids, good.scope, b"short", good.sampling), ValueError, "root"),
        (EngineRequest("x", good.token_ids, good.scope, good.root, good.sampling, b"z" * 16), ValueError, "block_hash"),
    ]
    for item, kind, words in bad:
        with pytest.raises(kind, match=words):
            engine.submit(item, Collector())
    assert engine.load().waiting_sequences == 0
    engine.submit(good, Collector())
    with pytest.raises(ValueError, match="in use"):
        engine.submit(good, Collector())
    engine.stop()


def test_a_full_queue_says_when_to_come_back() -> None:
    engine = simulated(GatedRunner(), max_waiting_requests=2)
    collector = Collector()
    for i in range(2):
        engine.submit(request(f"r{i}", prompt(10), 1), collector)
    with pytest.raises(QueueFull) as refused:
        engine.submit(request("r2", prompt(10), 1), collector)
    assert refused.value.retry_after_s > 0
    engine.start()
    collector.wait(["r0", "r1"])
    assert run_all(engine, [request("r2", prompt(10), 1)]).finish["r2"] == "length"
    engine.stop()


def test_a_flooding_tenant_leaves_an_eighth_of_the_queue() -> None:
    """Of sixteen places one tenant gets fourteen; others still find two, and a tenant that is alone gets all.

    docs/scheduling.md
    """
    engine = simulated(GatedRunner(), max_waiting_requests=16, tenant_shares={"flood": 1.0, "other": 1.0})
    for i in range(14):
        engine.submit(request(f"f{i}", prompt(10), 1, tenant="flood"), Collector())
    with pytest.raises(QueueFull):
        engine.submit(request("f14", prompt(10), 1, tenant="flood"), Collector())
    for i in range(2):
        engine.submit(request(f"o{i}", prompt(10), 1, tenant="other"), Collector())
    with pytest.raises(QueueFull):
        engine.submit(request("o2", prompt(10), 1, tenant="other"), Collector())
    engine.stop()
    alone = simulated(GatedRunner(), max_waiting_requests=16)
    for i in range(16):
        alone.submit(request(f"r{i}", prompt(10), 1), Collector())
    alone.stop()


def test_one_bad_request_fails_alone() -> None:
    """A forward that raises: each of the step is tried alone, the bad one gets the error, the loop lives on."""
    engine = simulated(GatedRunner(poison=666))
    ids = {f"good{i}": prompt(10, i) for i in range(3)}
    requests = [request(name, row, 4) for name, row in ids.items()] + [request("bad", [1, 666, 2], 4)]
    collector = Collector()
    for item in requests:
        engine.submit(item, collector)
    engine.start()
    collector.wait([*ids, "bad"])
    assert collector.finish == {**dict.fromkeys(ids, "length"), "bad": "error"}
    assert "RuntimeError" in collector.errors["bad"]
    assert engine.healthy()
    other = simulated_started()
    alone = run_all(other, [request(name, row, 4) for name, row in ids.items()])
    other.stop()
    assert {name: collector.tokens[name] for name in ids} == alone.tokens
    assert sample(engine, "warmpath_kv_cache_blocks", state="used") == 0
    engine.stop()


def simulated_started() -> TorchEngine:
    engine = simulated(GatedRunner())
    engine.start()
    return engine


def test_stop_ends_unfinished_requests_with_an_error() -> None:
    runner = GatedRunner(gated=True)
    engine = simulated(runner)
    engine.start()
    collector = Collector()
    engine.submit(request("running", prompt(10), 50), collector)
    assert runner.entered.wait(10)
    engine.submit(request("queued", prompt(10), 50), collector)
    threading.Timer(0.05, runner.gate.set).start()
    engine.stop()
    assert collector.finish == {"running": "error", "queued": "error"}
    assert not engine.healthy()
    with pytest.raises(EngineError, match="stopped"):
        engine.submit(request("late", prompt(3), 1), collector)


def test_a_stalled_step_is_unhealthy_until_it_ends() -> None:
    now = [0.0]
    runner = GatedRunner(gated=True)
    settings = EngineSettings(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)
    engine = TorchEngine(runner, settings, lambda _: None, clock=lambda: now[0], stall_after_s=10.0)
    assert not engine.healthy()
    engine.start()
    assert engine.healthy()
    collector = Collector()
    engine.submit(request("r", prompt(3), 1), collector)
    assert runner.entered.wait(10)
    now[0] = 9.0
    assert engine.healthy()
    now[0] = 11.0
    assert not engine.healthy()
    runner.gate.set()
    collector.wait(["r"])
    engine.stop()


def test_load_counts_a_request_from_its_submission_and_by_router() -> None:
    """Queued tokens are the uncached ones; a router's last reservation is the highest it sent."""
    runner = GatedRunner()
    engine = simulated(runner, num_blocks=256)
    engine.start()
    run_all(engine, [request("warm", prompt(160), 1)])
    runner.gate.clear()
    runner.entered.clear()
    collector = Collector()

    def routed(name: str, ids: object, router_id: str, reservation: int) -> EngineRequest:
        plain = request(name, ids, 1)  # type: ignore[arg-type]
        return EngineRequest(
            name, plain.token_ids, plain.scope, plain.root, plain.sampling, router_id=router_id, reservation=reservation
        )

    engine.submit(routed("a", np.append(prompt(160), 1), "r1", 4), collector)
    assert runner.entered.wait(10)
    engine.submit(routed("b", prompt(100, 3), "r1", 7), collector)
    engine.submit(routed("c", prompt(50, 4), "r2", 1), collector)
    load = engine.load()
    assert set(load.shares) == {RouterShare("r1", 7, 101), RouterShare("r2", 1, 50)}
    assert (load.queued_prefill_tokens, load.max_waiting_sequences) == (151, 256)
    assert load.running_sequences + load.waiting_sequences == 3
    runner.gate.set()
    collector.wait("abc")
    assert engine.load().queued_prefill_tokens == 0
    assert set(engine.load().shares) == {RouterShare("r1", 7, 0), RouterShare("r2", 1, 0)}
    engine.stop()


def test_events_replay_to_the_cache_after_a_random_workload() -> None:
    """Announced blocks equal the blocks held, through evictions and a reset, and no block is lost."""
    events: list[Event] = []
    engine = simulated(GatedRunner(), events, num_blocks=40)
    engine.start()
    rng = np.random.default_rng(5)
    for turn in range(4):
        batch = [
            request(f"{turn}-{i}", np.append(prompt(48, int(rng.integers(4))), rng.integers(0, 99, 40)), 9)
            for i in range(12)
        ]
        run_all(engine, batch)
    announced: set[bytes] = set()
    for event in events:
        if isinstance(event, BlocksStored):
            announced |= set(split_chain(event.hashes))
        elif isinstance(event, BlocksRemoved):
            announced -= set(split_chain(event.hashes))
    assert len(announced) == len(engine._cache.index)
    assert sample(engine, "warmpath_kv_cache_blocks") == 40
    assert sample(engine, "warmpath_kv_cache_blocks", state="used") == 0
    assert any(isinstance(event, BlocksRemoved) for event in events)
    assert engine.reset_prefix_cache()
    assert sample(engine, "warmpath_kv_cache_blocks", state="free") == 40
    run_all(engine, [request("last", prompt(48), 1)])
    engine.stop()
    assert engine.reset_prefix_cache(), "a stopped engine answers too"
    assert sum(isinstance(event, CacheCleared) for event in events) == 2


def test_one_sink_gets_one_call_a_step(make_engine: MakeEngine) -> None:
    """Eight sequences decoding together for one submitter make batches of eight."""
    engine = make_engine(start=False)
    collector = Collector()
    for i in range(8):
        engine.submit(request(f"r{i}", prompt(4, i), 5), collector)
    engine.start()
    collector.wait(f"r{i}" for i in range(8))
    assert collector.batches == [8] * 5


def test_a_failing_sink_harms_nobody_else() -> None:
    engine = simulated_started()

    def broken(_: object) -> None:
        raise RuntimeError("client gone")

    engine.submit(request("broken", prompt(4), 3), broken)
    assert run_all(engine, [request("fine", prompt(5), 3)]).finish["fine"] == "length"
    assert engine.healthy()
    engine.stop()


def test_histograms_are_cumulative_and_count_every_request() -> None:
    engine = simulated_started()
    run_all(engine, [request(f"r{i}", prompt(5, i), 3, tenant=f"t{i}") for i in range(4)])
    name = "warmpath_request_prefill_time_seconds"
    buckets = [v for n, _, v in engine.stats().samples if n == f"{name}_bucket"]
    assert buckets == sorted(buckets)
    assert buckets[-1] == sample(engine, f"{name}_count") == 4
    assert sample(engine, "warmpath_request_queue_time_seconds_count") == 4
    assert sample(engine, "warmpath_generation_tokens_total", engine="simulated") == 12
    assert sample(engine, "warmpath_prefix_cache_queries_total", tenant="t2") == 5
    engine.stop()


def test_a_step_too_small_for_prefill_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        simulated(GatedRunner(), max_num_seqs=64)


def test_sampling_params_travel_unchanged() -> None:
    """Simulated tokens depend on the seed, so two seeds differ and one repeats."""
    engine = simulated_started()
    make = [request(f"s{i}", prompt(5), 6, seed=seed) for i, seed in enumerate((1, 1, 2))]
    got = run_all(engine, make)
    assert got.tokens["s0"] == got.tokens["s1"] != got.tokens["s2"]
    assert make[0].sampling == SamplingParams(6, temperature=0.0, seed=1)
    engine.stop()
