"""Figures of the last 15 minutes: counts, viewers, and retention."""

from math import ceil, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.live.tally import (
    BUCKET_S,
    BUCKETS,
    MAX_TENANTS,
    WINDOWS_S,
    Bucket,
    Tally,
    begin_of,
    figure_of,
    joined,
    misses_of,
    refusals_of,
    rows_of,
    sums_of,
)
from tests.harness.virtual_time import Clock

START_S = 1_790_000_000


@pytest.fixture
def clock() -> Clock:
    return Clock(START_S)


def answer(counts: Tally, tenant: str, ttft_s: float = 0.1, status: int = 200) -> None:
    counts.add("warmpath_requests_total", endpoint="chat", status=str(status), tenant=tenant)
    if status == 200:
        counts.first_token(tenant, ttft_s, 10, 5)


@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=200))
def test_answers_have_times_of_their_own(times_s: list[float]) -> None:
    """The time to the end of an answer does not mix with that to its first token."""
    counts = Tally()
    answer(counts, "a", 0.1)
    for e2e_s in times_s:
        counts.answered_whole("a", e2e_s)
    row, ordered = figure_of(merged(counts.rings["a"]), 0), sorted(times_s)
    for name, share in (("e2e_p50_s", 0.5), ("e2e_p95_s", 0.95)):
        true_s = ordered[ceil(share * len(ordered)) - 1]
        assert true_s / 1.09 <= row[name] <= true_s * 1.09
    assert 0.1 / 1.09 <= row["ttft_p95_s"] <= 0.1 * 1.09


@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=200))
def test_quantiles_are_close_to_the_exact_ones(times_s: list[float]) -> None:
    """The p50 and the p95 have an error of at most one cell."""
    counts = Tally()
    for ttft_s in times_s:
        answer(counts, "a", ttft_s)
    row, ordered = figure_of(merged(counts.rings[None]), 0), sorted(times_s)
    for name, share in (("ttft_p50_s", 0.5), ("ttft_p95_s", 0.95)):
        true_s = ordered[ceil(share * len(ordered)) - 1]
        assert true_s / 1.09 <= row[name] <= true_s * 1.09
    assert row["requests"] == len(times_s)


def merged(ring: dict[int, Bucket]) -> Bucket:
    """Return the sum of the buckets, because the time may have reached the next one."""
    total = Bucket()
    for bucket in ring.values():
        total.update(bucket)
    return total


def test_only_errors_of_the_server_are_counted(clock: Clock) -> None:
    """Limits and faults have separate counts. Errors of the client, disconnections and other routes are not counted."""
    counts = Tally(clock)
    for status in (400, 401, 404, 413, 429, 429, 499, 500, 503):
        answer(counts, "a", status=status)
    counts.add("warmpath_requests_total", endpoint="metrics", status="200", tenant="a")
    counts.add("warmpath_requests_total", endpoint="cache_events", status="429", tenant="a")
    counts.add("warmpath_broken_streams_total", status="504", tenant="a")
    counts.add("warmpath_tenant_completion_tokens_total", 7, tenant="a")
    ((at_s, row),) = rows_of([counts.rings], None, clock())[0].items()
    assert at_s == START_S
    counted = {"requests": 0, "refused": 2, "failed": 3, "tokens": 7, "prompt_tokens": 0, "cached_tokens": 0}
    assert row.items() >= {"at_s": START_S, **counted, "ttft_p50_s": None, "ttft_p95_s": None}.items()


def test_a_tenant_sees_its_own_figures_and_an_operator_all(clock: Clock) -> None:
    """An operator also sees requests without a known tenant."""
    counts = Tally(clock)
    answer(counts, "a")
    answer(counts, "b")
    answer(counts, "none", status=503)
    rows, minute = rows_of([counts.rings], "a", clock())
    assert [(row["requests"], row["failed"]) for row in rows.values()] == [(1, 0)]
    assert figure_of(minute, 0)["requests"] == 1
    assert [(row["requests"], row["failed"]) for row in rows_of([counts.rings], None, clock())[0].values()] == [(2, 1)]
    assert rows_of([counts.rings], "c", clock()) == ({}, Bucket())


def test_figures_older_than_15_minutes_are_dropped(clock: Clock) -> None:
    """Each ten seconds with a request have a bucket. The last minute has six of them."""
    counts = Tally(clock)
    for _ in range(2 * BUCKETS):
        answer(counts, "a")
        clock.now_s += BUCKET_S
    assert {name: len(ring) for name, ring in counts.rings.items()} == {None: BUCKETS, "a": BUCKETS}
    clock.now_s -= BUCKET_S
    rows, minute = rows_of([counts.rings], None, clock())
    assert list(rows) == list(range(int(clock()) - BUCKET_S * (BUCKETS - 1), int(clock()) + 1, BUCKET_S))
    assert figure_of(minute, 0)["requests"] == 6
    clock.now_s += BUCKET_S * BUCKETS
    assert rows_of([counts.rings], None, clock()) == ({}, Bucket())


def test_buckets_from_a_clock_that_was_ahead_are_dropped(clock: Clock) -> None:
    """They would never become old; here, in another ingress' view of them, and in the rows, the present counts."""
    counts = Tally(clock)
    clock.now_s += 86_400.0
    answer(counts, "a")
    known = joined({}, counts.rings)
    clock.now_s -= 86_400.0
    assert rows_of([known], "a", clock()) == ({}, Bucket())
    for _ in range(2 * BUCKETS):
        answer(counts, "a")
        known = joined(known, joined(counts.rings, {}, 2))
        clock.now_s += BUCKET_S
    clock.now_s -= BUCKET_S
    assert {name: len(ring) for name, ring in counts.rings.items()} == {None: BUCKETS, "a": BUCKETS}
    assert known == counts.rings
    rows, minute = rows_of([known], "a", clock())
    assert len(rows) == BUCKETS and figure_of(minute, 0)["requests"] == 6


@given(st.lists(st.tuples(st.integers(-300, 300), st.sampled_from("ab")), min_size=1, max_size=40))
def test_a_clock_that_is_set_back_forgets_nothing_that_is_recent(steps: list[tuple[int, str]]) -> None:
    """Whatever way the clock goes, what was counted less than 15 minutes from now is in the rings, once."""
    clock, counted = Clock(START_S), list[tuple[int, str]]()
    counts = Tally(clock)
    reach = BUCKETS * BUCKET_S
    for step_s, tenant in steps:
        clock.now_s += step_s
        answer(counts, tenant)
        counted.append((int(clock.now_s) // BUCKET_S, tenant))
    everywhere = range(min(at for at, _ in counted), max(at for at, _ in counted) + 1)
    if len(everywhere) * BUCKET_S < reach:  # no moment was ever old
        found = merged(counts.rings[None])
        assert figure_of(found, 0)["requests"] == len(steps)
    last = counted[-1][0]
    for tenant in "ab":
        ring = counts.rings.get(tenant, {})
        assert all(abs(at - last) < 2 * BUCKETS for at in ring)


def test_the_number_of_tenants_is_limited(clock: Clock) -> None:
    """The most recently active ones are kept, and the sum of all."""
    counts, most = Tally(clock), MAX_TENANTS - 1
    names = [f"t{number}" for number in range(most + 1)]
    for tenant in (*names, *names[:most]):
        answer(counts, tenant)
        assert None in counts.rings
    assert set(counts.rings) == {None, *names[:most]}


def test_another_ingress_sends_its_latest_buckets_again(clock: Clock) -> None:
    """Incomplete buckets are replaced, complete ones stay, and both ingresses are summed."""
    here, there = Tally(clock), Tally(clock)
    answer(here, "a")
    answer(there, "a")
    known = joined({}, joined(there.rings, {}))
    answer(there, "a")
    clock.now_s += BUCKET_S
    answer(there, "b")
    known = joined(known, joined(there.rings, {}, 1))
    rows = rows_of([here.rings, known], None, clock())[0]
    assert [row["requests"] for row in rows.values()] == [3, 1]
    assert [row["requests"] for row in rows_of([known], "b", clock())[0].values()] == [1]


@pytest.mark.parametrize("ttft_s", [0.0, -1.0, 1e9])
def test_extreme_times_are_counted_too(ttft_s: float) -> None:
    counts = Tally()
    answer(counts, "a", ttft_s)
    p50_s = figure_of(merged(counts.rings[None]), 0)["ttft_p50_s"]
    assert p50_s > 0
    assert isfinite(p50_s)


def test_a_count_belongs_to_the_ten_seconds_in_which_it_was_made(clock: Clock) -> None:
    """Also if nobody looks in between; what was counted once is not counted again."""
    counts = Tally(clock)
    for number in (1, 2, 3):
        for _ in range(number):
            answer(counts, "a")
        clock.now_s += BUCKET_S
    for _ in range(2):
        assert [row["requests"] for row in rows_of([counts.rings], "a", clock())[0].values()] == [1, 2, 3]
    assert counts.totals() == {"a": (6, 60, 30)}


def test_only_kept_tenants_have_counts(clock: Clock) -> None:
    """One that comes back starts at zero."""
    counts = Tally(clock)
    for tenant in "ab":
        answer(counts, tenant)
        assert counts.rings
    counts.add("warmpath_dropped_events_total", 2)
    counts.keep({"b"})
    assert counts.totals().keys() == {"b"}
    assert {dict(labels).get("tenant") for _, labels in counts.values} == {"b", None}
    answer(counts, "a")
    assert counts.totals()["a"] == (1, 10, 5)
    assert counts.rings["a"][START_S // BUCKET_S]["requests"] == 2


@given(st.lists(st.tuples(st.integers(0, 200), st.sampled_from("abc")), max_size=60), st.sampled_from(WINDOWS_S))
def test_a_span_holds_what_was_counted_in_it(sent: list[tuple[int, str]], window_s: int) -> None:
    """By tenant, in whole buckets up to now; a naive count over all requests is the same."""
    counts = Tally(clock := Clock(START_S))
    at_s = []
    for gap_s, tenant in sent:
        clock.now_s += gap_s
        answer(counts, tenant)
        at_s.append((clock.now_s, tenant))
    begin_s = begin_of(clock.now_s, window_s)
    assert window_s - BUCKET_S <= clock.now_s - begin_s < window_s
    wanted = {one: sum(tenant == one and then >= begin_s for then, tenant in at_s) for one in "abc"}
    found = sums_of(counts.rings, clock.now_s, window_s)
    assert {tenant: bucket["requests"] for tenant, bucket in found.items()} == {
        tenant: number for tenant, number in wanted.items() if number
    }


def test_refusals_and_misses_are_told_by_cause(clock: Clock) -> None:
    """The most frequent first; each refusal with what ends it."""
    counts = Tally(clock)
    for limit, number in (("tokens_per_minute", 2), ("requests_per_second", 3)):
        counts.add("warmpath_refusals_total", number, tenant="a", place="ingress", limit=limit)
    for reason, number in (("time", 1), ("evicted", 4)):
        counts.add("warmpath_cache_misses_total", number, tenant="a", reason=reason)
        counts.add("warmpath_cache_missed_tokens_total", 100 * number, tenant="a", reason=reason)
    bucket = sums_of(counts.rings, clock(), 60)["a"]
    assert [(row["place"], row["limit"], row["requests"]) for row in refusals_of(bucket)] == [
        ("ingress", "requests_per_second", 3),
        ("ingress", "tokens_per_minute", 2),
    ]
    assert all(row["limit"] in row["remedy"] for row in refusals_of(bucket))
    assert misses_of(bucket) == {"evicted": (4, 400), "time": (1, 100)}
