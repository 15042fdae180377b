"""What vLLM cannot do is said at the start, setting by setting; what it can do is not refused."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.config.app import AppConfig
from serve_app.engine.vllm.refusals import TABLE, refused_model, refused_settings

TENANT = {"name": "a", "key_sha256": ["0" * 64]}
CHANGED: dict[str, dict[str, Any]] = {
    "host_cache_bytes": {"host_cache_bytes": 1024},
    "disk_cache_bytes": {"disk_cache_bytes": 1024, "disk_cache_dir": "x"},
    "disk_cache_dir": {"disk_cache_dir": "x"},
    "disk_queue_bytes": {"disk_queue_bytes": "1MiB"},
    "tier_load_ratio": {"tier_load_ratio": 2},
    "save_ttl_s": {"save_ttl_s": 60},
    "public_prompts": {"public_prompts": [{"name": "p", "version": "1", "text": "x"}]},
    "prompts_dir": {"prompts_dir": "x"},
    "tenants[].cache_share": {"tenants": [{**TENANT, "cache_share": 2}]},
    "tenants[].store_kv": {"tenants": [{**TENANT, "store_kv": False}]},
    "admission": {"admission": "worst_case"},
    "speculative_model": {"speculative_model": "small"},
    "num_speculative_tokens": {"num_speculative_tokens": 2},
}


@pytest.mark.parametrize("name", [name for refusal in TABLE for name in refusal.settings])
def test_a_setting_without_effect_is_refused_by_its_name(name: str) -> None:
    config = AppConfig.model_validate({"engine": "vllm", "block_size": 32, **CHANGED[name]})
    assert name in [sentence.split(":")[0] for sentence in refused_settings(config, on_cpu=True)]
    reread = AppConfig.model_validate(config.to_json())
    assert refused_settings(reread, on_cpu=True) == refused_settings(config, on_cpu=True), "in every process alike"


def test_defaults_are_taken_but_for_the_block_size_of_a_cpu() -> None:
    assert refused_settings(AppConfig(engine="vllm"), on_cpu=True) == []
    gpu = AppConfig(engine="vllm", replica_num_gpus=1)
    assert refused_settings(gpu, on_cpu=False) == []
    assert refused_settings(AppConfig.model_validate(gpu.to_json()), on_cpu=False) == []
    (sentence,) = refused_settings(gpu, on_cpu=True)
    assert sentence == "block_size: with engine=vllm on a CPU it is a multiple of 32; set block_size: 32"
    assert refused_settings(AppConfig(engine="vllm", block_size=64), on_cpu=True) == []


def test_what_vllm_can_do_is_not_refused() -> None:
    config = {
        "engine": "vllm",
        "block_size": 32,
        "tenants": [{**TENANT, "requests_per_second": 2, "trust_group": "g"}],
        "policy": "round_robin",
        "max_num_seqs": 8,
        "lora_adapters": {"x": "x"},
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kv_pull": True,
        "max_pulls": 8,
        "prewarm": True,
        "prewarm_timeout_s": 30,
        "handover": True,
        "pin_budget": 0.5,
        "save_ttl_s": 60,
    }
    assert refused_settings(AppConfig.model_validate(config), on_cpu=True) == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "llama"}, None),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, None),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 4096}, "4096 tokens back"),
        (
            {"model_type": "gemma2", "sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"]},
            None,
        ),
        ({"model_type": "gemma2", "sliding_window": 4096}, None),
        ({"text_config": {"sliding_window": 1024, "sliding_window_pattern": 6}}, None),
        ({"text_config": {"sliding_window": 512, "layer_types": ["sliding_attention"]}}, "512 tokens back"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"model_type": "jamba", "layers_block_type": ["mamba", "attention"]}, "mamba"),
        ({"model_type": "bamba", "mamba_d_state": 128}, "mamba_d_state"),
        ({"model_type": "mamba2", "state_size": 128}, "mamba2"),
    ],
)
def test_a_model_whose_prefixes_are_not_held_whole_is_refused(fields: dict[str, Any], reason: str | None) -> None:
    found = refused_model(fields)
    assert (found == []) if reason is None else (len(found) == 1 and reason in found[0])
