"""Make vLLM's model runner (V1) choose tokens with the built-in engine's code. vLLM's worker imports it by name."""

from collections.abc import Mapping, Sequence
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessor, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.sample.sampler import Sampler

from serve_app.engine.vllm.sampling.rows import SamplingRow, TokenChoice, choose_rows, late_checks
from serve_app.engine.vllm.settings import CONFIG_ENDS
from serve_app.structured.compiler import GrammarCompiler
from serve_app.structured.matcher import Matchers


class ChoosesByPosition:
    """An extension of vLLM's worker. ``worker_extension_cls`` names this class."""

    model_runner: Any
    vllm_config: Any

    def choose_by_position(self) -> None:
        """Replace vLLM's sampler with this project's, once, before the first request.

        A logits processor would not do: vLLM accepts none beside drafts, and applies none to drafts.
        """
        runner, batch = self.model_runner, self.model_runner.input_batch
        followed = BatchRows(self.vllm_config)
        batch.logitsprocs = LogitsProcessors([*batch.logitsprocs.all, followed])
        batch.logitsprocs_need_output_token_ids = True
        # Several ranks are processes apart from the scheduler, which could not settle what is checked late.
        late = runner.device.type == "cuda" and self.vllm_config.parallel_config.world_size == 1
        runner.sampler = PositionSampler(runner.sampler, followed.rows, late=late)
        if self.vllm_config.speculative_config is not None:
            runner.rejection_sampler = DraftVerifier(runner.sampler)
        if runner.device.type == "cpu":
            spare_base_rows()
        if isinstance(drafter := getattr(getattr(runner, "drafter", None), "model", None), torch.nn.Module):
            without_adapters(drafter)


class BatchRows(LogitsProcessor):  # type: ignore[misc]
    """Tracks which request is in which row of vLLM's batch; changes no logits."""

    def __init__(self, vllm_config: Any) -> None:
        model, end_token_ids = vllm_config.model_config, vllm_config.additional_config[CONFIG_ENDS]
        self._matchers = Matchers(GrammarCompiler(Path(model.model), model.get_vocab_size(), end_token_ids))
        self.rows: dict[int, SamplingRow] = {}

    def is_argmax_invariant(self) -> bool:
        """Return True: it changes nothing."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Follow requests that join, leave, or move in the batch."""
        process_dict_updates(self.rows, batch_update, self._new_row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits unchanged."""
        return logits

    def _new_row(self, params: Any, prompt: list[int] | None, output: list[int]) -> SamplingRow | None:
        choice = TokenChoice.from_extra_args(params.extra_args)
        return None if choice is None else SamplingRow(choice, prompt or (), output, self._matchers)


class PositionSampler(Sampler):  # type: ignore[misc]
    """vLLM's sampler with another choice of tokens; the logprobs are vLLM's.

    ``late``: a GPU is not waited for unless a row has rules, so that vLLM plans the next step meanwhile.
    """

    def __init__(self, replaced: Any, rows: dict[int, SamplingRow], *, late: bool = False) -> None:
        super().__init__(replaced.logprobs_mode, replaced.use_fp64_gumbel)
        self.rows = rows
        self._late = late

    def sample(
        self, logits: torch.Tensor, sampling_metadata: Any, logprobs_mode_override: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return each row's token, [n]."""
        if self._late and not any(row.ruled for row in self.rows.values()):
            return late_checks.choose(self.rows, logits), None
        chosen = choose_rows(self.rows, logits, [()] * len(logits))
        return torch.tensor([token for (token,) in chosen], device=logits.device), None

    def gather_specific_token_logprobs(
        self, logprobs: torch.Tensor, logprob_token_ids: Mapping[int, Sequence[int]], sampled: torch.Tensor
    ) -> Any:
        """Return the log-probabilities [n, most + 1] of each row's token, and of the tokens listed for the row.

        Other rows have the likeliest tokens: vLLM's own method leaves them none. ``sampled`` [n], int64.
        """
        asked = (row.choice.sampling.logprobs or 0 for row in self.rows.values())
        most = max([*asked, *map(len, logprob_token_ids.values())], default=0)
        told = self.gather_logprobs(logprobs, min(most, logprobs.shape[-1]), token_ids=sampled)
        for at, listed in logprob_token_ids.items():
            ids = torch.tensor(listed, device=logprobs.device)
            told.logprob_token_ids[at, 1 : len(ids) + 1] = ids
            told.logprobs[at, 1 : len(ids) + 1] = logprobs[at, ids]
        return told


class DraftVerifier(RejectionSampler):  # type: ignore[misc]
    """Accepts a draft if it is the token chosen at its position: drafts only change the number of steps."""

    def forward(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> SamplerOutput:
        """Return tokens [requests, most drafts + 1], padded with placeholders at the end; see ``choose_rows``."""
        logits = logits.float()
        listed, width = sampling_metadata.logprob_token_ids or {}, metadata.max_spec_len + 1
        wanted = listed or sampling_metadata.max_num_logprobs is not None
        logprobs = self.sampler.compute_logprobs(logits) if wanted else None
        drafts = iter(metadata.draft_token_ids.tolist())
        counts = metadata.num_draft_tokens
        chosen = choose_rows(self.sampler.rows, logits, [list(islice(drafts, count)) for count in counts])
        padded = [tokens + [PLACEHOLDER_TOKEN_ID] * (width - len(tokens)) for tokens in chosen]
        tokens = torch.tensor(padded, dtype=torch.int32, device=logits.device)
        told = None
        if logprobs is not None:
            starts = metadata.bonus_logits_indices - torch.tensor(counts, device=logits.device)
            places = (starts[:, None] + torch.arange(width, device=logits.device)).clamp_(max=len(logits) - 1).flatten()
            by_place = {row * width + at: ids for row, ids in listed.items() for at in range(width)}
            sampled = tokens.clamp(min=0).long().flatten()
            told = self.sampler.gather_specific_token_logprobs(logprobs[places], by_place, sampled)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=told)


def spare_base_rows() -> None:
    """Fix vLLM's LoRA kernels for CPUs: rows of the base model must get nothing from an adapter.

    Such rows have the index -1, which the kernels read as the last slot. So a request without an adapter, beside one
    with an adapter, silently gets the adapter of that slot, and leaves its KV in the cache. Here the first kernel
    writes 0 to such rows, and the second keeps them 0. Remove this once vLLM has the fix.
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


def without_adapters(drafter: torch.nn.Module) -> None:
    """Give a drafter the model's own layers where vLLM shares those with adapters: they do not fit its tokens."""
    for module in list(drafter.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, BaseLayerWithLoRA):
                setattr(module, name, layer.base_layer)
