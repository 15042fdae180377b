"""The rules that contend: ours (the very code of the controller), Ray Serve's default one, and thresholds under an HPA.

Each looks at the pool at its own interval and says how many replicas there should be.
"""

from __future__ import annotations

from collections import deque
from math import ceil
from types import SimpleNamespace
from typing import Any

from ray.serve.autoscaling_policy import _apply_delay_logic

from benchmarks.simulation.day.view import PoolView
from cluster.autoscaling_policy import Decision, State, decide
from cluster.autoscaling_signals import signals
from serve_app.config.autoscaling import AutoscalingConfig
from serve_app.ingress.observe.autoscaling_stats import ingress_figures


class Ours:
    """``cluster.autoscaling_policy`` over the figures that replicas and ingresses would report."""

    interval_s = 15.0

    def __init__(self, target_ttft_s: float, most: int, downscale_delay_s: float = 600.0) -> None:
        self.delay_s = downscale_delay_s
        self.decisions: list[tuple[float, Decision]] = []
        # As a model makes it, a day's times may be longer than the settings allow.
        self._settings = AutoscalingConfig.model_construct(
            max_replicas=most, target_ttft_s=target_ttft_s, downscale_delay_s=downscale_delay_s
        )
        self._state: State | None = None

    def target(self, pool: PoolView, now_s: float) -> int:
        """Return what the policy decides."""
        replicas = {name: (0.0, figures) for name, figures in pool.figures().items()}
        ingresses = [(0.0, ingress_figures(demand, 0, self._settings)) for demand in pool.demand()]
        seen = signals(pool.wanted, list(replicas), replicas, ingresses)
        decision, self._state = decide(self._state, seen, now_s)
        if decision.target != pool.wanted:
            self.decisions.append((now_s, decision))
        return decision.target


class ServeDefault:
    """Ray Serve's default: ongoing requests over a target for each, a mean of 30 s; its own delays.

    Source: ray 2.60, serve/autoscaling_policy.py; the delays are its code.
    """

    interval_s = 5.0
    delay_s = 600.0
    look_back_s = 30.0

    def __init__(self, target_ongoing_requests: float) -> None:
        self._per_replica = target_ongoing_requests
        self._config = SimpleNamespace(upscale_delay_s=30.0, downscale_delay_s=600.0, downscale_to_zero_delay_s=None)
        self._state: dict[str, Any] = {}
        self._ongoing: deque[int] = deque(maxlen=int(self.look_back_s / self.interval_s))

    def target(self, pool: PoolView, now_s: float) -> int:
        """Return what it decides."""
        self._ongoing.append(pool.ongoing())
        mean = sum(self._ongoing) / len(self._ongoing)
        wanted, self._state = _apply_delay_logic(
            max(1, min(ceil(mean / self._per_replica), pool.most)), pool.wanted, self._config, self._state, now_s
        )
        return int(wanted)


class Threshold:
    """Thresholds as llm-d's under a HorizontalPodAutoscaler: waiting requests a replica, and KV in use.

    The ratio of metric to threshold is the step; at most four more or twice as many in 15 s; down to the highest of
    300 s. Source: kubernetes.io, Horizontal Pod Autoscaling: algorithm details, default behaviour.
    """

    interval_s = 15.0
    delay_s = 300.0
    tolerance = 0.1

    def __init__(self, waiting_requests: float, kv_usage: float = 0.8) -> None:
        self._waiting = waiting_requests
        self._kv = kv_usage
        self._wanted: deque[int] = deque(maxlen=int(self.delay_s / self.interval_s))

    def target(self, pool: PoolView, now_s: float) -> int:
        """Return what it decides."""
        running, waiting, used = _usage(pool)
        ratio = max(waiting / self._waiting, used / self._kv)
        now = pool.wanted
        if ratio > 1.0:
            ratio = max(ratio * running / now, 1.0)  # pods that are not ready count as idle
        wanted = now if abs(ratio - 1.0) <= self.tolerance else max(1, ceil(running * ratio))
        self._wanted.append(min(wanted, max(now + 4, 2 * now), pool.most))
        return min(now, max(self._wanted)) if wanted < now else self._wanted[-1]


class Steps:
    """The same thresholds one step at a time: one more while nobody starts, one fewer after ``delay_s`` below half."""

    interval_s = 15.0
    delay_s = 600.0

    def __init__(self, waiting_requests: float, kv_usage: float = 0.8) -> None:
        self._waiting = waiting_requests
        self._kv = kv_usage
        self._low_since_s: float | None = None

    def target(self, pool: PoolView, now_s: float) -> int:
        """Return what it decides."""
        running, waiting, used = _usage(pool)
        over = waiting > self._waiting or used > self._kv
        low = waiting < self._waiting / 2 and used < self._kv / 2
        self._low_since_s = None if not low else self._low_since_s if self._low_since_s is not None else now_s
        if over:
            return pool.wanted + (running >= pool.wanted)
        if self._low_since_s is not None and now_s - self._low_since_s >= self.delay_s:
            self._low_since_s = now_s
            return pool.wanted - 1
        return pool.wanted


def _usage(pool: PoolView) -> tuple[int, float, float]:
    """Return how many replicas run, and by replica the requests that wait and the share of the pool in use."""
    figures = pool.figures().values()
    waiting = sum(one.waiting for one in figures)
    used = sum(one.used_tokens / max(one.pool_tokens, 1.0) for one in figures)
    return len(figures), waiting / len(figures), used / len(figures)
