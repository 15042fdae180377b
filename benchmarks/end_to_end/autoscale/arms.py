"""Who competes: settings of the application, and what decides how many replicas there are.

Arms of one kind change their number when the scenario says so, the others by a rule of their own. Knows no cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RULE = "benchmarks.end_to_end.autoscale.threshold_rule:ThresholdRule"
MIN_REPLICAS, MAX_REPLICAS = 2, 5
UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 5.0, 30.0
"""Of every rule alike, so that minutes show what an hour would: Serve's own are 30 and 600 s, an HPA's 0 and 300 s."""


@dataclass(frozen=True, slots=True)
class Arm:
    """``settings``: of warmpath; ``replicas``: Serve's options of the replicas' deployment; ``rule``: what scales it.

    Without a rule the scenario says how many replicas there are.
    """

    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    replicas: Mapping[str, Any] = field(default_factory=dict)
    rule: str = ""


def _serve(**options: Any) -> dict[str, Any]:
    bounds = {"min_replicas": MIN_REPLICAS, "max_replicas": MAX_REPLICAS}
    return {"autoscaling_config": {**bounds, **options}}


_SERVE_DEFAULT = _serve(upscale_delay_s=UPSCALE_DELAY_S, downscale_delay_s=DOWNSCALE_DELAY_S)
_THRESHOLD = _serve(
    upscale_delay_s=0.0,
    downscale_delay_s=0.0,
    metrics_interval_s=1.0,
    look_back_period_s=5.0,
    policy={"policy_function": RULE},
)
_OURS = {
    "autoscaling": {
        "min_replicas": MIN_REPLICAS,
        "max_replicas": MAX_REPLICAS,
        "target_ttft_s": 1.0,
        "upscale_delay_s": UPSCALE_DELAY_S,
        "downscale_delay_s": DOWNSCALE_DELAY_S,
    }
}

ARMS = {
    "ours": Arm("pre-warm and hand-over"),
    "no_prewarm": Arm("no pre-warm", {"prewarm": False}),
    "no_handover": Arm("no hand-over", {"handover": False}),
    "neither": Arm("neither", {"prewarm": False, "handover": False}),
    "power_of_two": Arm("power of two, neither", {"policy": "power_of_two", "prewarm": False, "handover": False}),
    "autoscaling": Arm("our rule", _OURS, rule="ours"),
    "threshold": Arm("queue > 3 or KV > 0.8, our router", replicas=_THRESHOLD, rule="threshold"),
    "serve_default": Arm("Serve's rule, our router", replicas=_SERVE_DEFAULT, rule="serve"),
    "serve_power_of_two": Arm(
        "Serve's rule, power of two", {"policy": "power_of_two"}, replicas=_SERVE_DEFAULT, rule="serve"
    ),
}
"""By the name on the command line."""
