"""An ingress' figures for the autoscaling policy, and what the policy made of all figures, from the notice board."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from router.observe.demand import RecentTimes
from router.protocol.autoscaling import IngressFigures
from router.protocol.samples import Sample
from serve_app.config.app import AutoscalingConfig


def ingress_figures(
    demand: tuple[RecentTimes, int], waiting_requests: int, settings: AutoscalingConfig
) -> IngressFigures:
    """Return the figures. ``demand``: what ``RoutingCore.demand`` says."""
    times, working_set_tokens = demand
    return IngressFigures(
        waiting_requests=waiting_requests,
        working_set_tokens=working_set_tokens,
        **asdict(times),
        **settings.model_dump(),
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
