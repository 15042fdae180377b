"""The engine's treatment of requests: single flight, cancellation, refusal, failure, load, churn, outputs, stop."""

import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from router.protocol.events import Event
from router.protocol.request import Decision
from serve_app.cache.prefix_digest import scope_digest
from serve_app.engine.protocol import EngineError, EngineOutput, QueueFull, RemoteKv, RequestTooLong, Save, TokenRules
from serve_app.errors import LimitReason
from tests.harness.churn.audit import Imbalance, tables
from tests.harness.churn.churn import Churn
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.simulated import GatedRunner, MakeSimulated
from tests.serve_app.engine.tiny import SCOPE, Collector, prompt, request, run_all, sample


def test_a_hundred_requests_of_two_thousand_cold_tokens_cost_one_prefill(make_simulated: MakeSimulated) -> None:
    """Single flight: 100 simultaneous users of a cold prompt compute it once. (docs: routing)"""
    runner = GatedRunner()
    engine = make_simulated(runner, max_num_seqs=128, num_blocks=1024, max_num_batched_tokens=2048, start=False)
    collector = Collector()
    for i in range(100):
        engine.submit(request(f"r{i}", np.append(prompt(2000), i), 2), collector)
    engine.start()
    collector.wait(f"r{i}" for i in range(100))
    prefills = [tokens for step in runner.steps for tokens in step if tokens > 1]
    assert prefills == [2001], "one prefill of the prefix; all others computed one token"
    assert sorted(collector.cached.values()) == [0] + [2000] * 99
    assert sample(engine, "warmpath_prompt_tokens_computed_total") == 2001 + 99
    assert sample(engine, "warmpath_prefix_cache_queries_total") == 100 * 2001
    assert sample(engine, "warmpath_prefix_cache_hits_total", tenant="default") == 99 * 2000
    assert sample(engine, "warmpath_generation_tokens_total", engine="simulated") == 200
    for name in ("prefill", "queue"):
        assert sample(engine, f"warmpath_request_{name}_time_seconds_count") == 100


def test_a_cancelled_prefill_frees_its_blocks_within_a_step_and_its_waiters_continue(
    make_simulated: MakeSimulated,
) -> None:
    """The request that computes the shared prefix is cancelled; the next one takes over, and nothing is lost."""
    runner = GatedRunner(gated=True)
    engine = make_simulated(runner)
    collector = Collector()
    engine.submit(request("first", prompt(200), 100), collector)
    assert runner.entered.wait(10)
    assert sample(engine, "warmpath_kv_cache_blocks", state="used") == 13
    load = engine.load()
    assert (load.queued_prefill_tokens, load.committed_sequences) == (200, 0)
    assert 64 <= load.committed_prefill_tokens <= 200, "only the running step's tokens are ahead of everybody"
    engine.submit(request("second", np.append(prompt(200), 3), 2), collector)
    engine.cancel("first")
    engine.cancel("never heard of")
    runner.gate.set()
    collector.wait(["first", "second"])
    assert collector.finish == {"first": "cancelled", "second": "length"}
    assert collector.cached == {"second": 64}, "of the four blocks that the first step computed"
    assert len(runner.steps[0]) == len(runner.steps[1]) == 1
    assert sample(engine, "warmpath_kv_cache_blocks", state="used") == 0
    assert engine.load().committed_prefill_tokens == 0
    engine.cancel("first")
    assert run_all(engine, [request("first", prompt(5), 1)]).finish["first"] == "length"


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 300), st.booleans()), min_size=1, max_size=6),
    steps=st.integers(0, 8),
    blocks=st.sampled_from([24, 64]),
)
def test_a_requests_end_tells_what_was_computed_of_its_prompt(
    lengths: list[tuple[int, bool]], steps: int, blocks: int, make_simulated: MakeSimulated
) -> None:
    """Left at any step, with shared prefixes and preemptions: the parts add up to all that the engine computed."""
    runner, outputs = GatedRunner(), list[EngineOutput]()
    engine = make_simulated(runner, start=False, num_blocks=blocks)
    for number, (length, shared) in enumerate(lengths):
        engine.submit(request(str(number), prompt(length, 0 if shared else number), 4), outputs.extend)
    for _ in range(steps):
        engine._loop.post(lambda: None)
        engine.take_in()
        engine.step()
    for number in range(len(lengths)):
        engine.cancel(str(number))
    engine.take_in()
    told = {output.request_id: output.prefilled for output in outputs if output.finish_reason is not None}
    assert len(told) == len(lengths)
    for number, (length, _) in enumerate(lengths):
        done = told[str(number)]
        assert done is not None and 0 <= done.cached_tokens <= done.tokens <= length
    computed = sum(done.tokens - done.cached_tokens for done in told.values() if done is not None)
    assert computed == sample(engine, "warmpath_prompt_tokens_computed_total")


def test_a_request_past_its_timeout_ends_within_a_step_running_or_waiting(make_simulated: MakeSimulated) -> None:
    """An expired request ends with "timeout" and a sentence, and releases its blocks; others continue."""
    now = [100.0]
    runner = GatedRunner(gated=True)
    engine = make_simulated(runner, max_num_seqs=1, clock=lambda: now[0])
    collector = Collector()
    engine.submit(structs.replace(request("running", prompt(600), 100), timeout_s=5.0), collector)
    assert runner.entered.wait(10)
    engine.submit(structs.replace(request("waiting", prompt(20, 1), 100), timeout_s=3.0), collector)
    engine.submit(structs.replace(request("patient", prompt(20, 2), 2), timeout_s=50.0), collector)
    assert sample(engine, "warmpath_kv_cache_blocks", state="used") == 38
    now[0] = 105.0
    runner.gate.set()
    collector.wait(["running", "waiting", "patient"])
    assert collector.finish == {"running": "timeout", "waiting": "timeout", "patient": "length"}
    assert "took too long" in collector.errors["running"]
    assert sum(tokens > 20 for step in runner.steps for tokens in step) == 1, "no second step of the long prompt"
    assert sample(engine, "warmpath_kv_cache_blocks", state="used") == 0
    assert sample(engine, "warmpath_requests_finished_total", finished_reason="timeout") == 2
    assert engine._live.waiting.used == 0, "waiting and admitted requests are counted out once"


def test_an_idle_loop_wakes_for_a_deadline(make_simulated: MakeSimulated) -> None:
    """A request that only waits for KV from elsewhere, which never arrives, ends on time without any other event."""
    waits = structs.replace(request("waits", prompt(40), 2), remote_kv=RemoteKv(32), timeout_s=0.2)
    assert run_all(make_simulated(), [waits]).finish["waits"] == "timeout"


def test_refusals_name_the_reason_before_anything_is_queued(make_simulated: MakeSimulated) -> None:
    engine = make_simulated(num_blocks=8, max_model_len=200, start=False)
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
        (request("x", [1], rules=TokenRules(logit_bias=((32000, 1.0),))), ValueError, "rules"),
        (request("x", [1], rules=TokenRules(bad_words=((),))), ValueError, "bad_words"),
        (request("x", [1], rules=TokenRules(repetition_penalty=0.0)), ValueError, "penalties"),
        (request("x", [1], rules=TokenRules(presence_penalty=float("nan"))), ValueError, "penalties"),
        (structs.replace(good, resumed_tokens=10), ValueError, "resumed_tokens"),
        (structs.replace(good, root=b"short"), ValueError, "root"),
        (structs.replace(good, root=bytes(32)), ValueError, "root"),
        (structs.replace(good, scope=replace(SCOPE, public_blocks=1)), ValueError, "root"),
        (structs.replace(good, scope=replace(SCOPE, public_blocks=1), root=bytes(32)), ValueError, "public_blocks"),
        (structs.replace(good, block_hashes=b"z" * 16), ValueError, "block_hash"),
        (structs.replace(good, saves=(Save(b"key", 32),), store_kv=False), ValueError, "cannot save"),
    ]
    for item, kind, words in bad:
        with pytest.raises(kind, match=words):
            engine.submit(item, Collector())
    assert engine.load().waiting_sequences == 0
    engine.submit(good, Collector())
    with pytest.raises(ValueError, match="in use"):
        engine.submit(good, Collector())
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        make_simulated(max_num_seqs=64)


def test_a_flooding_tenant_leaves_an_eighth_of_the_queue(make_simulated: MakeSimulated) -> None:
    """Of sixteen places one tenant gets fourteen; a tenant alone gets all. (docs: routing)"""
    both = make_simulated(max_waiting_requests=16, tenant_shares={"flood": 1.0, "other": 1.0}, start=False)
    alone = make_simulated(max_waiting_requests=16, start=False)
    collector = Collector()
    for engine, tenant, places in ((both, "flood", 14), (both, "other", 2), (alone, "flood", 16)):
        for i in range(places):
            engine.submit(request(f"{tenant}{i}", prompt(10), 1, tenant=tenant), collector)
        with pytest.raises(QueueFull) as refused:
            engine.submit(request("more", prompt(10), 1, tenant=tenant), Collector())
        assert refused.value.retry_after_s > 0
        assert refused.value.reason == LimitReason("engine", "max_waiting_requests", places, 16), "its own requests"
    both.start()
    collector.wait(["flood13", "other1"])
    assert run_all(both, [request("more", prompt(10), 1, tenant="flood")]).finish["more"] == "length"


def test_one_bad_request_fails_alone(make_simulated: MakeSimulated) -> None:
    """If a forward raises, each request of the step is retried alone: the bad one gets the error, the loop goes on."""
    engine = make_simulated(GatedRunner(poison=666), start=False)
    ids = {f"good{i}": prompt(10, i) for i in range(3)}
    requests = [request(name, row, 4) for name, row in ids.items()]
    collector = Collector()
    for item in [*requests, request("bad", [1, 666, 2], 4)]:
        engine.submit(item, collector)
    engine.start()
    collector.wait([*ids, "bad"])
    assert collector.finish == {**dict.fromkeys(ids, "length"), "bad": "error"}
    assert "RuntimeError" in collector.errors["bad"]
    assert engine.healthy()
    alone = run_all(make_simulated(), requests)
    assert {name: collector.tokens[name] for name in ids} == alone.tokens
    assert sample(engine, "warmpath_kv_cache_blocks", state="used") == 0


def test_stop_ends_unfinished_requests_with_an_error(make_simulated: MakeSimulated) -> None:
    runner = GatedRunner(gated=True)
    engine = make_simulated(runner)
    collector = Collector()
    engine.submit(request("running", prompt(10), 50), collector)
    assert runner.entered.wait(10)
    engine.submit(request("queued", prompt(10), 50), collector)
    stop = threading.Thread(target=engine.stop)
    stop.start()
    with engine._loop.changed:
        assert engine._loop.changed.wait_for(lambda: engine._loop.stopping, 10)
    runner.gate.set()
    stop.join()
    assert collector.finish == {"running": "error", "queued": "error"}
    assert not engine.healthy()
    assert engine.reset_prefix_cache(), "a stopped engine answers too"
    with pytest.raises(EngineError, match="stopped"):
        engine.submit(request("late", prompt(3), 1), collector)


def test_a_stalled_step_is_unhealthy_until_it_ends(make_simulated: MakeSimulated) -> None:
    now = [0.0]
    runner = GatedRunner(gated=True)
    engine = make_simulated(runner, clock=lambda: now[0], stall_after_s=10.0, start=False)
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


def test_load_counts_a_request_from_its_submission_and_by_router(make_simulated: MakeSimulated) -> None:
    """Queued tokens are the uncached ones; a router's last reservation is the highest it sent."""
    runner = GatedRunner()
    engine = make_simulated(runner, num_blocks=256)
    run_all(engine, [request("warm", prompt(160), 1)])
    runner.gate.clear()
    runner.entered.clear()
    collector = Collector()

    def submit(name: str, ids: np.ndarray, router_id: str, reservation: int) -> None:
        engine.submit(
            structs.replace(request(name, ids, 1), decision=Decision("", router_id, reservation, 0, 0, "cold")),
            collector,
        )

    submit("a", np.append(prompt(160), 1), "r1", 4)
    assert runner.entered.wait(10)
    submit("b", prompt(100, 3), "r1", 7)
    submit("c", prompt(50, 4), "r2", 1)
    load = engine.load()
    assert load.admitted == {"r1": 7, "r2": 1}
    assert (load.queued_prefill_tokens, load.max_waiting_sequences) == (151, 256)
    assert load.running_sequences + load.waiting_sequences == 3
    runner.gate.set()
    collector.wait("abc")
    assert engine.load().queued_prefill_tokens == 0
    assert engine.load().admitted == {"r1": 7, "r2": 1}


def test_one_sink_gets_one_call_a_step_and_a_failing_one_harms_nobody_else(make_simulated: MakeSimulated) -> None:
    """Eight sequences decoding together for one submitter make batches of eight."""
    engine = make_simulated(max_num_seqs=9, start=False)
    collector = Collector()

    def broken(_: object) -> None:
        raise RuntimeError("client gone")

    engine.submit(request("broken", prompt(4), 3), broken)
    for i in range(8):
        engine.submit(request(f"r{i}", prompt(4, i), 5), collector)
    engine.start()
    collector.wait(f"r{i}" for i in range(8))
    assert collector.batches == [8] * 5
    assert engine.healthy()


LEFT_BYTES_AN_OPERATION = 500
"""A kept request would take well over a thousand; cached data varies a little between checks."""


@pytest.fixture
def churn(tiny_model_path: Path, tmp_path: Path) -> Iterator[Churn]:
    made = Churn(tiny_model_path, tmp_path)
    yield made
    made.close()


def test_churn_leaves_nothing_behind(churn: Churn) -> None:
    """At every check blocks are conserved, events match held blocks, and answers are equal; memory does not grow."""
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(10):  # bounded caches fill for the first seven
            churn.run(20)
            churn.check()
            scope_digest.cache_clear()  # of bounded size
            files = tracemalloc.take_snapshot().statistics("filename")
            ours = (file.size for file in files if {"serve_app", "router"} & {*Path(file.traceback[0].filename).parts})
            sizes.append(sum(ours))
    finally:
        tracemalloc.stop()
    assert sizes[-1] < max(sizes[:7]) + 3 * 20 * LEFT_BYTES_AN_OPERATION, sizes
    ended = churn.ledger.ended
    assert not ended["error"]
    assert ended["length"] > 50 and ended["cancelled"] > 2
    for outcome in ("saved", "adapters loaded", "refused: UnknownAdapter", "refused: RequestTooLong"):
        assert churn.done[outcome], f"nothing was {outcome}"


def test_the_audit_finds_lost_and_leaked_blocks(churn: Churn) -> None:
    """It fails for a block without an owner, and for one that is held but not announced."""
    assert tables(churn.engine)["BlockPool._references"] == 128
    churn.check()
    cache = churn.engine.cache
    block = cache.pool._free.pop()
    with pytest.raises(Imbalance, match="127 of 128 blocks"):
        churn.check()
    cache.pool._free.append(block)
    churn.check()
    churn.ledger.announced["pool"].pop()
    with pytest.raises(Imbalance, match="announced"):
        churn.check()


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_hit_at_every_block_boundary_changes_no_token(
    kind: str, make_engine: MakeEngine, reference: Reference
) -> None:
    """Each prefix of ten blocks in turn is cached, then the whole prompt is sent. (docs: caching)"""
    ids = prompt(165)
    expected = reference(kind, ids, 12)
    for cached in range(11):
        engine = make_engine(kind)
        if cached:
            run_all(engine, [request("warm", ids[: cached * 16], 1)])
        got = run_all(engine, [request("hit", ids, 12)])
        assert got.cached["hit"] == cached * 16
        assert got.tokens["hit"] == expected
        engine.stop()


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize(("budget", "caching"), [(17, True), (64, True), (256, True), (256, False)])
def test_mixed_batches_and_chunks_equal_solo_generation(
    kind: str, budget: int, caching: bool, make_engine: MakeEngine, reference: Reference
) -> None:
    """Prompts of every awkward length run at once, in chunks; the second time with hits. (docs: caching)"""
    prompts = {f"p{n}": prompt(n, seed=n) for n in (1, 2, 15, 16, 17, 31, 48, 100, 300)}
    events: list[Event] = []
    engine = make_engine(kind, events=events, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    for turn in ("cold", "warm"):
        got = run_all(engine, [request(name, ids, 10) for name, ids in prompts.items()])
        for name, ids in prompts.items():
            assert got.tokens[name] == reference(kind, ids, 10), (turn, name)
            assert got.cached[name] == (0 if turn == "cold" or not caching else (len(ids) - 1) // 16 * 16)
    assert bool(events) == caching


def test_long_contexts_shared_and_not_decode_as_if_alone(make_engine: MakeEngine, reference: Reference) -> None:
    """Runs long enough to be read in place, shared by several sequences, are beside short ones and forks."""
    base = prompt(560, seed=5)
    prompts = {
        "a": np.concatenate([base, prompt(9, 1)]),
        "b": np.concatenate([base, prompt(40, 2)]),
        "c": np.concatenate([base, prompt(1, 3)]),
        "d": np.concatenate([base[:400], prompt(30, 4)]),
        "e": prompt(620, seed=6),
        "f": prompt(20, seed=7),
    }
    engine = make_engine("qwen3")
    run_all(engine, [request("warm", base, 1)])
    got = run_all(engine, [request(name, ids, 40) for name, ids in prompts.items()])
    for name, ids in prompts.items():
        assert got.tokens[name] == reference("qwen3", ids, 40), name


def test_stop_token_ends_and_is_not_delivered(make_engine: MakeEngine, reference: Reference) -> None:
    expected = reference("qwen3", prompt(20), 10)
    stop = expected[4]
    got = run_all(make_engine(), [request("s", prompt(20), 10, stop_token_ids=(stop,))])
    assert got.tokens["s"] == expected[: expected.index(stop)]
    assert got.finish["s"] == "stop"
