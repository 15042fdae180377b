"""TensorRT-LLM."""

from typing import Any

from serve_app.engine.protocol import EngineRequest
from serve_app.engine.remote.completions import CompletionsDialect
from serve_app.engine.remote.dialect import WorkerFacts


class TensorRtLlm(CompletionsDialect):
    """TensorRT-LLM."""

    owner = "tensorrt_llm"
    product = "TensorRT-LLM"
    blind = "TensorRT-LLM publishes no KV events in this form"

    def body(self, request: EngineRequest, facts: WorkerFacts, salt: str, bad_words: list[str]) -> dict[str, Any]:
        """See ``Dialect``. It refuses fields that it does not know."""
        body = {**super().body(request, facts, salt, bad_words), "detokenize": False}
        return {name: value for name, value in body.items() if facts.takes(name)}
