"""warmpath's routing inside Ray Serve LLM: a server class and a request router class for an ``LLMConfig``.

Each is imported on access: the server needs ``ray[llm]``, and no module needs torch or vLLM.
"""

from importlib import import_module
from typing import Any

_HOMES = {"WarmLLMServer": "server", "WarmRouter": "router", "build_cache_app": "cache_app"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
