"""From a deployment's settings and a checkpoint's facts to an engine of the right size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from serve_app.cache.tiers.tiers import TierSettings
from serve_app.checkpoints.checkpoint import CheckpointInfo, weights_fingerprint
from serve_app.checkpoints.drafter import drafter_path
from serve_app.checkpoints.limits import max_model_len, pin_budget_blocks
from serve_app.config.app import AppConfig
from serve_app.config.cache import MIB
from serve_app.engine.core.build import build_engine
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import Engine, EventSink
from serve_app.engine.runner.kv_size import blocks_in_budget, kv_bytes_per_block
from serve_app.engine.runner.memory_budget import Work, kv_budget_bytes
from serve_app.engine.runner.model_runner import choose_device, choose_dtype
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.settings import EngineSettings
from serve_app.engine.speculative.eagle_config import read_eagle_config

CPU_POOL_BYTES = 512 * MIB


def make_engine(config: AppConfig, info: CheckpointInfo, event_sink: EventSink) -> Engine:
    """Load or simulate the model and return its engine, not started.

    Raises ValueError for settings that do not fit, and what ``build_engine`` raises.
    """
    model_config = AutoConfig.from_pretrained(str(info.path), local_files_only=True)
    dtype = str(choose_dtype(config.dtype, choose_device(config.device))).removeprefix("torch.")
    drafter = drafter_path(config)
    drafter_bytes = _drafter_bytes(drafter, dtype, config.block_size) if drafter else 0
    num_blocks = config.num_blocks or blocks_in_budget(
        model_config, dtype, config.block_size, pool_bytes(config, model_config, drafter), drafter_bytes
    )
    settings = EngineSettings(
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len(config, info),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_waiting_requests=config.max_waiting_requests,
        admission=config.admission,
        enable_prefix_caching=config.enable_prefix_caching,
        pin_budget_blocks=pin_budget_blocks(config, num_blocks) if config.enable_prefix_caching else 0,
        tenant_shares={tenant.name: tenant.cache_share for tenant in config.tenants},
        dtype=config.dtype,
        device=config.device,
        attention_backend=config.attention_backend,
        enforce_eager=config.enforce_eager,
        model_fingerprint=info.fingerprint,
        speculative_fingerprint=weights_fingerprint(drafter) if drafter else "",
        tiers=TierSettings(
            host_bytes=config.host_cache_bytes,
            disk_bytes=config.disk_cache_bytes,
            disk_dir=config.disk_cache_dir,
            disk_queue_bytes=config.disk_queue_bytes,
            load_ratio=config.tier_load_ratio,
            save_ttl_s=config.save_ttl_s,
        ),
        num_threads=config.num_threads or max(1, (os.cpu_count() or 1) // config.replicas),
        speculative_model=str(drafter or ""),
        num_speculative_tokens=config.num_speculative_tokens if drafter else 0,
        max_loras=config.max_loras,
        max_cpu_loras=config.max_cpu_loras,
        max_lora_rank=config.max_lora_rank,
    )
    if config.engine == "torch":
        return build_engine(info.path, settings, event_sink)
    cost = CostModel(
        prefill_tokens_per_s=config.simulated_prefill_tokens_per_s,
        decode_base_s=config.simulated_decode_step_s,
        vocab_size=info.vocab_size,
        max_positions=settings.max_model_len,
        block_bytes=kv_bytes_per_block(model_config, dtype, config.block_size),
    )
    runner = SimulatedRunner(
        cost,
        model_fingerprint=info.fingerprint,
        block_size=config.block_size,
        max_loras=config.max_loras,
        max_cpu_loras=config.max_cpu_loras,
    )
    return TorchEngine(runner, settings, event_sink)


def _drafter_bytes(drafter: Path, dtype: str, block_size: int) -> int:
    """Return what a block holds of a drafter. Raises ValueError on a head that cannot be run."""
    head = read_eagle_config(drafter)
    if head is not None:
        return head.block_bytes(dtype, block_size)
    return kv_bytes_per_block(AutoConfig.from_pretrained(str(drafter), local_files_only=True), dtype, block_size)


def pool_bytes(config: AppConfig, model_config: Any, drafter: Path | None) -> int:
    """Return the bytes of the KV pool: as set, else 512 MiB, on a GPU what ``gpu_memory_utilization`` leaves.

    Raises ValueError when that is nothing.
    """
    device = choose_device(config.device)
    if config.kv_cache_bytes is not None or device.type != "cuda" or config.engine != "torch":
        return config.kv_cache_bytes or CPU_POOL_BYTES
    adapters = config.max_loras if config.lora_adapters or config.allow_runtime_lora else 0
    work = Work(
        batched_tokens=config.max_num_batched_tokens,
        sequences=config.max_num_seqs * (1 + (config.num_speculative_tokens if drafter else 0)),
        lora_ranks=adapters * config.max_lora_rank,
        graphs=not config.enforce_eager,
    )
    models, head_bytes = [model_config], 0
    if drafter is not None and read_eagle_config(drafter) is None:
        models.append(AutoConfig.from_pretrained(str(drafter), local_files_only=True))
    elif drafter is not None:
        head_bytes = sum(file.stat().st_size for file in drafter.glob("*.safetensors"))
    memory = torch.cuda.mem_get_info(device)
    dtype = choose_dtype(config.dtype, device)
    return kv_budget_bytes(memory, config.gpu_memory_utilization, models, dtype, work) - head_bytes
