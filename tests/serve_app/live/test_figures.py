"""Figures of the last 15 minutes: counts, viewers, and retention."""

from math import ceil, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.live import figures as module
from serve_app.live.figures import BUCKET_S, BUCKETS, Bucket, Figures, joined, rows_of

START_S = 1_790_000_000


class Clock:
    def __init__(self) -> None:
        self.now_s = float(START_S)

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=200))
def test_quantiles_are_close_to_the_exact_ones(times_s: list[float]) -> None:
    """The p50 and the p95 have an error of at most one cell."""
    figures = Figures()
    for ttft_s in times_s:
        figures.answered("a", ttft_s)
    row, ordered = merged(figures.rings[None]).row(0), sorted(times_s)
    for name, share in (("ttft_p50_s", 0.5), ("ttft_p95_s", 0.95)):
        true_s = ordered[ceil(share * len(ordered)) - 1]
        assert true_s / 1.09 <= row[name] <= true_s * 1.09
    assert row["requests"] == len(times_s)


def merged(ring: dict[int, Bucket]) -> Bucket:
    """Return the sum of the buckets, because the time may have reached the next one."""
    total = Bucket()
    for bucket in ring.values():
        total.add(bucket)
    return total


def test_only_errors_of_the_server_are_counted(clock: Clock) -> None:
    """Limits and faults have separate counts. Errors of the client and disconnections are not counted."""
    figures = Figures(clock)
    for status in (200, 400, 401, 404, 413, 429, 429, 499, 500, 503):
        figures.refused("a", status)
    ((at_s, row),) = rows_of([figures.rings], None, clock())[0].items()
    assert at_s == START_S
    assert row == {
        "at_s": START_S, "requests": 0, "refused": 2, "failed": 2, "ttft_p50_s": None, "ttft_p95_s": None
    }  # fmt: skip


def test_a_tenant_sees_its_own_figures_and_an_operator_all(clock: Clock) -> None:
    """An operator also sees requests without a known tenant."""
    figures = Figures(clock)
    figures.answered("a", 0.1)
    figures.answered("b", 0.1)
    figures.refused("none", 503)
    rows, minute = rows_of([figures.rings], "a", clock())
    assert [(row["requests"], row["failed"]) for row in rows.values()] == [(1, 0)]
    assert minute.row(0)["requests"] == 1
    assert [(row["requests"], row["failed"]) for row in rows_of([figures.rings], None, clock())[0].values()] == [(2, 1)]
    assert rows_of([figures.rings], "c", clock()) == ({}, Bucket())


def test_figures_older_than_15_minutes_are_dropped(clock: Clock) -> None:
    """Each ten seconds with a request have a bucket. The last minute has six of them."""
    figures = Figures(clock)
    for _ in range(2 * BUCKETS):
        figures.answered("a", 0.1)
        clock.now_s += BUCKET_S
    assert {name: len(ring) for name, ring in figures.rings.items()} == {None: BUCKETS, "a": BUCKETS}
    clock.now_s -= BUCKET_S
    rows, minute = rows_of([figures.rings], None, clock())
    assert list(rows) == list(range(int(clock()) - BUCKET_S * (BUCKETS - 1), int(clock()) + 1, BUCKET_S))
    assert minute.row(0)["requests"] == 6
    clock.now_s += BUCKET_S * BUCKETS
    assert rows_of([figures.rings], None, clock()) == ({}, Bucket())


def test_buckets_from_a_clock_that_was_ahead_are_dropped(clock: Clock) -> None:
    """They would never become old; here, in another ingress' view of them, and in the rows, the present counts."""
    figures = Figures(clock)
    clock.now_s += 86_400.0
    figures.answered("a", 0.1)
    known = joined({}, figures.rings)
    clock.now_s -= 86_400.0
    assert rows_of([known], "a", clock()) == ({}, Bucket())
    for _ in range(2 * BUCKETS):
        figures.answered("a", 0.1)
        known = joined(known, joined(figures.rings, {}, 2))
        clock.now_s += BUCKET_S
    clock.now_s -= BUCKET_S
    assert {name: len(ring) for name, ring in figures.rings.items()} == {None: BUCKETS, "a": BUCKETS}
    assert known == figures.rings
    rows, minute = rows_of([known], "a", clock())
    assert len(rows) == BUCKETS and minute.row(0)["requests"] == 6


def test_the_number_of_tenants_is_limited(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most recently active ones are kept, and the sum of all."""
    monkeypatch.setattr(module, "MAX_TENANTS", 3)
    figures = Figures(clock)
    for tenant in "abcab":
        figures.answered(tenant, 0.1)
    assert set(figures.rings) == {None, "a", "b"}


def test_another_ingress_sends_its_latest_buckets_again(clock: Clock) -> None:
    """Incomplete buckets are replaced, complete ones stay, and both ingresses are summed."""
    here, there = Figures(clock), Figures(clock)
    here.answered("a", 0.1)
    there.answered("a", 0.1)
    known = joined({}, joined(there.rings, {}))
    there.answered("a", 0.1)
    clock.now_s += BUCKET_S
    there.answered("b", 0.1)
    known = joined(known, joined(there.rings, {}, 1))
    rows = rows_of([here.rings, known], None, clock())[0]
    assert [row["requests"] for row in rows.values()] == [3, 1]
    assert [row["requests"] for row in rows_of([known], "b", clock())[0].values()] == [1]


@pytest.mark.parametrize("ttft_s", [0.0, -1.0, 1e9])
def test_extreme_times_are_counted_too(ttft_s: float) -> None:
    figures = Figures()
    figures.answered("a", ttft_s)
    p50_s = merged(figures.rings[None]).row(0)["ttft_p50_s"]
    assert p50_s > 0
    assert isfinite(p50_s)
