"""How many blocks the pool of a real engine has. Loads torch and transformers, which a simulated one does without."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from serve_app.config.app import AppConfig
from serve_app.config.cache import CPU_POOL_BYTES
from serve_app.engine.runner.kv_size import blocks_in_budget, kv_bytes_per_block
from serve_app.engine.runner.memory_budget import Work, kv_budget_bytes
from serve_app.engine.runner.model_runner import choose_device, choose_dtype
from serve_app.engine.speculative.eagle_config import read_eagle_config


def pool_blocks(config: AppConfig, model: Path, drafter: Path | None) -> int:
    """Return the blocks of the pool: as set, else what fits ``pool_bytes``. Raises ValueError when not one does."""
    if config.num_blocks:
        return config.num_blocks
    model_config = AutoConfig.from_pretrained(str(model), local_files_only=True).get_text_config()
    dtype = str(choose_dtype(config.dtype, choose_device(config.device))).removeprefix("torch.")
    drafter_bytes = _drafter_bytes(drafter, dtype, config.block_size) if drafter else 0
    budget = pool_bytes(config, model_config, drafter)
    return blocks_in_budget(kv_bytes_per_block(model_config, dtype, config.block_size) + drafter_bytes, budget)


def pool_bytes(config: AppConfig, model_config: Any, drafter: Path | None) -> int:
    """Return the KV pool's bytes: as set, else 512 MiB, or a GPU's rest. Raises ValueError when that is nothing."""
    device = choose_device(config.device)
    if config.kv_cache_bytes is not None or device.type != "cuda":
        return config.kv_cache_bytes or CPU_POOL_BYTES
    adapters = config.max_loras if config.lora_adapters or config.allow_runtime_lora else 0
    work = Work(
        batched_tokens=config.max_num_batched_tokens,
        sequences=config.max_num_seqs * (1 + (config.num_speculative_tokens if drafter else 0)),
        lora_ranks=adapters * config.max_lora_rank,
    )
    models, head_bytes = [model_config], 0
    if drafter is not None and read_eagle_config(drafter) is None:
        models.append(AutoConfig.from_pretrained(str(drafter), local_files_only=True))
    elif drafter is not None:
        head_bytes = sum(file.stat().st_size for file in drafter.glob("*.safetensors"))
    memory = torch.cuda.mem_get_info(device)
    dtype = choose_dtype(config.dtype, device)
    return kv_budget_bytes(memory, config.gpu_memory_utilization, models, dtype, work) - head_bytes


def _drafter_bytes(drafter: Path, dtype: str, block_size: int) -> int:
    """Return what a block holds of a drafter. Raises ValueError on a head that cannot be run."""
    head = read_eagle_config(drafter)
    if head is not None:
        return head.block_bytes(dtype, block_size)
    return kv_bytes_per_block(AutoConfig.from_pretrained(str(drafter), local_files_only=True), dtype, block_size)
