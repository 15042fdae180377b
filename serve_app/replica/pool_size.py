"""The number of blocks in a real engine's pool. Loads torch and transformers, which simulated engines do not need."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from serve_app.config.app import AppConfig
from serve_app.config.cache import CPU_POOL_BYTES
from serve_app.engine.runner.kv_size import blocks_in_budget, kv_bytes_per_block
from serve_app.engine.runner.memory_budget import Work, kv_budget_bytes
from serve_app.engine.runner.model_runner import choose_device, choose_dtype


def pool_blocks(config: AppConfig, model: Path) -> int:
    """Return the pool's blocks: as set, else as many as fit ``pool_bytes``. Raises ValueError if none fits."""
    if config.num_blocks:
        return config.num_blocks
    model_config = AutoConfig.from_pretrained(str(model), local_files_only=True).get_text_config()
    dtype = str(choose_dtype(config.dtype, choose_device(config.device))).removeprefix("torch.")
    block_bytes = kv_bytes_per_block(model_config, dtype, config.block_size)
    return blocks_in_budget(block_bytes, pool_bytes(config, model_config))


def pool_bytes(config: AppConfig, model_config: Any) -> int:
    """Return the KV pool's bytes: as set, else 512 MiB, or a GPU's rest. Raises ValueError if nothing is left."""
    device = choose_device(config.device)
    if config.kv_cache_bytes is not None or device.type != "cuda":
        return config.kv_cache_bytes or CPU_POOL_BYTES
    adapters = config.max_loras if config.lora_adapters or config.allow_runtime_lora else 0
    work = Work(
        batched_tokens=config.max_num_batched_tokens,
        sequences=config.max_num_seqs,
        lora_ranks=adapters * config.max_lora_rank,
    )
    memory = torch.cuda.mem_get_info(device)
    dtype = choose_dtype(config.dtype, device)
    return kv_budget_bytes(memory, config.gpu_memory_utilization, model_config, dtype, work)
