"""The peer's rule: an HPA's arithmetic over the worse of queue and KV, inside Serve's policy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.end_to_end.autoscale import threshold_rule
from benchmarks.end_to_end.autoscale.arms import DOWNSCALE_DELAY_S, MAX_REPLICAS, MIN_REPLICAS
from benchmarks.end_to_end.autoscale.threshold_rule import PERIOD_S, ThresholdRule, wanted


@pytest.mark.parametrize(
    ("current", "waiting", "kv", "expected"),
    [
        (2, [3.0, 3.0], [0.1, 0.1], 2),  # at the threshold
        (2, [3.2, 3.2], [0.1, 0.1], 2),  # within the tolerance
        (2, [4.0, 4.0], [0.1, 0.1], 3),
        (2, [0.0, 0.0], [1.0, 1.0], 3),
        (2, [90.0, 90.0], [0.1, 0.1], 4),  # twice as many at most
        (4, [90.0] * 4, [0.1] * 4, MAX_REPLICAS),
        (4, [0.0] * 4, [0.0] * 4, MIN_REPLICAS),
        (3, [], [], 3),  # nothing is known
    ],
)
def test_steps_are_an_hpas(current: int, waiting: list[float], kv: list[float], expected: int) -> None:
    assert wanted(current, waiting, kv) == expected


@given(st.integers(MIN_REPLICAS, MAX_REPLICAS), st.floats(0, 100), st.floats(0, 1), st.floats(0, 100), st.floats(0, 1))
def test_more_load_never_asks_for_fewer(current: int, queue: float, kv: float, more: float, fuller: float) -> None:
    low = wanted(current, [queue] * current, [kv] * current)
    assert low <= wanted(current, [queue + more] * current, [max(kv, fuller)] * current)


def context(target: int, running: int, waiting: float) -> Any:
    raw = {
        name: {who: [SimpleNamespace(value=value)] for who in range(running)}
        for name, value in (("waiting", waiting), ("pool_tokens", 100.0), ("used_tokens", 10.0))
    }
    return SimpleNamespace(target_num_replicas=target, running_replicas=list(range(running)), raw_metrics=raw)


def test_it_grows_at_once_and_shrinks_after_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """One look a period; a lull shorter than the delay changes nothing; without figures all stays."""
    now_s = [100.0]
    monkeypatch.setattr(threshold_rule.time, "monotonic", lambda: now_s[0])
    rule = ThresholdRule()
    assert rule(context(3, 0, 9.0))[0] == 3
    assert rule(context(2, 2, 9.0))[0] == 4
    assert rule(context(4, 4, 99.0))[0] == 4  # within the period
    for _ in range(int(DOWNSCALE_DELAY_S / PERIOD_S) - 1):
        now_s[0] += PERIOD_S
        assert rule(context(4, 4, 0.0))[0] == 4
    now_s[0] += PERIOD_S
    assert rule(context(4, 4, 0.0))[0] == MIN_REPLICAS
