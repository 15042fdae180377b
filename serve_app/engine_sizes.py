"""How long a request may be: the deployment's setting against the model's own bound.

Needs no torch, so that an ingress can ask. Knows nothing of pools.
"""

from __future__ import annotations

from serve_app.checkpoint import CheckpointInfo
from serve_app.config import AppConfig


def max_model_len(config: AppConfig, info: CheckpointInfo) -> int:
    """Return the tokens that prompt plus output may have. Raises ValueError when more is asked than the model has."""
    if config.max_model_len is None:
        return info.max_model_len
    if config.max_model_len > info.max_model_len:
        raise ValueError(
            f"max_model_len={config.max_model_len} is more than the {info.max_model_len} positions of {config.model}"
        )
    return config.max_model_len
