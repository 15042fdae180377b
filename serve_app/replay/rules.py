"""Rules of autoscaling that contend in a replay: ours, which is the controller's own code, and others' as they tell it.

Each sees the same figures of a pool. ``SCALING_RULES`` has them by the name on the command line.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from math import ceil

import numpy as np

from router.protocol.autoscaling import IngressFigures
from serve_app.autoscaling.policy import CONTROL_PERIOD_S, ScalingDecision, State, decide
from serve_app.autoscaling.signals import signals
from serve_app.config.app import AutoscalingConfig
from serve_app.replay.cluster import PoolLoad, PoolView

METRICS_S = 5.0
"""Between two looks of the other rules: Serve's and Prometheus' figures are some seconds old."""
UPSCALE_DELAY_S, DOWNSCALE_DELAY_S, LOOK_BACK_S = 30.0, 600.0, 30.0
"""Ray Serve's defaults. Source: ray 2.60, serve/config.py."""
TTFT_WINDOW_S = 60.0
IDLE_REQUESTS = 1.0
"""Ray's TTFT rule stops a replica only below so many requests a replica. Source: ray.serve.llm.autoscaling, 2026-11."""
LLMD_UP, LLMD_DOWN, LLMD_TPOT_S = 0.55, 0.40, 0.1
"""llm-d 0.10: replicas rise over, and fall under, these parts of the targets; its guide's target of a token."""
HPA_DOWN_S = 300.0
"""A HorizontalPodAutoscaler falls to the most that was wanted during this time. Source: kubernetes.io."""


@dataclass(frozen=True, slots=True)
class ScaleBounds:
    """The replicas that a rule may ask for, and the target of its TTFT."""

    least: int
    most: int
    target_ttft_s: float

    def within(self, wanted: int) -> int:
        """Return the nearest number that is allowed."""
        return min(max(wanted, self.least), self.most)


class OurRule:
    """The decision of Serve's controller, from what replicas and ingresses would report."""

    period_s = CONTROL_PERIOD_S

    def __init__(self, settings: AutoscalingConfig) -> None:
        self.settings = settings
        self.decisions: list[tuple[float, ScalingDecision]] = []
        self._state: State | None = None

    def target(self, pool: PoolView, now_s: float) -> int:
        """Return the controller's decision."""
        times, working_set_tokens = pool.demand(now_s)
        ingress = IngressFigures(
            waiting_requests=pool.waiting_without_replica(),
            working_set_tokens=working_set_tokens,
            **asdict(times),
            **self.settings.model_dump(),
        )
        figures = {name: (0.0, each) for name, each in pool.figures(now_s).items()}
        seen = signals(pool.wanted, list(figures), figures, [(0.0, ingress)])
        decision, self._state = decide(self._state, seen, now_s)
        if decision.target != pool.wanted:
            self.decisions.append((now_s, decision))
        return decision.target


class _Delays:
    """Serve's delays: a change has to be wanted without a break, and the last wish counts."""

    def __init__(self) -> None:
        self._up_since_s = self._down_since_s = -1.0

    def after(self, wanted: int, now: int, now_s: float) -> int:
        """Return the number that is due."""
        self._up_since_s = (self._up_since_s if self._up_since_s >= 0.0 else now_s) if wanted > now else -1.0
        self._down_since_s = (self._down_since_s if self._down_since_s >= 0.0 else now_s) if wanted < now else -1.0
        if wanted > now and (now_s - self._up_since_s >= UPSCALE_DELAY_S or not now):
            self._up_since_s = -1.0
            return wanted
        if wanted < now and now_s - self._down_since_s >= DOWNSCALE_DELAY_S:
            self._down_since_s = -1.0
            return wanted
        return now


class ServeRule:
    """Ray Serve's own: ongoing requests over a target for each replica, as a mean of 30 s.

    Source: ray 2.60, serve/autoscaling_policy.py.
    """

    period_s = METRICS_S

    def __init__(self, bounds: ScaleBounds, target_ongoing_requests: float) -> None:
        self._bounds, self._target = bounds, target_ongoing_requests
        self._ongoing: deque[int] = deque(maxlen=int(LOOK_BACK_S / METRICS_S))
        self._delays = _Delays()

    def target(self, pool: PoolLoad, now_s: float) -> int:
        """Return Serve's number."""
        self._ongoing.append(pool.ongoing())
        wanted = ceil(sum(self._ongoing) / len(self._ongoing) / self._target)
        return self._delays.after(self._bounds.within(wanted), pool.wanted, now_s)


class RayTtftRule:
    """Ray Serve LLM's: one more while the p99 of a minute is over the target, one less only when nearly idle."""

    period_s = METRICS_S

    def __init__(self, bounds: ScaleBounds) -> None:
        self._bounds = bounds
        self._delays = _Delays()

    def target(self, pool: PoolLoad, now_s: float) -> int:
        """Return the number after its delays."""
        times = pool.recent_ttft_s(now_s, TTFT_WINDOW_S)
        p99_s = float(np.percentile(times, 99)) if times else 0.0
        now, running = pool.wanted, max(len(pool.figures(now_s)), 1)
        wanted = now
        if p99_s > self._bounds.target_ttft_s or (not now and pool.waiting_without_replica()):
            wanted = now + 1
        elif pool.ongoing() / running < IDLE_REQUESTS:
            wanted = now - 1
        return self._delays.after(self._bounds.within(wanted), now, now_s)


class LlmdRule:
    """llm-d's: the worse of p90 TTFT and p90 time of a token, over their targets, under a HorizontalPodAutoscaler."""

    period_s = 15.0

    def __init__(self, bounds: ScaleBounds, target_tpot_s: float = LLMD_TPOT_S) -> None:
        self._bounds, self._tpot_s = bounds, target_tpot_s
        self._wanted: deque[int] = deque(maxlen=int(HPA_DOWN_S / self.period_s))

    def target(self, pool: PoolLoad, now_s: float) -> int:
        """Return the number that the HorizontalPodAutoscaler asks for."""
        now = pool.wanted
        if not now:
            return self._bounds.within(1 if pool.waiting_without_replica() else 0)
        times, tokens = pool.recent_ttft_s(now_s, TTFT_WINDOW_S), pool.recent_tpot_s(now_s, TTFT_WINDOW_S)
        used = max(
            float(np.percentile(times, 90)) / self._bounds.target_ttft_s if times else 0.0,
            float(np.percentile(tokens, 90)) / self._tpot_s if tokens else 0.0,
        )
        wanted = now
        if used > LLMD_UP:
            wanted = min(ceil(now * used / LLMD_UP), max(now + 4, 2 * now))
        elif used < LLMD_DOWN:
            wanted = ceil(now * used / LLMD_DOWN)
        self._wanted.append(self._bounds.within(wanted))
        return self._wanted[-1] if wanted > now else min(now, max(self._wanted))


class FixedRule:
    """A number that never changes."""

    period_s = 600.0

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    def target(self, pool: PoolView, now_s: float) -> int:
        """Return it."""
        return self._replicas


class OracleRule:
    """A plan that was made with the whole file at hand: replicas by window, each started before it is needed."""

    def __init__(self, plan: list[int], window_s: float, start_s: float) -> None:
        self.period_s = min(window_s, 30.0)
        self._plan, self._window_s, self._start_s = plan, window_s, start_s

    def target(self, pool: PoolView, now_s: float) -> int:
        """Return the most that is needed from now until a replica that starts now would run."""
        first = int(now_s / self._window_s)
        last = int((now_s + self._start_s + self.period_s) / self._window_s)
        return max(self._plan[min(first, len(self._plan) - 1) : last + 1] or [self._plan[-1]])
