"""The two simulators agree: the replay's, over segments, and the detailed one, with the product's router and cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulation.cluster import Cluster
from benchmarks.simulation.settings import ClusterSettings, Contender, prepare
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, TraceRequest, read_trace
from serve_app.replay.cluster import ReplayCluster
from serve_app.replay.prompts import ModelTraffic
from serve_app.replay.setup import Rates, Setup
from serve_app.traffic.workload import segments

TRACE = Path(__file__).parents[3] / "benchmarks" / "traces" / "mooncake_conversation.jsonl.gz"
REQUESTS, BLOCKS, REPLICAS, RATE = 1500, 1500, 16, 5000.0


def traffic_of(trace: list[TraceRequest]) -> ModelTraffic:
    """Return a trace as columns, of whole blocks."""
    ids = [one.hash_ids[: one.prompt_tokens // TRACE_BLOCK_TOKENS] for one in trace]
    starts = np.cumsum([0, *map(len, ids)])
    paths, path_start, sizes = segments(np.array([block for one in ids for block in one], np.uint64), starts)
    count = len(trace)
    return ModelTraffic(
        TRACE_BLOCK_TOKENS, np.array([one.arrival_s for one in trace]),
        np.array([one.prompt_tokens for one in trace], np.int32),
        np.array([one.output_tokens for one in trace], np.int32), np.zeros(count, np.int64), paths, path_start,
        sizes.tolist(), np.full(count, -1, np.int32), np.zeros(count, np.int32),
    )  # fmt: skip


@pytest.mark.parametrize(("policy", "shortest_first"), [("estimated_ttft", True), ("round_robin", False)])
def test_both_simulators_tell_the_same(policy: str, shortest_first: bool) -> None:
    """With one cost model, in which decoding is free, hits are within 1 % and mean times within 5 % of each other."""
    trace = read_trace(TRACE, REQUESTS)
    sizes = ClusterSettings(REPLICAS, BLOCKS, prefill_tokens_per_s=RATE, decode_weight=0.0, decode_token_s=0.0)
    detailed = Cluster(sizes, Contender(policy, shortest_first=shortest_first)).run(prepare(trace)).summary()
    prompts = traffic_of(trace)
    setup = Setup(
        "trace", Rates(RATE), REPLICAS, BLOCKS * TRACE_BLOCK_TOKENS, policy,
        shortest_first=shortest_first, answers_cached=False,
    )  # fmt: skip
    result = ReplayCluster(prompts, setup).run()
    hit_rate = result.cached_tokens.sum() / prompts.prompt_tokens.sum()
    assert hit_rate == pytest.approx(detailed["hit_rate"], abs=0.01)
    assert result.ttft_s.mean() == pytest.approx(detailed["ttft_mean_s"], rel=0.05)
