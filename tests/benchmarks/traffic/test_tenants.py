"""Tenants' traffic: the trace's conversations under each tenant's own prompts."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.trace import DEFAULT_TRACE
from benchmarks.traffic.conversations import conversations_of
from benchmarks.traffic.tenants import TrafficSettings, tenant_traffic
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, TraceRequest, read_trace

HOUR = TrafficSettings(0.5, seconds=3600.0, start_s=36_000.0, seed=4)


def test_conversations_share_blocks_as_in_the_trace() -> None:
    """Kept and new blocks are reused as in the trace, except for a few conversations that continue in two ways."""
    trace = read_trace(DEFAULT_TRACE, 2000)
    conversations = conversations_of(trace, 1000)
    assert sum(map(len, conversations)) == len(trace)
    kept = sum(turn.kept_blocks for turns in conversations for turn in turns)
    assert kept == pytest.approx(reused_blocks(trace), rel=0.01)
    assert any(len(turns) > 3 for turns in conversations)
    for turns in conversations:
        assert turns[0].kept_blocks == 0 and turns[0].gap_s == 0.0
        for before, turn in pairwise(turns):
            assert turn.kept_blocks <= before.kept_blocks + before.new_blocks and turn.gap_s >= 0.0


def reused_blocks(trace: list[TraceRequest]) -> int:
    """Count naively the blocks after the common first one that some earlier prompt began with."""
    seen: set[tuple[int, ...]] = set()
    reused = 0
    for request in trace:
        prefixes = [request.hash_ids[: end + 1] for end in range(1, len(request.hash_ids))]
        reused += sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
    return reused


@settings(max_examples=8)
@given(st.integers(0, 1000), st.integers(1, 16))
def test_nothing_is_shared_between_tenants(seed: int, tenants: int) -> None:
    """Every id has one owner and stands for one block. Arrivals are in order, and the seed determines everything."""
    wanted = TrafficSettings(0.2, seconds=2000.0, tenants=tenants, max_blocks=60, seed=seed)
    traffic = list(tenant_traffic(wanted))
    assert traffic == list(tenant_traffic(wanted))
    assert [request.arrival_s for request in traffic] == sorted(request.arrival_s for request in traffic)
    owners: dict[int, str] = {}
    for request in traffic:
        assert len(request.hash_ids) == -(-request.prompt_tokens // TRACE_BLOCK_TOKENS) <= 68
        for block in request.hash_ids:
            assert owners.setdefault(block, request.tenant) == request.tenant
