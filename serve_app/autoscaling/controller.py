"""The policies that Serve's controller calls, pickled by value: what has to be kept is in ``autoscaling.board``."""

from typing import Any

from ray.serve.config import AutoscalingContext

from serve_app.autoscaling.board import board_of


def ingress_policy(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Of the ingresses: their number stays, and what they report is put up for the replicas' policy."""
    board = board_of(ctx.app_name)
    return board.safely(ctx, board.hear_ingresses), {}


def replica_policy(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Of the replicas."""
    board = board_of(ctx.app_name)
    return board.safely(ctx, board.target), {}
