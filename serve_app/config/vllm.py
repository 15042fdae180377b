"""What is to be known of `engine: vllm` before a replica starts: whether vLLM is here, and which blocks it has."""

from __future__ import annotations

import importlib.util

CPU_BLOCK_SIZE = 32
"""What `block_size` is by default where vLLM has no GPU: there it computes in multiples of this."""

MISSING = (
    "engine=vllm needs vLLM 0.32 in the environment of the replicas: on a GPU run `pip install '.[vllm]'` in a clone; "
    "on a CPU run `make venv-vllm`, then start with .venv-vllm/bin/warmpath"
)


def vllm_missing() -> bool:
    """Whether vLLM is not installed here."""
    return importlib.util.find_spec("vllm") is None
