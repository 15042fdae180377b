"""vLLM."""

from serve_app.engine.remote.completions import CompletionsDialect
from serve_app.engine.remote.dialect import WorkerFacts


class Vllm(CompletionsDialect):
    """vLLM."""

    owner = "vllm"
    product = "vLLM"
    takes_priority = True
    cached_tokens_option = "--enable-prompt-tokens-details"

    def takes_salt(self, facts: WorkerFacts) -> bool:
        """See ``Dialect``."""
        return facts.takes("cache_salt")
