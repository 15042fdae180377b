"""vLLM as an engine. Only this room may import vllm, and only its engine, processors and connector do."""
