"""An ingress' figures for the autoscaling policy, and what the policy made of all figures, from the notice board."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.core import RoutingCore
from router.protocol.autoscaling import IngressFigures
from router.protocol.samples import Sample
from serve_app.config.autoscaling import AutoscalingConfig


def ingress_figures(core: RoutingCore, waiting_requests: int, settings: AutoscalingConfig) -> IngressFigures:
    """Return the figures as of now."""
    times, working_set_tokens = core.demand()
    return IngressFigures(
        requests=times.requests,
        p90_ttft_s=times.p90_ttft_s,
        p90_own_s=times.p90_own_s,
        mean_own_s=times.mean_own_s,
        waiting_requests=waiting_requests,
        working_set_tokens=working_set_tokens,
        min_replicas=settings.min_replicas,
        max_replicas=settings.max_replicas,
        target_ttft_s=settings.target_ttft_s,
        upscale_delay_s=settings.upscale_delay_s,
        downscale_delay_s=settings.downscale_delay_s,
    )


def autoscaling_samples(notices: Sequence[dict[str, Any]]) -> list[Sample]:
    """Return the latest decision as samples; none before the first. ``notices``: the newest first."""
    if not notices:
        return []
    reason = (("reason", str(notices[0]["reason"])),)
    return [
        ("warmpath_autoscaling_target_replicas", reason, float(notices[0]["target"])),
        ("warmpath_autoscaling_needed_replicas", reason, float(notices[0]["needed"])),
    ]
