"""The KV pool's part of a GPU: the estimate against real models and figures computed by hand."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from serve_app.config.app import AppConfig
from serve_app.config.cache import CPU_POOL_BYTES
from serve_app.engine.runner.memory_budget import Work, kv_budget_bytes, step_bytes, weight_bytes
from serve_app.replica.pool_size import pool_bytes

GIB = 1024**3
WORK = Work(batched_tokens=2048, sequences=64, lora_ranks=0)
LLAMA_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_counted_weights_are_the_models(checkpoints: dict[str, Path], kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoints[kind], dtype=torch.float32)
    config = AutoConfig.from_pretrained(checkpoints[kind])
    assert weight_bytes(config, torch.float32) == sum(weight.nbytes for weight in model.parameters())
    more = weight_bytes(config, torch.bfloat16, lora_ranks=8) - weight_bytes(config, torch.bfloat16)
    linear = [layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and "model." in name]
    assert more == 2 * 8 * sum(sum(layer.weight.shape) for layer in linear)


def test_an_8b_model_leaves_most_of_a_large_gpu_to_kv() -> None:
    """8.03 billion weights in bfloat16 are 15 GiB; one step's work is a few GiB; the rest of the part is KV."""
    assert weight_bytes(LLAMA_8B, torch.bfloat16) == 2 * 8_030_261_248
    step = step_bytes(LLAMA_8B, torch.bfloat16, WORK)
    assert GIB < step < 5 * GIB
    left = kv_budget_bytes((79 * GIB, 80 * GIB), 0.9, LLAMA_8B, torch.bfloat16, WORK)
    assert left == 72 * GIB - 2 * 8_030_261_248 - step
    busy = kv_budget_bytes((40 * GIB, 80 * GIB), 0.9, LLAMA_8B, torch.bfloat16, WORK)
    assert busy == left - 32 * GIB


def test_a_gpu_that_is_too_small_is_an_error_with_advice() -> None:
    with pytest.raises(
        ValueError, match=r"allows 14.4 GiB of 16.0 GiB .* weights take 15.0 GiB .* or set kv_cache_bytes"
    ):
        kv_budget_bytes((16 * GIB, 16 * GIB), 0.9, LLAMA_8B, torch.bfloat16, WORK)


def test_the_pool_is_as_set_else_a_default_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool_bytes(AppConfig(device="cpu"), LLAMA_8B) == CPU_POOL_BYTES
    assert pool_bytes(AppConfig(device="cpu", kv_cache_bytes=2 * GIB), LLAMA_8B) == 2 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 * GIB, 80 * GIB))
    config = AppConfig(device="cuda", replica_num_gpus=1, dtype="bfloat16", enforce_eager=True)
    expected = kv_budget_bytes((79 * GIB, 80 * GIB), 0.9, LLAMA_8B, torch.bfloat16, WORK)
    assert pool_bytes(config, LLAMA_8B) == expected


def test_a_gpu_has_to_be_reserved_to_be_seen() -> None:
    with pytest.raises(ValueError, match="replica_num_gpus"):
        AppConfig(device="cuda")
