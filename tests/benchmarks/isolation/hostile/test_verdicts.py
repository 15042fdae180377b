"""What was seen becomes figures and verdicts: nothing that is missing counts as good."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.isolation.hostile.raw_http import Reply
from benchmarks.isolation.hostile.verdicts import (
    all_served,
    at_least,
    at_most,
    hit_rate,
    longest_wait_s,
    paired,
    served_share,
    tokens_per_s,
    ttft_bar,
    ttft_percentile,
    verdict,
    windows,
)
from benchmarks.isolation.hostile.watch import Seen

ALONE = [Seen(0.2, 200, 0.1, 100, 90, 8, 1.0), Seen(0.3, 200, 0.2, 100, 90, 8, 2.0)]
REFUSED = Seen(9.0, 429, ended_s=3.0)


def test_refused_requests_count_as_not_served_and_as_waited_for() -> None:
    """But they have no first token: how long refusals take is in the longest wait alone."""
    seen = [*ALONE, REFUSED]
    assert served_share(seen) == pytest.approx(2 / 3)
    assert ttft_percentile(seen, 100) == 0.2
    assert longest_wait_s(seen) == 9.0
    assert hit_rate(seen) == 0.9


def test_what_was_not_seen_is_no_figure_and_holds_no_bar() -> None:
    nothing = [REFUSED]
    assert served_share([]) is ttft_percentile(nothing, 99) is hit_rate(nothing) is None
    assert not at_least("x", None, 0.0).held
    assert not at_most("x", None, 1.0).held
    assert not at_most("x", 1.0, None).held
    assert not ttft_bar("zeta", ALONE, nothing).held
    assert not ttft_bar("zeta", nothing, ALONE).held
    assert json.loads(json.dumps(paired(ALONE, nothing), allow_nan=False))["ttft_p99_ratio"] is None


def test_the_bar_of_first_tokens_is_twice_alone_and_half_a_second() -> None:
    within = [Seen(1.0, 200, 0.89)]
    beyond = [Seen(1.0, 200, 0.91)]
    assert ttft_bar("zeta", [Seen(1.0, 200, 0.2)], within).held
    assert not ttft_bar("zeta", [Seen(1.0, 200, 0.2)], beyond).held
    assert paired([Seen(1.0, 200, 0.2)], within)["ttft_p99_allowed_s"] == pytest.approx(0.9)
    assert paired(ALONE, [REFUSED])["longest_wait_s"] == pytest.approx(8.7)


@pytest.mark.parametrize("seen", [[], [*ALONE, REFUSED]])
def test_an_instance_that_serves_nobody_proves_nothing(seen: list[Seen]) -> None:
    """Nothing is left of an attack on what is down: such a run has no verdict."""
    assert all_served(ALONE) == ALONE
    with pytest.raises(RuntimeError, match="not served"):
        all_served(seen)


def test_windows_are_whole_and_hold_what_ended_in_them() -> None:
    """What ends before the first, or in the rest after the last, is in none."""
    replies = [
        Reply(at_s, 0.1, 200, tokens) for at_s, tokens in ((9.9, 1), (10.0, 2), (14.9, 4), (20.0, 8), (25.1, 16))
    ]
    assert windows(replies, 10.0, 27.0, 5.0, lambda reply: reply.completion_tokens) == [6.0, 0.0, 8.0]
    assert windows(replies, 10.0, 12.0, 5.0, lambda reply: reply.completion_tokens) == []


def test_tokens_of_all_tenants_count_where_their_answer_ended_in_time() -> None:
    replies = [Reply(1.0, 0.1, 200, 100), Reply(4.0, 0.1, 200, 1000)]
    assert tokens_per_s(replies, [*ALONE, REFUSED], 0.5, 2.5) == (100 + 16) / 2


def test_a_scenario_holds_when_all_its_bars_do() -> None:
    held, missed = at_most("a", 1.0, 1.0), at_least("b", 0.5, 1.0)
    assert verdict({"x": 1}, [held])["held"] is True
    assert verdict({}, [held, missed])["held"] is False
    assert verdict({}, [])["held"] is None
    assert verdict({}, [missed])["bars"] == [{"bar": "b", "value": 0.5, "held": False}]
    assert math.isinf(longest_wait_s([]))
