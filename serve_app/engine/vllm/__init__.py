"""vLLM as an engine. Only this package may import vllm, and only its engine, processors and connector do."""
