"""vLLM's V1 runner: what it lacks for this project's requests, and ``exact_resume``. vLLM's worker imports it by name.

Its V2 runner needs none of this: it takes a request with output, draws by (seed, position), and has all parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from itertools import islice
from typing import Any

import torch
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessor, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    process_dict_updates,
)
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from serve_app.engine.runner.sampling import choose_tokens
from serve_app.engine.sampling_params import SamplingParams
from serve_app.engine.vllm.sampling.params import ExtraArgs, own_sampling

_LIKELIEST = SamplingParams(1, temperature=0.0)
_ODD = 0x9E3779B97F4A7C15


class SamplingExtension:
    """An extension of vLLM's worker. ``worker_extension_cls`` names this class."""

    model_runner: Any
    vllm_config: Any

    def begin_sampling(self, exact: bool) -> list[tuple[int, int | None]]:
        """Complete the V1 runner, once, before the first request. ``exact``: draw each token by (seed, position).

        Returns the block size of each group of layers, and its window if it has one; 0 for a state.
        """
        self._complete(exact)
        specs = [group.kv_cache_spec for group in self.model_runner.kv_cache_config.kv_cache_groups]
        return [(spec.block_size, _window(spec)) for spec in specs]

    def _complete(self, exact: bool) -> None:
        runner = self.model_runner
        if runner.device.type == "cpu":
            spare_base_rows()
        drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        if isinstance(model := getattr(drafter, "model", None), torch.nn.Module):
            without_adapters(model)
        if self.vllm_config.use_v2_model_runner:
            return
        gpu_model_runner.CachedRequestState = ResumedRequest
        batch, drafts = runner.input_batch, self.vllm_config.speculative_config is not None
        processors = list(batch.logitsprocs.all)
        if drafts:  # vLLM leaves these out beside drafts
            beside = (LogitBiasLogitsProcessor, MinPLogitsProcessor)
            processors += [kind(self.vllm_config, runner.device, runner.device.type == "cuda") for kind in beside]
        rows: dict[int, BatchRow] | None = None
        if exact:
            processors.append(followed := BatchRows())
            rows = followed.rows
            batch.logitsprocs_need_output_token_ids = True
        batch.logitsprocs = LogitsProcessors(processors)
        runner.sampler = RowSampler(runner.sampler, rows)
        if drafts:
            runner.rejection_sampler = DraftSampler(runner.sampler, self.vllm_config.speculative_config, runner.device)


def _window(spec: Any) -> int | None:
    return 0 if isinstance(spec, MambaSpec) else getattr(spec, "sliding_window", None)


class ResumedRequest(CachedRequestState):  # type: ignore[misc]
    """A request in the runner: the prompt's resumed tokens are output, and a seed begins another sequence of numbers.

    That sequence depends on the seed and the number of tokens.
    """

    prompt_token_ids: list[int]
    generator: torch.Generator | None

    def __post_init__(self) -> None:
        resumed = ExtraArgs.of(self.sampling_params).resumed_tokens
        if resumed:
            ids = self.prompt_token_ids
            self.prompt_token_ids, self.output_token_ids = ids[:-resumed], ids[-resumed:]
        if self.generator is not None and (resumed or self.generator.device.type == "cpu"):
            if self.generator.device.type == "cpu":
                self.generator = CpuGenerator()
            self.generator.manual_seed((self.sampling_params.seed + resumed * _ODD) % (1 << 63))
        super().__post_init__()


class CpuGenerator(torch.Generator):
    """A generator of a CPU, which has no offset.

    vLLM takes back the number that a part of a prompt drew, and stops for good if it cannot. Nothing else was drawn
    then, unless the request was preempted.
    """

    def get_offset(self) -> int:
        """Return any number."""
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Begin anew."""
        return self.manual_seed(self.initial_seed())


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A request in the batch. ``biases``: [ids], [addends]; ``output``: vLLM's own list of the answer's tokens.

    ``min_tokens``: of the answer before one of the ``stops``.
    """

    params: SamplingParams
    biases: tuple[torch.Tensor, torch.Tensor]
    prompt_tokens: int
    output: Sequence[int]
    min_tokens: int
    stops: list[int]

    @property
    def position(self) -> int:
        """Position of the next token."""
        return self.prompt_tokens + len(self.output)


class BatchRows(LogitsProcessor):  # type: ignore[misc]
    """Tracks which request is in which row of vLLM's batch; changes no logits."""

    def __init__(self) -> None:
        self.rows: dict[int, BatchRow] = {}

    def is_argmax_invariant(self) -> bool:
        """Return True: it changes nothing."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Follow requests that join, leave, or move in the batch."""
        process_dict_updates(self.rows, batch_update, self._new_row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits unchanged."""
        return logits

    def _new_row(self, params: Any, prompt: list[int] | None, output: list[int]) -> BatchRow:
        bias = params.logit_bias or {}
        biases = torch.tensor(list(bias), dtype=torch.int64), torch.tensor(list(bias.values()), dtype=torch.float32)
        stops = list(params.stop_token_ids or ())
        return BatchRow(own_sampling(params), biases, len(prompt or ()), output, params.min_tokens, stops)


class RowSampler(Sampler):  # type: ignore[misc]
    """vLLM's sampler, with logprobs for all rows; with ``rows`` each one's token is drawn by (seed, position)."""

    def __init__(self, replaced: Any, rows: Mapping[int, BatchRow] | None) -> None:
        super().__init__(replaced.logprobs_mode, replaced.use_fp64_gumbel)
        self.rows = rows

    def sample(
        self, logits: torch.Tensor, sampling_metadata: Any, logprobs_mode_override: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return each row's token, [n]."""
        if self.rows is None:
            chosen: tuple[torch.Tensor, torch.Tensor | None] = super().sample(
                logits, sampling_metadata, logprobs_mode_override
            )
            return chosen
        tokens = self.draw(logits, [(self.rows.get(i), 0) for i in range(len(logits))])
        return torch.tensor(tokens, device=logits.device), None

    def draw(self, logits: torch.Tensor, places: Sequence[tuple[BatchRow | None, int]]) -> list[int]:
        """Return each row's token; ``places``: (request, number of drafts before the token). Without numbers: 0."""
        params = [_LIKELIEST if row is None else row.params for row, _ in places]
        tokens = choose_tokens(logits, params, [row.position + ahead if row else 0 for row, ahead in places])
        return [token or 0 for token in tokens]

    def gather_specific_token_logprobs(
        self, logprobs: torch.Tensor, logprob_token_ids: Mapping[int, Sequence[int]], sampled: torch.Tensor
    ) -> Any:
        """Return the log-probabilities [n, most + 1] of each row's token, and of the tokens listed for the row.

        Other rows have the likeliest tokens: vLLM's own method leaves them none. ``sampled`` [n], int64.
        """
        most = min(max([_MOST_LOGPROBS, *map(len, logprob_token_ids.values())]), logprobs.shape[-1])
        gathered = self.gather_logprobs(logprobs, most, token_ids=sampled)
        for at, listed in logprob_token_ids.items():
            ids = torch.tensor(listed, device=logprobs.device)
            gathered.logprob_token_ids[at, 1 : len(ids) + 1] = ids
            gathered.logprobs[at, 1 : len(ids) + 1] = logprobs[at, ids]
        return gathered


_MOST_LOGPROBS = 20
"""The limit of OpenAI's API."""


class DraftSampler(RejectionSampler):  # type: ignore[misc]
    """vLLM's verification of drafts, with listed logprobs; exact: a draft counts if it is the token drawn there."""

    def forward(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> SamplerOutput:
        """Return tokens [requests, most drafts + 1], padded with placeholders at the end, and their logprobs."""
        listed, exact = sampling_metadata.logprob_token_ids or {}, self.sampler.rows is not None
        if not exact and not listed:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        own = logits.to(torch.float32, copy=True)
        if exact:
            tokens = self._drawn(metadata, logits.float(), sampling_metadata)
        else:
            untold = replace(sampling_metadata, logprob_token_ids=None, max_num_logprobs=None)
            tokens = super().forward(metadata, draft_probs, logits, untold).sampled_token_ids
        gathered = None
        if listed or sampling_metadata.max_num_logprobs is not None:
            width, counts = tokens.shape[1], metadata.num_draft_tokens
            starts = metadata.bonus_logits_indices - torch.tensor(counts, device=logits.device)
            places = (starts[:, None] + torch.arange(width, device=logits.device)).clamp_(max=len(logits) - 1).flatten()
            by_place = {row * width + at: ids for row, ids in listed.items() for at in range(width)}
            sampled = tokens.clamp(min=0).long().flatten()
            logprobs = self.sampler.compute_logprobs(own)[places]
            gathered = self.sampler.gather_specific_token_logprobs(logprobs, by_place, sampled)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=gathered)

    def _drawn(self, metadata: Any, logits: torch.Tensor, sampling_metadata: Any) -> torch.Tensor:
        """Return each request's drafts as long as they equal the drawn tokens, and one token more.

        ``logits``: a request's row and one after each of its drafts, then the next request's.
        """
        counts, rows = metadata.num_draft_tokens, self.sampler.rows
        targets, bonus = metadata.target_logits_indices, metadata.bonus_logits_indices
        others = [one for one in sampling_metadata.logitsprocs.all if not isinstance(one, MinTokensLogitsProcessor)]
        unlimited = replace(sampling_metadata, logitsprocs=LogitsProcessors(others))
        after = self.sampler.apply_logits_processors(logits[bonus], unlimited, True)
        for i, count in enumerate(counts):  # vLLM's limit would not count the drafts
            if (row := rows.get(i)) is not None and len(row.output) + count < row.min_tokens:
                after[i, row.stops] = float("-inf")
        logits[targets] = self.apply_logits_processors(logits[targets], sampling_metadata, metadata)
        at = 0
        for i, count in enumerate(counts):  # vLLM knows no biases here
            if (row := rows.get(i)) is not None and len(row.biases[0]):
                ids, addends = (value.to(logits.device) for value in row.biases)
                logits[at : at + count, ids] += addends
            at += count + 1
        logits[bonus] = after
        places = [(rows.get(i), ahead) for i, count in enumerate(counts) for ahead in range(count + 1)]
        chosen = iter(self.sampler.draw(logits, places))
        drafts, answers = iter(metadata.draft_token_ids.tolist()), []
        for count in counts:
            drawn, guessed = list(islice(chosen, count + 1)), list(islice(drafts, count))
            same = next((n for n, draft in enumerate(guessed) if drawn[n] != draft), count)
            answers.append(drawn[: same + 1] + [PLACEHOLDER_TOKEN_ID] * (metadata.max_spec_len - same))
        return torch.tensor(answers, dtype=torch.int32, device=logits.device)


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
