"""A router that believes a lying feed loses time, but never changes a token."""

from random import Random

from router.core import RoutingCore
from router.protocol.block_hash import hash_blocks
from router.protocol.events import BlocksStored, Event, LoadReport
from router.protocol.request import RoutedRequest
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.tiny import prompt, request, run_all


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
