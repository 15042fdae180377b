"""Run steps on an unmodified transformers causal language model: segments in, sampled tokens or failures out."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from serve_app.cache.kv_chain import KvFormat, KvPart, Row
from serve_app.engine.adapter_slots import LoadedAdapters
from serve_app.engine.attention.interface import IMPLEMENTATION
from serve_app.engine.attention.paging import KvPool, PagedStep, plan_step
from serve_app.engine.attention.supported import UnsupportedModel, refuse_unsupported, served_config
from serve_app.engine.lora.layers import AdapterWeights, LoraLayers, adaptable_layers, adapter_weights
from serve_app.engine.lora.peft_files import read_described
from serve_app.engine.protocol import AdapterSpec
from serve_app.engine.runner.kv_size import kv_shape
from serve_app.engine.runner.prompt_logprobs import LEAST_ROWS, HiddenStates, tell_prompts
from serve_app.engine.runner.sampling import choose_tokens
from serve_app.engine.runner.token_rules import apply_rules, token_logprobs
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import Segment


def kv_part(pool: torch.Tensor) -> KvPart:
    """Describe the content of a block of ``pool``."""
    layers, pair, _, *rest = pool.shape
    return KvPart(str(pool.dtype).removeprefix("torch."), (layers, pair, *rest))


def copy_out(pool: torch.Tensor, blocks: Sequence[int], rows: Sequence[Row]) -> None:
    """Fill each row with its block of the pool [layers, planes, blocks, ...]."""
    if pool.device.type == "cpu":
        raw = pool.view(torch.uint8).numpy()
        for block, row in zip(blocks, rows, strict=True):
            there = raw[:, :, block]
            row.reshape(there.shape)[...] = there
    else:
        for row, taken in zip(rows, gather_blocks(pool, blocks), strict=True):
            row[...] = taken


def copy_in(pool: torch.Tensor, blocks: Sequence[int], rows: Sequence[Row]) -> None:
    """Fill blocks of the pool from rows; mutates it."""
    if pool.device.type == "cpu":
        raw = pool.view(torch.uint8).numpy()
        for block, row in zip(blocks, rows, strict=True):
            there = raw[:, :, block]
            there[...] = row.reshape(there.shape)
    else:
        scatter_blocks(pool, blocks, rows)


def gather_blocks(pool: torch.Tensor, blocks: Sequence[int]) -> Row:
    """Return blocks of a pool on any device as bytes [len(blocks), bytes per block]."""
    gathered = pool.index_select(2, torch.tensor(blocks, device=pool.device)).movedim(2, 0)
    return gathered.contiguous().view(torch.uint8).view(len(blocks), -1).cpu().numpy()


def scatter_blocks(pool: torch.Tensor, blocks: Sequence[int], rows: Sequence[Row]) -> None:
    """Fill blocks of a pool on any device; mutates it."""
    layers, planes, _, *rest = pool.shape
    there = torch.from_numpy(np.stack(rows)).to(pool.device).view(pool.dtype).view(len(blocks), layers, planes, *rest)
    pool.index_copy_(2, torch.tensor(blocks, device=pool.device), there.movedim(0, 2))


_KERNELS_KEPT = "4096"
"""oneDNN keeps 1,024 compiled kernels by default, fewer than a ragged workload has shapes."""

_NO_NUMBERS = "the model's logits are not numbers"


def choose_device(name: str) -> torch.device:
    """Return the named device; "auto" is CUDA if available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the named dtype; "auto" is bfloat16 if the device multiplies it natively, else float32."""
    if name != "auto":
        named: torch.dtype = getattr(torch, name)
        return named
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def load_runner(model_path: str | Path, settings: EngineSettings) -> "ModelRunner":
    """Load a local checkpoint. Raises the errors of ``ModelRunner``."""
    # In a temporary thread: OpenMP workers left to the caller's thread would share the cores with the loop's, and
    # libgomp then puts every worker to sleep after each operation (a decode step takes 14 ms instead of 8).
    with ThreadPoolExecutor(max_workers=1) as loader:
        return loader.submit(ModelRunner, model_path, settings).result()


class ModelRunner:
    """A transformers model and its KV pool, with one packed forward per step."""

    kind = "torch"

    def __init__(self, model_path: str | Path, settings: EngineSettings) -> None:
        """Load a local checkpoint. Raises UnsupportedModel, or FileNotFoundError if config.json is missing."""
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _KERNELS_KEPT)
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)
        device = choose_device(settings.device)
        self.dtype = choose_dtype(settings.dtype, device)
        config: Any = served_config(Path(model_path))
        model = load_model(model_path, config, self.dtype, device)
        refuse_unsupported(config, model)
        self.model = model.eval()
        layers, kv_heads, head_dim = kv_shape(config)
        self.vocab_size = int(config.vocab_size)
        self.max_positions = int(config.max_position_embeddings)
        self.reads_in_place = device.type == "cpu"
        self.pool = KvPool(layers, settings.num_blocks, settings.block_size, kv_heads, head_dim, self.dtype, device)
        self.block_bytes = self.pool.tensor[:, :, 0].nbytes
        self.kv_format = KvFormat(settings.model_fingerprint, settings.block_size, (kv_part(self.pool.tensor),))
        self._linears = adaptable_layers(self.model)
        self._max_lora_rank = settings.max_lora_rank
        self.adapters: LoadedAdapters[AdapterWeights] = LoadedAdapters(
            self._load_adapter, max_loras=settings.max_loras, max_cpu_loras=settings.max_cpu_loras
        )
        self._lora = LoraLayers(self._linears, self.adapters, device)
        self._hidden = HiddenStates(self.model)
        self._rows_at_once = max(LEAST_ROWS, settings.max_num_seqs)

    def read_blocks(self, blocks: Sequence[int], rows: Sequence[Row]) -> None:
        """Copy each block's KV, [layers, 2, block_size, kv_heads, head_dim], into its row."""
        copy_out(self.pool.tensor, blocks, rows)

    def write_blocks(self, blocks: Sequence[int], rows: Sequence[Row]) -> None:
        """Copy rows into blocks: the inverse of ``read_blocks``."""
        copy_in(self.pool.tensor, blocks, rows)

    def _load_adapter(self, spec: AdapterSpec) -> AdapterWeights:
        file = read_described(spec)
        # In a temporary thread, like the model: OpenMP workers that stay would slow every later step.
        with ThreadPoolExecutor(max_workers=1) as loader:
            parsed = loader.submit(adapter_weights, file, self._linears, max_rank=self._max_lora_rank, dtype=self.dtype)
            return parsed.result()

    @torch.inference_mode()
    def forward(self, step: PagedStep) -> torch.Tensor:
        """Compute a step, write its KV, and return the float32 logits [len(step.logit_rows), vocab]."""
        output = self.model(
            input_ids=step.input_ids,
            position_ids=step.position_ids,
            use_cache=False,
            logits_to_keep=step.logit_rows,
            paged=step,
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    @torch.inference_mode()
    def execute(self, segments: Sequence[Segment]) -> None:
        """Compute one step and sample; a segment with logits that are not numbers fails alone."""
        step = plan_step(self.pool, segments, in_place=self.reads_in_place)
        self._lora.apply([segments[i] for i in step.order])
        targeted = any(segment.targets is not None for segment in segments)
        with self._hidden.kept() if targeted else nullcontext():
            logits = self.forward(step)
        if sampled := [segments[i] for i in step.order if segments[i].sampling is not None]:
            _choose(logits, sampled)
        if targeted:
            del logits
            for i, logprobs in tell_prompts(self._hidden, segments, step.order, self._rows_at_once).items():
                if logprobs is None:
                    segments[i].fail(_NO_NUMBERS)
                else:
                    segments[i].prompt_logprobs = logprobs


def _choose(logits: torch.Tensor, segments: Sequence[Segment]) -> None:
    """Sample each segment's token from its row of ``logits`` [n, vocab], which its rules change in place."""
    params = [segment.sampling for segment in segments if segment.sampling is not None]
    rows = [row for row, sampling in enumerate(params) if sampling.logprobs is not None]
    ruled = [(row, params[row], segment.history) for row, segment in enumerate(segments) if segment.history is not None]
    raw = torch.log_softmax(logits[rows], dim=-1) if rows else None
    failed = apply_rules(logits, ruled) if ruled else {}
    tokens = choose_tokens(logits, params, [segment.end for segment in segments])
    for row, (segment, token) in enumerate(zip(segments, tokens, strict=True)):
        if row in failed:
            segment.fail(failed[row], "grammar")
        elif token is None:
            segment.fail(_NO_NUMBERS)
        else:
            segment.token = token
    if raw is not None:
        chosen, tops = (
            [tokens[row] for row in rows],
            [params[row].logprob_token_ids or params[row].logprobs or 0 for row in rows],
        )
        for row, logprob in zip(rows, token_logprobs(raw, chosen, tops), strict=True):
            segments[row].logprob = logprob


def load_model(path: str | Path, config: Any, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Load a checkpoint onto ``device``. Raises UnsupportedModel for missing weights, which would be random."""
    model: torch.nn.Module
    disable_progress_bar()  # it would write over what the caller shows
    model, report = AutoModelForCausalLM.from_pretrained(
        str(path), dtype=dtype, attn_implementation=IMPLEMENTATION, local_files_only=True, output_loading_info=True
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise UnsupportedModel(
            f"{path}: config.json says {config.model_type}, and the weights lack {len(missing)} of its tensors "
            f"({missing[0]}, ...); one of the two belongs to another model"
        )
    return model.to(device)
