"""What an ingress may have under way at the replicas."""

from __future__ import annotations

from serve_app.config.app import AppConfig
from serve_app.ingress.services import places


def test_ingresses_divide_what_the_replicas_take() -> None:
    """Half as many as run may wait there, if so many may; replicas that are not there yet count, and new ones too."""
    config = AppConfig(replicas=2, max_num_seqs=64)
    assert places(config, 0) == places(config, 2) == 2 * 96
    assert places(config, 3) == 3 * 96
    assert places(config.model_copy(update={"ingress_replicas": 4}), 2) == 48
    assert places(config.model_copy(update={"max_waiting_requests": 8}), 2) == 2 * 72
    assert places(AppConfig(replicas=1, max_num_seqs=1, ingress_replicas=64), 1) == 1
