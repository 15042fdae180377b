"""Limits of a deployment, from its settings and its model."""

from serve_app.checkpoints.checkpoint import CheckpointInfo
from serve_app.config.app import AppConfig


def pin_budget_blocks(config: AppConfig, num_blocks: int) -> int:
    """Return the blocks that saves may keep. Raises ValueError when they leave no blocks for requests."""
    budget = config.pin_budget * num_blocks if config.pin_budget < 1 else config.pin_budget
    if int(budget) >= num_blocks:
        raise ValueError(f"pin_budget={config.pin_budget:g} leaves nothing of {num_blocks} blocks for requests")
    return int(budget)


def max_model_len(config: AppConfig, info: CheckpointInfo) -> int:
    """Return the maximum tokens of prompt plus output. Raises ValueError for more than the model's positions."""
    given = config.hf_overrides.get("max_position_embeddings")
    positions = given if isinstance(given, int) else info.max_model_len
    if config.max_model_len is None:
        return positions
    if config.max_model_len > positions:
        raise ValueError(
            f"max_model_len={config.max_model_len} is more than the {positions} positions of {config.model}"
        )
    return config.max_model_len
