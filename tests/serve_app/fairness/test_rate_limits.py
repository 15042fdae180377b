"""A tenant gets exactly its limits, and learns truly how much is left and when to retry."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.openai.response import openai_limits
from serve_app.config.tenants import TenantConfig
from serve_app.errors import RateLimited
from serve_app.fairness.rate_limits import Allowance, Left, LimitsLeft, TenantLimits, TokenBucket
from tests.harness.virtual_time import Clock


def tenant(name: str = "acme", **limits: Any) -> TenantConfig:
    return TenantConfig(name=name, key_sha256=[{"sha256": "a" * 64}], **limits)  # type: ignore[list-item]


def limits_of(clock: Clock, ingresses: int = 1, **limits: Any) -> TenantLimits:
    return TenantLimits([tenant(**limits)], ingresses, clock=clock)


def refused(ask: Callable[[], object]) -> float:
    """Return the time to retry after."""
    with pytest.raises(RateLimited) as caught:
        ask()
    assert caught.value.status == 429
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


@given(
    st.floats(1, 50),
    st.floats(0.1, 10),
    st.lists(st.tuples(st.floats(0, 20), st.floats(0, 80), st.floats(0, 1)), max_size=40),
)
def test_no_stretch_of_time_gives_out_more_than_the_limit(
    most: float, per_s: float, asked: list[tuple[float, float, float]]
) -> None:
    """A full bucket and its inflow meanwhile, net of returned tokens, and one larger request are the most.

    A reported waiting time is exactly long enough.

    docs: tenants
    """
    now_s, used, debt = 0.0, 0.0, 0.0
    bucket = TokenBucket(most, per_s, now_s)
    for pause_s, amount, used_part in asked:
        now_s += pause_s
        wait_s = bucket.wait_s(amount, now_s)
        if wait_s:
            assert bucket.wait_s(amount, now_s + wait_s * 0.99 - 1e-5) > 0
            now_s += wait_s
        assert bucket.wait_s(amount, now_s) == 0.0
        bucket.take(amount, now_s)
        bucket.take(-amount * (1 - used_part), now_s)
        used, debt = used + amount * used_part, max(debt, amount - most)
        assert used <= most + per_s * now_s + max(0.0, debt) + 1e-3
        assert bucket.level(now_s) <= most


@given(st.floats(1, 50), st.floats(0.1, 10), st.lists(st.floats(-100, 100), max_size=20))
def test_a_clock_that_is_set_back_gives_out_nothing(most: float, per_s: float, moves: list[float]) -> None:
    """Whatever is asked for at any time: the bucket, and the inflow of the time that went on, are the most."""
    now_s, taken, forward_s = 1000.0, 0.0, 0.0
    bucket = TokenBucket(most, per_s, now_s)
    for move_s in moves:
        before = bucket.level(now_s)
        now_s, forward_s = now_s + move_s, forward_s + max(0.0, move_s)
        assert move_s > 0 or bucket.level(now_s) == before
        level = max(0.0, bucket.level(now_s))
        bucket.take(level, now_s)
        taken += level
        assert taken <= most + per_s * forward_s + 1e-6


@pytest.mark.parametrize("times", [0.5, 1.0, 2.0, 1000.0])
def test_a_refusal_ends_with_its_time(times: float) -> None:
    """And with no more than the whole limit, however long nobody asks."""
    clock = Clock()
    limits = limits_of(clock, requests_per_second=0.25, tokens_per_minute=600)
    limits.begin("acme")
    clock.now_s += times * refused(lambda: limits.begin("acme"))
    if times < 1:
        refused(lambda: limits.begin("acme"))
        return
    limits.begin("acme")
    refused(lambda: limits.begin("acme"))
    clock.now_s += 1000
    limits.begin("acme").reserve(600, 0)
    clock.now_s += 4
    later = limits.begin("acme")
    clock.now_s += times * refused(lambda: later.reserve(300, 300))
    later.reserve(300, 300)
    refused(lambda: later.reserve(1, 0))


def test_requests_a_second_and_at_once() -> None:
    """Each limit is independent; a refused request counts for none."""
    clock = Clock()
    limits = limits_of(clock, requests_per_second=2, concurrent_requests=3)
    under_way = [limits.begin("acme") for _ in range(2)]
    assert refused(lambda: limits.begin("acme")) == pytest.approx(0.5)
    clock.now_s += 0.5
    under_way.append(limits.begin("acme"))
    clock.now_s += 60
    assert refused(lambda: limits.begin("acme")) >= 1
    under_way.pop().end()
    limits.begin("acme")
    limits.begin("another")  # has no limits


def test_tokens_are_reserved_and_unused_ones_are_returned() -> None:
    """First prompt and max_tokens count, at the end prompt and answer; a refused request counts for nothing."""
    clock = Clock()
    limits = limits_of(clock, tokens_per_minute=600)

    def left() -> int:
        found = limits.left("acme")
        assert found is not None and found.requests is None and found.tokens is not None
        return found.tokens.remaining

    def reserved(prompt: int, output: int) -> Allowance:
        allowance = limits.begin("acme")
        allowance.reserve(prompt, output)
        return allowance

    answered = reserved(100, 300)
    assert left() == 200
    answered.generated(50)
    answered.end()
    answered.end()
    assert left() == 450
    reserved(200, 200).end(refused=True)
    assert left() == 450
    wait_s = refused(lambda: reserved(250, 250))
    assert (left(), wait_s) == (450, pytest.approx(5.0))
    clock.now_s += wait_s
    reserved(250, 250).end()
    assert left() == 250
    with pytest.raises(RateLimited, match="never") as never:
        reserved(500, 101)
    assert never.value.retry_after_s is None
    clock.now_s += 60
    assert left() == 600


def test_each_ingress_has_its_part() -> None:
    """Four ingresses grant as much as one would; a request above a part passes a full bucket, and is paid off later."""
    clock = Clock()
    parts = [limits_of(clock, 4, requests_per_second=8, tokens_per_minute=600) for _ in range(4)]
    assert parts[0].left("acme") == LimitsLeft(Left(8, 8, 0.0), Left(600, 600, 0.0))
    for part in parts:
        part.begin("acme").reserve(150, 0)
        part.begin("acme")
        refused(lambda part=part: part.begin("acme"))  # type: ignore[misc]
    clock.now_s += 60
    big = limits_of(clock, 4, tokens_per_minute=600)
    big.begin("acme").reserve(300, 300)
    assert refused(lambda: big.begin("acme").reserve(1, 0)) == pytest.approx(451 / 2.5)


def test_limits_change_while_requests_are_under_way() -> None:
    """Granted tokens stay granted and return later; removed and new tenants take effect at once."""
    clock = Clock()
    limits = limits_of(clock, tokens_per_minute=600, concurrent_requests=1)
    first = limits.begin("acme")
    first.reserve(100, 200)
    limits.configure([tenant(tokens_per_minute=1200, concurrent_requests=1), tenant("zeta", concurrent_requests=1)])
    assert limits.left("acme") == LimitsLeft(None, Left(1200, 900, 15.0))
    refused(lambda: limits.begin("acme"))
    first.end()
    assert limits.left("acme") == LimitsLeft(None, Left(1200, 1100, 5.0))
    second = limits.begin("acme")
    limits.configure([])
    second.reserve(10, 0)
    second.end()
    assert limits.left("acme") is None
    assert not limits._tenants


def test_openais_headers() -> None:
    assert openai_limits(LimitsLeft(Left(60, 59, 0.0121), Left(150_000, 149_984, 360.0))) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "13ms",
        "x-ratelimit-limit-tokens": "150000",
        "x-ratelimit-remaining-tokens": "149984",
        "x-ratelimit-reset-tokens": "6m0s",
    }
    assert openai_limits(LimitsLeft(None, Left(1, 0, 1.5)))["x-ratelimit-reset-tokens"] == "1.5s"
    assert openai_limits(LimitsLeft(Left(1, 1, 0.0), None))["x-ratelimit-reset-requests"] == "0ms"
