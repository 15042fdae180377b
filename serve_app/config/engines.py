"""The engines that there are: an entry each here and in `replica/engine_factory.py`, and a room of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

EngineName = Literal["torch", "vllm", "simulated"]

VLLM_CPU_BLOCK_SIZE = 32
"""What `block_size` is by default where vLLM has no GPU: there it computes in multiples of this."""

VLLM_MISSING = (
    "engine=vllm needs vLLM 0.32 in the environment of the replicas: on a GPU run `pip install '.[vllm]'` in a clone; "
    "on a CPU run `make venv-vllm`, then start with .venv-vllm/bin/warmpath"
)


def vllm_missing() -> bool:
    """Whether vLLM is not installed here."""
    return importlib.util.find_spec("vllm") is None


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What other settings and the command line ask of an engine.

    ``simulated``: no model runs. ``built_in``: it loads models by transformers, and drafts. ``missing``: why it cannot
    be used in this environment, "" where it can. ``defaults``, and ``cpu_defaults`` without GPUs: values of settings
    that nobody gave, where they are not everybody's.
    """

    simulated: bool = False
    built_in: bool = False
    missing: Callable[[], str] = str
    defaults: dict[str, Any] = field(default_factory=dict)
    cpu_defaults: dict[str, Any] = field(default_factory=dict)


ENGINES: dict[EngineName, EngineTraits] = {
    "torch": EngineTraits(built_in=True),
    "vllm": EngineTraits(
        missing=lambda: VLLM_MISSING if vllm_missing() else "",
        defaults={"kv_pull": False, "prewarm": False, "handover": False, "pin_budget": 0.0},
        cpu_defaults={"block_size": VLLM_CPU_BLOCK_SIZE},
    ),
    "simulated": EngineTraits(simulated=True),
}
