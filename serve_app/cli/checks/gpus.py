"""Assigns this machine's GPUs to replicas of an engine that needs one GPU for each rank."""

import subprocess
import sys
from collections.abc import Callable

from serve_app.cli.supervisor import path_flags
from serve_app.config.app import AppConfig


def gpu_count() -> int:
    """Return the number of GPUs that torch finds, in a separate process; 0 on errors, which the engine reports."""
    command = [sys.executable, *path_flags(), "-c", "import torch; print(torch.cuda.device_count())"]
    told = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stdout  # noqa: S603
    return int(told) if told.strip().isdecimal() else 0


def replica_gpus(settings: AppConfig, gpu_count: Callable[[], int]) -> tuple[int, str]:
    """Return the number of GPUs for each replica (one for each rank), and a message; 0 if set or without GPUs.

    Raises ValueError if the replicas need more GPUs than there are.
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
