"""Who competes: settings of the application, and what in Serve decides the number of replicas. Knows no cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_app.config.app import AutoscalingConfig
from serve_app.replay.rules import DOWNSCALE_DELAY_S, LOOK_BACK_S, UPSCALE_DELAY_S
from serve_app.replay.search import FIXED, LLMD, OURS, RAY_TTFT, SERVE

RULE = "benchmarks.end_to_end.autoscale.measured_rule:MeasuredRule"
ARMS = (OURS, SERVE, RAY_TTFT, LLMD, FIXED)
MOST_COMPRESSED = 60.0
"""Delays are divided by no more: of ours, the shortest ``downscale_delay_s`` that is allowed is 10 s."""
LEAST_INTERVAL_S = 0.5
"""Between two reports of handles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What all arms have. ``compressed``: what every rule's delays are divided by; ``ongoing``: Serve's target."""

    least: int
    most: int
    fixed: int
    target_ttft_s: float
    compressed: float
    ongoing: float


@dataclass(frozen=True, slots=True)
class ScalingArm:
    """``settings``: of warmpath; ``replicas``: Serve's options of the replicas' deployment."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    replicas: Mapping[str, Any] = field(default_factory=dict)


def arm_of(name: str, contest: Contest, times: Path) -> ScalingArm:
    """Return an arm by its name. ``times``: the file of measured times."""
    bounds = {"min_replicas": contest.least, "max_replicas": contest.most}
    usual = AutoscalingConfig.model_fields
    if name == OURS:
        delays = {
            delay: usual[delay].default / contest.compressed for delay in ("upscale_delay_s", "downscale_delay_s")
        }
        return ScalingArm({"autoscaling": {**bounds, **delays, "target_ttft_s": contest.target_ttft_s}})
    if name == FIXED:
        return ScalingArm({"replicas": contest.fixed})
    options: dict[str, Any] = {**bounds, "metrics_interval_s": LEAST_INTERVAL_S}
    if name == SERVE:
        options |= {
            "target_ongoing_requests": contest.ongoing,
            "upscale_delay_s": UPSCALE_DELAY_S / contest.compressed,
            "downscale_delay_s": DOWNSCALE_DELAY_S / contest.compressed,
            "look_back_period_s": max(LOOK_BACK_S / contest.compressed, 2 * LEAST_INTERVAL_S),
        }
    else:  # with delays of its own
        rule = {**bounds, "rule": name, "times": str(times), "compressed": contest.compressed}
        rule["target_ttft_s"] = contest.target_ttft_s
        policy = {"policy_function": RULE, "policy_kwargs": rule}
        options |= {"upscale_delay_s": 0.0, "downscale_delay_s": 0.0, "look_back_period_s": 5.0, "policy": policy}
    return ScalingArm({"replicas": contest.least}, {"autoscaling_config": options})
