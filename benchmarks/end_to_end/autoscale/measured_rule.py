"""The pure rules of others inside Serve's controller, over what replicas report and what clients have measured.

Measured times come from a file that the load's sender writes anew: in place of a Prometheus that scrapes engines. The
rules live in a time that is ``compressed`` times as fast, so all their delays and periods shrink alike.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray.serve.config import AutoscalingContext

from router.protocol.autoscaling import ReplicaFigures
from serve_app.replay.client import TimedAnswer
from serve_app.replay.rules import LlmdRule, RayTtftRule, ScaleBounds
from serve_app.replay.search import LLMD, RAY_TTFT

logger = logging.getLogger("ray.serve")

MEASURED_RULES = {RAY_TTFT: RayTtftRule, LLMD: LlmdRule}
KEPT_S = 120.0
"""Longer than any rule looks back."""


class AnswerTimes:
    """The file of measured times, as its one writer has it: Unix time of an answer's end, TTFT, seconds a token."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[tuple[float, float, float]] = []

    def add(self, answer: TimedAnswer, ttft_s: float) -> None:
        """Add an answer that has just ended."""
        now_s = time.time()
        self._rows = [row for row in self._rows if row[0] > now_s - KEPT_S]
        self._rows.append((now_s, ttft_s, answer.tpot_s))
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps(self._rows))
        beside.replace(self.path)  # a reader sees a whole file


def answer_times(path: Path) -> list[tuple[float, float, float]]:
    """Return the rows of the file, none if there is no file yet."""
    with suppress(FileNotFoundError):
        return [tuple(row) for row in json.loads(path.read_text())]
    return []


class ControllerPool:
    """What a rule sees of real replicas (``PoolLoad``). ``rows``: of ``answer_times``."""

    def __init__(
        self, ctx: AutoscalingContext, rows: Sequence[tuple[float, float, float]], compressed: float, unix_s: float
    ) -> None:
        self.wanted = int(ctx.target_num_replicas)
        self._ctx, self._rows, self._compressed, self._unix_s = ctx, rows, compressed, unix_s

    def figures(self, now_s: float) -> dict[str, ReplicaFigures]:
        """Return the newest report of each running replica that has sent one."""
        raw = self._ctx.raw_metrics or {}
        running = {replica.unique_id for replica in self._ctx.running_replicas}
        floats: dict[str, dict[str, float]] = {}
        for name, values in raw.items():
            for replica, series in values.items():
                if series and replica.unique_id in running:
                    floats.setdefault(replica.unique_id, {})[name] = series[-1].value
        found = {}
        for name, values_of in floats.items():
            with suppress(ValueError):
                found[name] = ReplicaFigures.of(values_of)
        return found

    def ongoing(self) -> int:
        """Return Serve's own count of requests that wait or are answered."""
        return int(self._ctx.total_num_requests)

    def waiting_without_replica(self) -> int:
        """Return the requests that wait at handles; only a rule without any replica asks."""
        return int(self._ctx.total_queued_requests or 0)

    def recent_ttft_s(self, now_s: float, window_s: float) -> list[float]:
        """Return the times of first tokens of answers that ended within the window."""
        return [ttft_s for _, ttft_s, _ in self._recent(window_s)]

    def recent_tpot_s(self, now_s: float, window_s: float) -> list[float]:
        """Return the seconds a token of answers that ended within the window."""
        return [tpot_s for _, _, tpot_s in self._recent(window_s)]

    def _recent(self, window_s: float) -> list[tuple[float, float, float]]:
        since_s = self._unix_s - window_s / self._compressed
        return [row for row in self._rows if row[0] >= since_s]


class MeasuredRule:
    """Serve's policy: asks the rule named ``rule``, once each of its periods. ``times``: the file of measured times."""

    def __init__(
        self,
        rule: str,
        times: str,
        compressed: float,
        min_replicas: int,
        max_replicas: int,
        target_ttft_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._rule = MEASURED_RULES[rule](ScaleBounds(min_replicas, max_replicas, target_ttft_s))
        self._times, self._compressed = Path(times), compressed
        self._next_s = self._next_fault_s = 0.0

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return how many replicas there should be."""
        target, now_s = int(ctx.target_num_replicas), self._clock() * self._compressed
        if now_s < self._next_s or not ctx.running_replicas:
            return target, {}
        self._next_s = now_s + self._rule.period_s
        try:
            pool = ControllerPool(ctx, answer_times(self._times), self._compressed, time.time())
            return self._rule.target(pool, now_s), {}
        except Exception:  # it would stop the whole controller
            if now_s >= self._next_fault_s:
                self._next_fault_s = now_s + 60.0 * self._compressed
                logger.exception("the rule failed; the number of replicas stays")
            return target, {}
