"""What of a request vLLM has no counterpart of, refused with a sentence. Settings are refused at the start."""

from __future__ import annotations

from serve_app.engine.protocol import EngineRequest


def refuse_unmapped(request: EngineRequest) -> None:
    """Raise ValueError for what vLLM has no counterpart of."""
    if request.scope.public_blocks:
        raise ValueError("public prompts are not available with engine=vllm")
    if not request.store_kv:
        raise ValueError("with engine=vllm every request's KV stays in the cache; leave store_kv out")
