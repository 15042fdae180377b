"""vLLM's hook for logits: has its rows sampled by the built-in engine's code. vLLM's worker imports it by name."""

from functools import wraps
from pathlib import Path
from typing import Any

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from serve_app.engine.vllm.sampling.rows import Row, TokenChoice, sample_rows
from serve_app.engine.vllm.settings import CONFIG_ENDS
from serve_app.structured.compiler import GrammarCompiler
from serve_app.structured.matcher import Matchers


class WarmpathSampling(LogitsProcessor):  # type: ignore[misc]
    """Chooses tokens as the built-in engine does, for vLLM's model runner V1. Requests are greedy to vLLM."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        model, end_token_ids = vllm_config.model_config, vllm_config.additional_config[CONFIG_ENDS]
        self._matchers = Matchers(GrammarCompiler(Path(model.model), model.get_vocab_size(), end_token_ids))
        self._rows: dict[int, Row] = {}
        if device.type == "cpu":
            spare_base_rows()

    def is_argmax_invariant(self) -> bool:
        """No: it decides which token is the likeliest."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow requests that join, leave, or move in the batch."""
        process_dict_updates(self._rows, batch_update, self._new_row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave one token in each row that has a choice."""
        sample_rows(self._rows, logits)
        return logits

    def _new_row(self, params: Any, prompt: list[int] | None, output: list[int]) -> Row | None:
        choice = TokenChoice.from_extra_args(params.extra_args)
        return None if choice is None else Row(choice, prompt or (), output, self._matchers)


def spare_base_rows() -> None:
    """Mend vLLM's LoRA kernels for CPUs: rows of the base model get nothing of an adapter.

    Such rows have the index -1, which the kernels take for the last slot: a request without an adapter, beside one that
    has one, silently gets the adapter of that slot, and leaves its KV in the cache. Here the first of the two kernels
    leaves 0 in such rows, of which the second makes nothing. Goes when vLLM has it.
    Source: https://github.com/vllm-project/vllm/pull/48421
    """
    shrink = lora_ops.bgmv_shrink

    @wraps(shrink)
    def bgmv_shrink(
        inputs: Any, weights: Any, output: torch.Tensor, indices: torch.Tensor, scaling: float = 1.0
    ) -> None:
        shrink(inputs, weights, output, indices, scaling)
        output.masked_fill_((indices == -1).unsqueeze(1), 0.0)

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink
