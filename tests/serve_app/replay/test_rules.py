"""Tables of the rules that contend in a replay."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.observe import RecentTimes, RequestTimes
from router.protocol.autoscaling import ReplicaFigures
from serve_app.replay.rules import LlmdRule, OracleRule, RayTtftRule, ScaleBounds, ServeRule

BOUNDS = ScaleBounds(1, 10, 2.0)


@dataclass
class Seen:
    """A pool of so many replicas, with what a rule is to see of it."""

    wanted: int
    requests: int = 0
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    held: int = 0

    def figures(self, now_s: float) -> dict[str, ReplicaFigures]:
        """Return as many as run; nobody reads what they say."""
        one = ReplicaFigures(0, 0, 0, 1.0, 0, 0, 1, 1, 0, 0, 0, 0.0)
        return {str(number): one for number in range(self.wanted)}

    def demand(self, now_s: float) -> tuple[RecentTimes, int]:
        """Return nothing."""
        return RequestTimes().recent(now_s), 0

    def ongoing(self) -> int:
        """See ``PoolView``."""
        return self.requests

    def waiting_without_replica(self) -> int:
        """See ``PoolView``."""
        return self.held

    def recent_ttft_s(self, now_s: float, window_s: float) -> list[float]:
        """See ``PoolView``."""
        return self.ttft_s

    def recent_tpot_s(self, now_s: float, window_s: float) -> list[float]:
        """See ``PoolView``."""
        return self.tpot_s


def test_serve_rises_after_30_s_and_falls_after_600() -> None:
    """A wish has to last: 30 s for more replicas, 600 s for fewer; from none it is fulfilled at once."""
    rule = ServeRule(BOUNDS, 4.0)
    assert [rule.target(Seen(2, 16), at_s) for at_s in (0.0, 25.0, 30.0)] == [2, 2, 4]
    rule = ServeRule(BOUNDS, 4.0)
    assert [rule.target(Seen(4, 8), at_s) for at_s in (0.0, 595.0, 600.0)] == [4, 4, 2]
    assert ServeRule(ScaleBounds(0, 10, 2.0), 4.0).target(Seen(0, 1, held=1), 0.0) == 1


def test_ray_ttft_moves_by_one() -> None:
    """One more while p99 is over the target, one less only with less than a request a replica."""
    rule = RayTtftRule(BOUNDS)
    assert [rule.target(Seen(2, 9, [3.0]), at_s) for at_s in (0.0, 30.0)] == [2, 3]
    assert [rule.target(Seen(3, 9, [0.1]), at_s) for at_s in (35.0, 900.0)] == [3, 3]
    assert [rule.target(Seen(3, 2, [0.1]), at_s) for at_s in (1000.0, 1600.0)] == [3, 2]


def test_llmd_rises_at_once_by_doubling_at_most_and_falls_after_its_window() -> None:
    """The worse ratio counts; between the two thresholds nothing changes."""
    rule = LlmdRule(BOUNDS)
    assert rule.target(Seen(2, 9, [2.2]), 0.0) == 4
    assert rule.target(Seen(4, 9, [1.0]), 15.0) == 4
    assert rule.target(Seen(2, 9, [9.0]), 30.0) == 6
    quiet = LlmdRule(BOUNDS)
    assert quiet.target(Seen(4, 9, [1.0]), 0.0) == 4
    targets = [quiet.target(Seen(4, 1, [0.2], [0.01]), 15.0 * turn) for turn in range(1, 21)]
    assert targets[:19] == [4] * 19 and targets[19] == 1


def test_the_oracle_starts_before_the_need() -> None:
    """It wants the most of the windows that a start now would reach."""
    rule = OracleRule([1, 5, 2], 120.0, 60.0)
    assert [rule.target(Seen(1), at_s) for at_s in (0.0, 30.0, 130.0, 300.0, 9999.0)] == [1, 5, 5, 2, 2]
