"""The simulated day: nobody is lost, what is paid for is what ran, and the rules do what they say."""

from __future__ import annotations

import pytest

from benchmarks.simulation.day.queues import QueuePool
from benchmarks.simulation.day.rules import Ours, ServeDefault, Steps, Threshold
from benchmarks.simulation.day.run import Day, figures, flaps, make_day, runs
from benchmarks.simulation.day.view import START_S, DayOutcome, PoolView


class Script:
    """Says a number from a moment on."""

    interval_s = 10.0
    delay_s = 0.0

    def __init__(self, *steps: tuple[float, int]) -> None:
        self.steps = steps

    def target(self, pool: PoolView, now_s: float) -> int:
        return [size for at_s, size in self.steps if at_s <= now_s][-1]


def test_a_start_takes_its_time_a_drain_is_paid_for_and_everything_is_answered() -> None:
    """Two requests of 100 s: the second waits until the second replica has started; one ends its work."""
    rule = Script((0.0, 1), (10.0, 2), (90.0, 1))
    outcome = QueuePool(rule, first=1, most=4).run([(1.0, 100.0), (71.0, 100.0)])
    assert outcome.ttft_s == [100.0, 100.0]
    assert outcome.sizes == [(0.0, 1), (10.0, 2), (90.0, 1)]
    assert outcome.gone_s == 171.0
    assert outcome.smallest_s == 180.0
    assert START_S == 60.0
    # One for 180 s and the tick behind it; the other from its decision to the end of its request.
    assert outcome.replica_s == pytest.approx(190.0 + 161.0)


@pytest.fixture(scope="module")
def hour() -> Day:
    return make_day(400, 4, 0, 3600.0, routers=True)


@pytest.mark.parametrize("name", ["ours 1.5", "default 2", "threshold 1", "steps 1", "p2c default 2"])
def test_every_rule_serves_every_request_over_real_routers(hour: Day, name: str) -> None:
    """Replicas come and go, also while copies are under way; the figures are all there."""
    [run] = runs(hour, [name])
    rule, outcome = hour.run(run)
    assert len(outcome.ttft_s) == len(hour.requests)
    row = figures(rule, outcome, hour)
    assert row["replica_hours"] > sum(hour.own_s) / 3600.0 / 2
    assert 0.0 < row["ttft_p50_s"] <= row["ttft_p90_s"] <= row["ttft_p99_s"]
    assert outcome.smallest_s


def test_our_rule_is_at_the_smallest_size_within_two_periods_of_the_delay(hour: Day) -> None:
    """The very code of the controller, over both models."""
    for day in (hour, make_day(2000, 16, 1, 3600.0, routers=False)):
        [run] = runs(day, ["ours 1.5"])
        rule, outcome = day.run(run)
        assert figures(rule, outcome, day)["periods_beyond_delay"] <= 2


def test_only_what_is_undone_without_a_turn_of_the_load_is_a_flap() -> None:
    """Up and down within the delay: a flap under a flat load, none where the load fell, and none after the delay."""
    flat = make_day(3000, 4, 0, 3600.0, routers=False)
    times_s = [float(second) for second in range(3600)]

    def count(own_s: list[float], *sizes: tuple[float, int]) -> int:
        day = Day(times_s, own_s, [], flat.settings, 1, 8)
        return flaps(DayOutcome(sizes=list(sizes)), day, 600.0)

    falling = [1.0] * 1500 + [0.5] * 2100
    assert count([1.0] * 3600, (0.0, 2), (1400.0, 4), (1800.0, 3)) == 1
    assert count(falling, (0.0, 2), (1400.0, 4), (1800.0, 3)) == 0
    assert count([1.0] * 3600, (0.0, 2), (1000.0, 4), (1800.0, 3)) == 0
    assert count([1.0] * 3600, (0.0, 2), (1400.0, 4), (1800.0, 5)) == 0


def test_thresholds_step_as_they_say() -> None:
    """An HPA goes by the ratio, at most twice as many or four more; one step at a time the other; Serve waits 30 s."""

    class Busy:
        wanted, most = 2, 16

        def figures(self) -> dict[str, object]:
            from tests.cluster.test_autoscaling_signals import REPLICA

            return {"a": REPLICA, "b": REPLICA}  # 2 wait at each

        def demand(self) -> list[object]:
            return []

        def ongoing(self) -> int:
            return 24

    busy: PoolView = Busy()  # type: ignore[assignment]
    assert Threshold(1).target(busy, 15.0) == 4
    assert Threshold(0.1).target(busy, 15.0) == 6
    assert Threshold(2).target(busy, 15.0) == 2
    assert Steps(1).target(busy, 15.0) == 3
    default = ServeDefault(4)
    assert [default.target(busy, now_s) for now_s in (5.0, 30.0, 36.0)] == [2, 2, 6]
    assert Ours(1.0, 16).interval_s > 0
