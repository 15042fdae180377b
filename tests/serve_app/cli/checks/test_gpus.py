"""GPUs that replicas get by default, by the number of GPUs."""

import re
from typing import Any

import pytest

from serve_app.cli.checks.machine import gpu_count, replica_gpus
from serve_app.config.app import AppConfig

TWO = {"engine": "vllm", "replicas": 2}


@pytest.mark.parametrize(
    ("settings", "gpus", "each"),
    [
        ({**TWO}, 0, 0),
        ({**TWO}, 2, 1),
        ({**TWO}, 8, 1),
        ({**TWO, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 8, 4),
        ({**TWO, "replica_num_gpus": 0.5}, 1, 0),
        ({**TWO, "replica_num_gpus": 0}, 1, 0),
        ({**TWO, "device": "cpu"}, 2, 0),
    ],
)
def test_each_rank_gets_one(settings: dict[str, Any], gpus: int, each: int) -> None:
    found, said = replica_gpus(AppConfig.model_validate(settings), lambda: gpus)
    assert found == each
    assert (said.state, str(gpus) in said.found) == ("ok", bool(each))


@pytest.mark.parametrize(
    ("settings", "gpus", "told"),
    [
        ({**TWO}, 1, "have 2 share one: --set replica_num_gpus=0.5 --set gpu_memory_utilization=0.45$"),
        ({"engine": "vllm", "replicas": 5}, 2, "have 3 share one: --set replica_num_gpus=0.33 "),
        ({**TWO, "tensor_parallel_size": 4}, 7, "2 replicas of 4 GPUs, and 7 .*: lower --replicas, or --tensor"),
    ],
)
def test_more_replicas_than_gpus_are_refused(settings: dict[str, Any], gpus: int, told: str) -> None:
    _, found = replica_gpus(AppConfig.model_validate(settings), lambda: gpus)
    assert found.state == "problem" and re.search(told, found.sentence)


def test_torch_is_asked_for_the_gpus() -> None:
    """A separate process sees as many GPUs as this one."""
    torch = pytest.importorskip("torch")
    assert gpu_count() == torch.cuda.device_count()
