"""vLLM's hook for logits: hands its rows to ``RowSampler``. vLLM's worker imports it by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from serve_app.engine.vllm.arguments import end_token_ids
from serve_app.engine.vllm.lora_on_cpu import spare_base_rows
from serve_app.engine.vllm.sampling.row_sampler import Row, RowSampler
from serve_app.engine.vllm.sampling.token_choice import TokenChoice
from serve_app.structured.compiler import GrammarCompiler
from serve_app.structured.matcher import Matchers


class WarmpathSampling(LogitsProcessor):  # type: ignore[misc]
    """Chooses tokens as the built-in engine does, for vLLM's model runner V1. Requests are greedy to vLLM."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        model = vllm_config.model_config
        compiler = GrammarCompiler(Path(model.model), model.get_vocab_size(), end_token_ids(vllm_config))
        self._sampler = RowSampler(Matchers(compiler))
        if device.type == "cpu":
            spare_base_rows()

    def is_argmax_invariant(self) -> bool:
        """No: it decides which token is the likeliest."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow requests that join, leave, or move in the batch."""
        process_dict_updates(self._sampler.rows, batch_update, self._new_row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave one token in each row that has a choice."""
        return self._sampler.apply(logits)

    def _new_row(self, params: Any, prompt: list[int] | None, output: list[int]) -> Row | None:
        choice = TokenChoice.from_extra_args(params.extra_args)
        return None if choice is None else self._sampler.new_row(choice, prompt or (), output)
