"""Servers that already run, as an engine: vLLM's, SGLang's or TensorRT-LLM's, one for each replica."""
