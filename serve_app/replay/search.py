"""The cheapest settings of each rule of autoscaling that meet a target on recorded traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, sqrt
from typing import Any

import numpy as np

from serve_app.config.app import AutoscalingConfig
from serve_app.replay.cluster import ReplayCluster, Replayed, ScalingRule
from serve_app.replay.forked import forked
from serve_app.replay.outcome import attainment, figures_of
from serve_app.replay.prompts import ModelTraffic
from serve_app.replay.rules import (
    LLMD_TPOT_S,
    FixedRule,
    LlmdRule,
    OracleRule,
    OurRule,
    RayTtftRule,
    ScaleBounds,
    ServeRule,
)
from serve_app.replay.setup import Setup

RUNS = 10
"""Simulations a rule, to find its cheapest setting."""
FIRMEST = 0.1
"""The least part of the target that our rule is given; a stricter setting has more replicas at least."""
WINDOW_S = 120.0
"""The oracle plans by windows of so many seconds."""

OURS, SERVE, RAY_TTFT, LLMD, FIXED, ORACLE = "ours", "serve", "ray_ttft", "llmd", "fixed", "oracle"
SCALING_RULES = (OURS, SERVE, RAY_TTFT, LLMD, FIXED, ORACLE)


@dataclass(frozen=True, slots=True)
class ScalingGoal:
    """``part`` of all requests get their first token within ``ttft_s``, with ``least`` to ``most`` replicas.

    ``first``: replicas at the beginning; None: as many as are needed then, as if the cluster had run before.
    """

    ttft_s: float
    part: float
    least: int
    most: int
    first: int | None = None


@dataclass(frozen=True, slots=True)
class Tried:
    """One rule at one setting, and its run."""

    rule: str
    setting: float
    first: int
    figures: Mapping[str, Any]
    settings: Mapping[str, Any]
    result: Replayed


class Search:
    """Runs rules over one model's requests."""

    def __init__(self, prompts: ModelTraffic, setup: Setup, goal: ScalingGoal) -> None:
        self._prompts, self._setup, self.goal = prompts, setup, goal
        self._work: list[float] | None = None
        self._reachable = 0.0

    def rule(self, name: str, setting: float) -> tuple[ScalingRule, int]:
        """Return a rule at a setting, and the replicas it starts with: as many as it needs at the beginning."""
        goal = self.goal
        bounds = ScaleBounds(goal.least, goal.most, goal.ttft_s * (setting if name in (RAY_TTFT, LLMD) else 1.0))
        if (first := goal.first or 0) == 0:
            busy = self.work()[0]
            first = bounds.within(max(1, ceil(busy + sqrt(busy))))
        if name == OURS:
            settings = self.autoscaling(setting)
            return OurRule(settings), max(first, settings.min_replicas)
        if name == SERVE:
            return ServeRule(bounds, setting), first
        if name == RAY_TTFT:
            return RayTtftRule(bounds), first
        if name == LLMD:
            return LlmdRule(bounds, LLMD_TPOT_S * setting), first
        if name == FIXED:
            return FixedRule(bounds.within(round(setting))), bounds.within(round(setting))
        plan = [bounds.within(ceil(each + setting * sqrt(each))) for each in self.work()]
        return OracleRule(plan, WINDOW_S, self._setup.start_s), plan[0]

    def autoscaling(self, setting: float) -> AutoscalingConfig:
        """Return our rule's settings: for a part of the target, and below ``FIRMEST`` for more ``min_replicas``."""
        goal = self.goal
        more = round((goal.most - goal.least) * max(FIRMEST - setting, 0.0) / FIRMEST)
        return AutoscalingConfig(
            min_replicas=goal.least + more,
            max_replicas=goal.most,
            target_ttft_s=round(goal.ttft_s * max(setting, FIRMEST), 3),
        )

    def work(self) -> list[float]:
        """Return by window the replicas that are busy with prefill and answers while there are more than enough."""
        if self._work is None:
            rates, prompts = self._setup.rates, self._prompts
            setup = replace(self._setup, name="work", replicas=self.goal.most)
            result = ReplayCluster(prompts, setup).run()
            self._reachable = attainment(result, self.goal.ttft_s)
            windows = int(prompts.arrival_s[-1] // WINDOW_S) + 1 if len(prompts) else 1
            place = (prompts.arrival_s // WINDOW_S).astype(np.int64)
            prefill_s = (prompts.prompt_tokens - result.cached_tokens) / rates.prefill_tokens_per_s
            decode_s = prompts.output_tokens * (rates.decode_step_s / rates.max_num_seqs + rates.decode_each_s)
            busy = np.bincount(place, prefill_s + decode_s, minlength=windows) / WINDOW_S
            self._work = busy.tolist()
        return self._work

    def run(self, name: str, setting: float) -> Tried:
        """Simulate one rule at one setting."""
        rule, first = self.rule(name, setting)
        result = ReplayCluster(self._prompts, self._setup, rule, first=first).run()
        return Tried(
            name,
            setting,
            first,
            figures_of(self._prompts, result, self.goal.ttft_s),
            self.settings_of(name, setting),
            result,
        )

    def reachable(self) -> float:
        """Return the part of the requests within the target if there are always ``most`` replicas."""
        self.work()
        return self._reachable

    def settings_of(self, name: str, setting: float) -> dict[str, Any]:
        """Return what a settings file says for a rule; {} where no file can."""
        goal = self.goal
        if name == OURS:
            return {"autoscaling": self.autoscaling(setting).model_dump()}
        if name == FIXED:
            return {"replicas": round(setting)}
        bounds = {"min_replicas": goal.least, "max_replicas": goal.most}
        if name == SERVE:
            return {"autoscaling_config": {**bounds, "target_ongoing_requests": round(setting, 2)}}
        return {}

    def cheapest(self, name: str, progress: Callable[[int], object] = lambda _: None) -> list[Tried]:
        """Return the rule's runs, first the cheapest that meets the goal, or that which comes nearest."""
        low, high, falls = self._range(name)
        tried: list[Tried] = []

        def good(setting: float) -> bool:
            tried.append(self.run(name, setting))
            progress(len(tried))
            return bool(tried[-1].figures["within_target"] >= self.goal.part)

        # ``falls``: a larger setting means fewer replicas, so the largest good one is looked for; else the smallest.
        # The strictest one is tried last, and only where no other was good: it is rarely the cheapest.
        strict, loose = (low, high) if falls else (high, low)
        if good(loose):
            return tried
        met = False
        while len(tried) < RUNS - (not met):
            if name == FIXED and abs(strict - loose) <= 1.0:
                break
            middle = self._between(name, strict, loose)
            if good(middle):
                strict, met = middle, True
            else:
                loose = middle
        if not met:
            good(strict)
        return sorted(tried, key=self._rank)

    def _between(self, name: str, strict: float, loose: float) -> float:
        if name == FIXED:
            return round((strict + loose) / 2)
        if name == OURS and loose > FIRMEST:
            return FIRMEST if strict < FIRMEST else sqrt(strict * loose)
        return (strict + loose) / 2 if name == OURS else sqrt(max(strict, 1e-3) * max(loose, 1e-3))

    def _rank(self, one: Tried) -> tuple[float, float]:
        met = one.figures["within_target"] >= self.goal.part
        return (0.0, one.figures["replica_hours"]) if met else (1.0, -one.figures["within_target"])

    def _range(self, name: str) -> tuple[float, float, bool]:
        """Return the least and the largest setting, and whether a larger one means fewer replicas."""
        if name == OURS:
            return 0.0, 2.0, True
        if name == SERVE:
            return 1.0, float(self._setup.rates.max_num_seqs), True
        if name == RAY_TTFT:
            return 0.25, 8.0, True
        if name == LLMD:
            return 0.25, 8.0, True
        if name == FIXED:
            return float(max(self.goal.least, 1)), float(self.goal.most), False
        return 0.01, 6.0, False


def search(
    found: Search,
    rules: Sequence[str] = SCALING_RULES,
    told: Callable[[Sequence[int]], object] = lambda _: None,
    processes: int = 0,
) -> dict[str, list[Tried]]:
    """Return each rule's runs, the best first. ``told`` hears the number of runs of each rule."""
    found.work()
    calls = [partial(found.cheapest, name) for name in rules]
    return dict(zip(rules, forked(calls, told, processes), strict=True))
