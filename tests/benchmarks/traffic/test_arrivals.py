"""Arrivals of single clients and tenants: published windows, gaps, and scaled rates that keep their shape."""

import gzip
import hashlib
import math
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.trace import DEFAULT_TRACE
from benchmarks.traffic.arrivals import ARRIVALS, Client, read_clients, scale_for
from benchmarks.traffic.conversations import conversations_of
from benchmarks.traffic.tenants import TrafficSettings, tenant_traffic
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, TraceRequest, read_trace

WINDOWS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 3.0]), st.floats(0.3, 3.0), st.sampled_from(["Gamma", "Weibull"])),
    min_size=1,
    max_size=5,
)


def client_of(windows: list[tuple[float, float, str]], window_s: float = 10.0) -> Client:
    rates, cvs, families = zip(*windows, strict=True)
    return Client("one", window_s, rates, cvs, families)


def test_the_published_clients_come_with_the_project() -> None:
    """The values are the published ones. Their source and licence are named next to them."""
    found = hashlib.sha256(gzip.decompress(ARRIVALS.read_bytes())).hexdigest()
    assert found == "09ac1f63c59051b73c6b8de88e8e9e81257f498a244a90c612e535734facaf4d"
    assert len({client.name for client in read_clients()}) == 16
    note = ARRIVALS.with_name("README.md").read_text()
    assert ARRIVALS.name in note and "github.com/alibaba/ServeGen" in note and "Apache-2.0" in note


@settings(max_examples=60)
@given(WINDOWS, st.integers(0, 1000), st.floats(0.2, 3.0), st.floats(0.0, 60.0), st.floats(1.0, 90.0))
def test_times_are_in_order_and_lie_in_windows_with_arrivals(
    windows: list[tuple[float, float, str]], seed: int, scale: float, start_s: float, seconds: float
) -> None:
    """Times lie within the span, in windows with a rate, and are the same for the same seed."""
    client = client_of(windows)
    times = list(client.arrivals(Random(seed), scale, start_s, seconds))
    assert times == list(client.arrivals(Random(seed), scale, start_s, seconds)) == sorted(times)
    for at_s in times:
        assert 0.0 <= at_s < seconds
        edges = (start_s + at_s - 1e-6, start_s + at_s + 1e-6)
        assert any(client.rate_per_s[int(max(0.0, edge) // 10.0) % len(windows)] for edge in edges)


@pytest.mark.parametrize("family", ["Gamma", "Weibull"])
@pytest.mark.parametrize("cv", [0.4, 1.0, 2.5])
def test_gaps_have_their_mean_and_variation(family: str, cv: float) -> None:
    times = list(client_of([(2.0, cv, family)]).arrivals(Random(1), 1.0, 0.0, 50_000.0))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.5, rel=0.05)
    assert deviation / mean == pytest.approx(cv, rel=0.08)


@settings(max_examples=20)
@given(st.floats(0.0, 86_400.0), st.floats(600.0, 86_400.0), st.floats(0.5, 50.0))
def test_the_scale_gives_the_mean_rate(start_s: float, seconds: float, requests_per_s: float) -> None:
    """All clients share one factor, so each keeps its share and shape. After a day, the windows repeat."""
    clients = read_clients()
    scale = scale_for(clients, requests_per_s, start_s, seconds)
    expected = [scale * client.requests_in(start_s, seconds) for client in clients]
    assert sum(expected) == pytest.approx(requests_per_s * seconds)
    day_later = clients[0].requests_in(start_s + 86_400.0, seconds)
    assert day_later == pytest.approx(clients[0].requests_in(start_s, seconds))


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
