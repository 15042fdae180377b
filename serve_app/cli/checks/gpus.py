"""The GPUs of this machine, given to the replicas of an engine whose ranks have one each."""

import subprocess
import sys
from collections.abc import Callable

from serve_app.cli.supervisor import path_flags
from serve_app.config.app import AppConfig


def gpu_count() -> int:
    """Return how many GPUs torch sees, in a process of its own; 0 where it fails, of which an engine's start tells."""
    command = [sys.executable, *path_flags(), "-c", "import torch; print(torch.cuda.device_count())"]
    told = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stdout  # noqa: S603
    return int(told) if told.strip().isdecimal() else 0


def replica_gpus(settings: AppConfig, gpu_count: Callable[[], int]) -> tuple[int, str]:
    """Return the GPUs that each replica reserves, one a rank, with words on it; 0 where it is set, or none is here.

    Raises ValueError where the replicas need more than there are.
    """
    if settings.device != "auto" or "replica_num_gpus" in settings.model_fields_set:
        return 0, ""
    gpus, ranks, replicas = gpu_count(), settings.ranks, settings.first_replicas
    if not gpus:
        return 0, "no GPU is seen here: vLLM computes on the CPU"
    if ranks * replicas > gpus:
        share = -(-replicas // gpus)
        shared = f"--set replica_num_gpus={100 // share / 100:g} --set gpu_memory_utilization={90 // share / 100:g}"
        others = "--tensor-parallel-size" if ranks > 1 else f"have {share} share one: {shared}"
        raise ValueError(f"{replicas} replicas of {ranks} GPUs, and {gpus} seen here: lower --replicas, or {others}")
    return ranks, f"{gpus} GPUs are seen here: each replica takes {ranks}"
