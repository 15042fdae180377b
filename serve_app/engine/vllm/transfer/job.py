"""What a request of one token asks of the connector beside its prompt: plain data, and where it lies in the message.

Imports no vllm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

MODULE = "serve_app.engine.vllm.transfer.connector"
"""Where vLLM finds the connector."""

LAYOUT_FILE = "kv_layout.json"


class Job(msgspec.Struct, frozen=True):
    """``kind``, of the prompt's blocks ``first`` to ``end`` - 1. ``file``: their rows.

    "pin": keep them in the pool, under the name ``file``, until "unpin" names it.
    """

    kind: Literal["export", "import", "pin", "unpin"]
    file: str
    first: int
    end: int

    def to_extra_args(self) -> dict[str, Any]:
        """Return it as ``SamplingParams.extra_args`` carry it."""
        return {"kv_transfer_params": {"warmpath": msgspec.to_builtins(self)}}

    @classmethod
    def of_params(cls, params: Mapping[str, Any] | None) -> Job | None:
        """Return the job of a request's ``kv_transfer_params``; None for one that is there for its tokens."""
        packed = (params or {}).get("warmpath")
        return None if packed is None else msgspec.convert(packed, cls)


class Layout(msgspec.Struct, frozen=True):
    """How the worker's blocks are made; what of it is not equal elsewhere makes KV unusable there."""

    vllm: str
    cpu: str
    dtype: str
    shape: tuple[int, ...]
    layers: tuple[str, ...]
