"""The policies that Serve's controller calls. They are pickled by value, so ``autoscaling.board`` keeps their state."""

from typing import Any

from ray.serve.config import AutoscalingContext

from serve_app.autoscaling.board import board_of


def ingress_policy(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Keep the number of ingresses, and store their reports for the replicas' policy."""
    board = board_of(ctx.app_name)
    return board.safely(ctx, board.hear_ingresses), {}


def worker_policy(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return a replica for each worker. None is stopped: a replica whose worker left waits for another one."""
    board = board_of(ctx.app_name, ctx.deployment_name)
    return board.safely(ctx, board.seats), {}


def replica_policy(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the target number of replicas."""
    board = board_of(ctx.app_name, ctx.deployment_name)
    return board.safely(ctx, board.target), {}
