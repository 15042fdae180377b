"""Laws of the simulated cluster (time, conservation, bounds), and the contract of the benchmark."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from benchmarks.common.trace import DEFAULT_TRACE
from benchmarks.simulation import run as simulate
from benchmarks.simulation.cluster import Cluster, Outcome, unlimited
from benchmarks.simulation.front_door import RayPrefixTree
from benchmarks.simulation.replica import SimulatedReplica
from benchmarks.simulation.settings import ClusterSettings, Contender, prepare
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, TraceRequest, read_trace

KINDS = [Contender(policy, *kind) for policy in simulate.CONTENDING for kind in ((False, False), (True, True))]
SMALL = ClusterSettings(replicas=4, blocks=250)


def run(trace: list[TraceRequest], contender: Contender, settings: ClusterSettings = SMALL) -> Outcome:
    return Cluster(settings, contender).run(prepare(trace, settings.block_size))


def prompt(arrival_s: float, tokens: int, first_id: int, output_tokens: int = 1) -> TraceRequest:
    blocks = -(-tokens // TRACE_BLOCK_TOKENS)
    return TraceRequest(arrival_s, tokens, output_tokens, tuple(range(first_id, first_id + blocks)))


@pytest.mark.parametrize("contender", KINDS, ids=str)
def test_one_request_alone_takes_tokens_over_rate(contender: Contender) -> None:
    """Without a queue, cached tokens or decoding sequences, TTFT is exactly tokens / rate."""
    outcome = run([prompt(1.0, 5000, 0)], contender)
    assert outcome.ttft_s == {0: 1.0}


def test_a_second_request_pays_for_the_difference() -> None:
    """Full blocks of the first request's prefix are reused; one decoding sequence slows prefill by 1 %."""
    first, second = prompt(0.0, 5120, 0, output_tokens=1000), prompt(2.0, 5120 + 500, 0)
    outcome = run([first, second], Contender("estimated_ttft", True), ClusterSettings(replicas=1))
    assert outcome.ttft_s[1] == pytest.approx(1.01 * 500 / 5000)
    assert outcome.cached_tokens == 5120


def test_orders_differ_as_they_should() -> None:
    """Shortest first lets a short prompt overtake a long prefill; first come, first served does not."""
    trace = [prompt(0.0, 50_000, 0), prompt(0.1, 10_000, 1000), prompt(0.2, 500, 2000)]
    one = ClusterSettings(replicas=1, decode_weight=0.0)
    fair = run(trace, Contender("round_robin", shortest_first=False), one)
    short = run(trace, Contender("round_robin", shortest_first=True), one)
    assert [fair.ttft_s[n] for n in range(3)] == pytest.approx([10.0, 11.9, 11.9])
    assert [short.ttft_s[n] for n in range(3)] == pytest.approx([12.1, 2.1, 0.1])


def test_a_pull_takes_its_time_and_saves_the_rest() -> None:
    """A second replica copies 20 blocks at 60,000 tokens/s and computes the rest."""
    trace = [prompt(0.0, 10_240, 0), prompt(10.0, 10_740, 0)]
    pulled = run(trace, Contender("round_robin", pull=True), ClusterSettings(replicas=2))
    assert pulled.ttft_s[1] == pytest.approx(10_240 / 60_000 + 500 / 5000)
    assert pulled.pulled_tokens == pulled.cached_tokens == 10_240
    alone = run(trace, Contender("round_robin"), ClusterSettings(replicas=2))
    assert alone.ttft_s[1] == pytest.approx(10_740 / 5000)
    assert alone.pulled_tokens == 0


@pytest.mark.parametrize("routers", [1, 4])
def test_a_very_hot_prefix_is_spread_by_copying(routers: int) -> None:
    """At three times one replica's work, the prefix is computed once and copied, and few requests queue."""
    opening = tuple(range(16))
    trace = [TraceRequest(0.0, 8704, 1, (*opening, 999))]
    trace += [TraceRequest(5.0 + n / 30, 8704, 1, (*opening, 1000 + n)) for n in range(600)]
    settings = ClusterSettings(replicas=8, blocks=400, routers=routers, feed_delay_s=0.01)
    cluster = Cluster(settings, Contender("estimated_ttft", shortest_first=True, pull=True))
    outcome = cluster.run(prepare(trace))
    chain = prepare(trace[:1])[0].block_hashes
    holders = [name for name, replica in cluster.replicas.items() if replica.cache.index.held(chain[16 * 15 : 16 * 16])]
    assert 4 <= len(holders) <= 8
    assert outcome.pulled_tokens == (len(holders) - 1) * 8192
    assert outcome.cached_tokens == 600 * 8192
    waits = sorted(outcome.ttft_s[n] - 512 / 5000 for n in range(1, 601))
    assert waits[300] < 0.06
    assert waits[-1] < 0.6
    bounded = Cluster(replace(settings, max_holders=2), Contender("estimated_ttft", True, True))
    bounded.run(prepare(trace))
    assert sum(replica.cache.index.held(chain[16 * 15 : 16 * 16]) for replica in bounded.replicas.values()) == 2


@functools.cache
def traced(settings: ClusterSettings) -> tuple[list[TraceRequest], int]:
    """Return 100 requests, and the tokens that an unlimited cache would have of them."""
    trace = [request for request in read_trace(DEFAULT_TRACE, 110) if len(request.hash_ids) < 200][:100]
    return trace, unlimited(prepare(trace), settings).cached_tokens


@pytest.mark.parametrize("contender", KINDS, ids=str)
def test_nothing_is_lost_and_no_cache_overflows(contender: Contender, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request has one first token and pays for it; pools keep their bound and end idle."""
    settings = ClusterSettings(replicas=4, blocks=250, routers=3, feed_delay_s=0.1, speed=2.0)
    trace, most_cached = traced(settings)
    report = SimulatedReplica._report

    def checked(self: SimulatedReplica) -> None:
        pool = self.cache.pool
        assert pool.free_blocks + pool.idle_blocks + pool.used_blocks == pool.total_blocks == 250
        assert len(self.cache.index) <= 250
        report(self)

    monkeypatch.setattr(SimulatedReplica, "_report", checked)
    cluster = Cluster(settings, contender)
    outcome = cluster.run(prepare(trace))
    assert sorted(outcome.ttft_s) == list(range(100))
    assert outcome.prompt_tokens == sum(request.prompt_tokens for request in trace)
    assert 0 <= outcome.pulled_tokens <= outcome.cached_tokens < outcome.prompt_tokens
    assert outcome.cached_tokens <= most_cached
    assert min(outcome.ttft_s.values()) > 0
    for replica in cluster.replicas.values():
        assert (replica.cache.pool.used_blocks, replica.decoding, replica.waiting) == (0, 0, [])
        assert replica.current is None
    for door in cluster.doors.values():
        assert door.core.loads.open_reservations == 0
        for name, replica in cluster.replicas.items():
            assert door.core.directory.blocks_held(name).get("pool", 0) == len(replica.cache.index)


def test_a_request_that_can_never_fit_is_refused() -> None:
    """It would wait forever."""
    with pytest.raises(ValueError, match="more blocks"):
        run([prompt(0.0, 512 * 300, 0)], Contender("round_robin"))


def test_our_model_of_rays_tree_agrees_with_rays() -> None:
    """For prompts of one character per block, both trees propose the same replicas."""
    real_tree = pytest.importorskip("ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree").PrefixTree()
    names, rng = ["a", "b", "c", "d"], Random(5)
    real_tree.add_tenants(names, 0.0)
    modelled = RayPrefixTree(names)
    for turn in range(400):
        text = "".join(rng.choices("xyz", k=rng.randint(1, 25))) + chr(0x1000 + turn) * rng.randint(0, 12)
        prefixes = [text[: end + 1].encode() for end in range(len(text))]
        matched, holders = real_tree.prefix_match(text, None)
        if len(matched) / len(text) < 0.1:
            holders = real_tree.get_smallest_tenants()
        proposed = modelled.candidates(prefixes, len(text), 1)
        assert sorted(proposed) == sorted(holders)
        chosen = rng.choice(sorted(proposed) if turn % 3 else names)
        real_tree.insert(text, chosen, float(turn))
        modelled.insert(chosen, prefixes, 1)


def test_the_command_writes_the_contract(tmp_path: Path) -> None:
    """Every policy has its row of figures; rows for parts of the trace follow."""
    path = tmp_path / "simulate.json"
    simulate.run(["--requests", "30", "--replicas", "2", "--json", str(path)])
    document = json.loads(path.read_text())
    assert set(document) == {"settings", "versions", "host", "simulated", "summary", "results"}
    rows = document["results"]
    assert set(simulate.CONTENDING) < set(rows)
    assert {"lmetric/shortest_first+pull", "estimated_ttft/first_come", "unlimited_cache"} < set(rows)
    assert len(rows) == 4 * len(simulate.CONTENDING) + 1
    figures = {"hit_rate", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s"}
    assert all(figures < set(row) for row in rows.values())
