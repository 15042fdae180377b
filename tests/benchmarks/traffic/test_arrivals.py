"""Arrivals of single clients: published windows, gap distributions, and scaled rates that keep their shape."""

import gzip
import hashlib
import math
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.traffic.arrivals import ARRIVALS, Client, read_clients, scale_for

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
