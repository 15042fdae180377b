"""A threshold rule as llm-d's, with a Kubernetes HPA's arithmetic: the peer that our autoscaling is compared with.

Grows while more than 3 requests a replica wait, or more than 0.8 of the KV pools is in use. Runs in Serve's controller.
Source: llm-d's defaults of its saturation thresholds; Kubernetes' HorizontalPodAutoscaler for steps and tolerance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from ray.serve.config import AutoscalingContext

from benchmarks.end_to_end.autoscale.arms import DOWNSCALE_DELAY_S, MAX_REPLICAS, MIN_REPLICAS

QUEUE, KV = 3.0, 0.8
TOLERANCE = 0.1
PERIOD_S = 5.0
"""Between two looks; an HPA's is 15 s."""


def wanted(current: int, waiting: Iterable[float], kv_used: Iterable[float]) -> int:
    """Return how many replicas an HPA asks for: in proportion to the worse of both means, twice as many at most."""
    queue, kv = list(waiting), list(kv_used)
    if not queue or not kv or not current:
        return current
    ratio = max(sum(queue) / len(queue) / QUEUE, sum(kv) / len(kv) / KV)
    if abs(ratio - 1.0) <= TOLERANCE:
        return current
    return min(max(math.ceil(current * ratio), MIN_REPLICAS), MAX_REPLICAS, 2 * current)


class ThresholdRule:
    """Serve's policy: grows at once, shrinks to the most that was wanted during the delay."""

    def __init__(self) -> None:
        self._wanted: list[tuple[float, int]] = []
        self._next_s = 0.0

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return how many replicas there should be."""
        now_s, target = time.monotonic(), ctx.target_num_replicas
        raw = ctx.raw_metrics or {}
        if now_s < self._next_s or not ctx.running_replicas or "waiting" not in raw:
            return target, {}
        self._next_s = now_s + PERIOD_S
        newest = {name: {who: series[-1].value for who, series in raw[name].items() if series} for name in raw}
        pools = newest.get("pool_tokens", {})
        kv = [used / pools[who] for who, used in newest.get("used_tokens", {}).items() if pools.get(who)]
        self._wanted = [(at_s, count) for at_s, count in self._wanted if at_s > now_s - DOWNSCALE_DELAY_S]
        self._wanted.append((now_s, wanted(len(ctx.running_replicas), newest["waiting"].values(), kv)))
        most = max(count for _, count in self._wanted)
        return (most if most <= target else max(target, self._wanted[-1][1])), {}
