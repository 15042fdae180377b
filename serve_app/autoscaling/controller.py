"""The policies that Ray Serve's controller calls ten times a second; ``build_app`` names them by string.

A policy that raised would stop the controller's work for all applications, so nothing leaves here but a number. Serve
pickles this module by value: what has to be shared or kept is in ``serve_app.autoscaling.board``.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from typing import Any

from ray.serve.config import AutoscalingContext

from serve_app.autoscaling.board import Raw, board_of

_FAULT_EVERY_S = 60.0


class _Safe(ABC):
    """Calls ``_target`` and catches what it raises."""

    def __init__(self) -> None:
        self._next_fault_s = 0.0

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return how many replicas there should be; as many as now where that cannot be said."""
        try:
            return self._target(ctx), {}
        except Exception:
            now_s = time.monotonic()
            if now_s >= self._next_fault_s:
                self._next_fault_s = now_s + _FAULT_EVERY_S
                logging.getLogger("ray.serve").exception("autoscaling failed; the number of replicas stays")
            return ctx.target_num_replicas, {}

    @abstractmethod
    def _target(self, ctx: AutoscalingContext) -> int: ...


class IngressFiguresPolicy(_Safe):
    """Of the ingresses: their number stays, and what they report is put up for the replicas' policy."""

    def _target(self, ctx: AutoscalingContext) -> int:
        board_of(ctx.app_name).hear_ingresses(_newest(ctx))
        return int(ctx.target_num_replicas)


class ReplicaPolicy(_Safe):
    """Of the replicas."""

    def _target(self, ctx: AutoscalingContext) -> int:
        running = [replica.unique_id for replica in ctx.running_replicas]
        return board_of(ctx.app_name).target(ctx.target_num_replicas, running, _newest(ctx), time.monotonic())


def _newest(ctx: AutoscalingContext) -> Raw:
    return {
        name: {
            replica.unique_id: (series[-1].timestamp, series[-1].value) for replica, series in values.items() if series
        }
        for name, values in (ctx.raw_metrics or {}).items()
    }
