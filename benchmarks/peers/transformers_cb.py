"""transformers' own continuous batching over the same checkpoint, in the same environment."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from benchmarks.peers.workload import Prompt, serve


class TransformersContinuousBatching:
    """`generate_batch` with a persistent manager, so that its prefix sharing can work between calls."""

    def __init__(self, workload: dict[str, Any]) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        torch.set_num_threads(workload["threads"])
        dtype = getattr(torch, workload["dtype"])
        device = workload["device"]
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if workload["load_format"] == "dummy":
            config = AutoConfig.from_pretrained(workload["model"], local_files_only=True)
            with torch.device(device):
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(workload["model"], dtype=dtype, local_files_only=True)
        self._model = model.to(device).eval()
        self._config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def generate(self, prompts: list[Prompt], max_tokens: int) -> None:
        """Answer all prompts in one call. Raises RuntimeError when one is missing or short."""
        answers = self._model.generate_batch(
            prompts, generation_config=self._config, max_new_tokens=max_tokens, persistent_manager=True
        )
        short = [len(answer.generated_tokens) for answer in answers.values()]
        if len(short) != len(prompts) or min(short) < max_tokens:
            raise RuntimeError(f"asked for {len(prompts)} x {max_tokens} tokens, got {sorted(short)}")


if __name__ == "__main__":
    serve(TransformersContinuousBatching, lambda: version("transformers"))
