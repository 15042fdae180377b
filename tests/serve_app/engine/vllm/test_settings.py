"""Settings in vLLM's form, unsupported settings, adapters' files, and results for submitters; no vLLM."""

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.config.app import AppConfig
from serve_app.config.engine import ENGINES
from serve_app.engine.protocol import AdapterError
from serve_app.engine.vllm.adapters import VllmAdapters
from serve_app.engine.vllm.drafts import with_whole_hits
from serve_app.engine.vllm.event_endpoints import EventEndpoints
from serve_app.engine.vllm.refusals import TABLE, costs_of_model, refused_card, refused_model
from serve_app.engine.vllm.settings import (
    EXECUTOR,
    WHOLE_HITS,
    VllmSettings,
    engine_arguments,
    lora_rank,
    set_environment,
)
from serve_app.replica.engine_factory import refused_settings
from tests.serve_app.engine.adapters import described, save_plain


def arguments(*, on_cpu: bool = True, **settings: Any) -> dict[str, Any]:
    return engine_arguments(VllmSettings("m", **settings), EventEndpoints(Path("/run/private")), on_cpu=on_cpu)


def test_pools_and_adapters_get_the_requested_space() -> None:
    """vLLM has one block of its own; a CPU needs the total bytes; adapter ranks are rounded up to vLLM's choices."""
    cpu = arguments(num_blocks=10, block_bytes=1000, lora=True, max_lora_rank=17)
    assert (cpu["num_gpu_blocks_override"], cpu["kv_cache_memory_bytes"]) == (11, 11000)
    assert (cpu["max_lora_rank"], cpu["distributed_executor_backend"]) == (32, EXECUTOR)
    gpu = arguments(on_cpu=False, kv_cache_bytes=5000, enable_prefix_caching=False)
    assert (gpu["kv_cache_memory_bytes"], gpu["gpu_memory_utilization"]) == (5000, 0.9)
    assert not gpu.keys() & {
        "num_gpu_blocks_override",
        "distributed_executor_backend",
        "kv_events_config",
        "enable_lora",
    }
    assert not {"speculative_config", "async_scheduling"} & cpu.keys()


def test_only_copies_take_vllms_groups_from_a_windowed_model() -> None:
    """vLLM then keeps all layers' KV in one group, as copies need it; otherwise the choice is vLLM's."""
    assert arguments()["disable_hybrid_kv_cache_manager"] is None
    assert arguments(copies=True)["disable_hybrid_kv_cache_manager"] is True
    assert arguments(pin_budget=0.2)["disable_hybrid_kv_cache_manager"] is None
    assert "kv_transfer_config" in arguments(pin_budget=0.2)
    assert "async_scheduling" not in arguments(speculative_config={"method": "ngram"}), "vLLM knows best"


def test_tokens_are_drawn_by_position_where_that_can_be_kept() -> None:
    """Beside drafts a step then waits for the one before, which says how many of them were accepted."""
    cases = (
        ("auto", "float32", True),
        ("auto", "bfloat16", False),
        ("on", "bfloat16", True),
        ("off", "float32", False),
    )
    for asked, dtype, exact in cases:
        settings = VllmSettings("m", dtype=dtype, exact_resume=asked, speculative_config={"method": "ngram"})
        assert settings.exact == exact
        assert not settings.without({"exact_resume"}).exact
        assert (
            "async_scheduling" in engine_arguments(settings, EventEndpoints(Path("/run/private")), on_cpu=True)
        ) == exact
    with pytest.raises(ValueError, match="at most 512"):
        lora_rank(1000)


def test_a_vllm_that_always_drops_a_hits_last_block_beside_drafts_is_not_asked_to_keep_it() -> None:
    settings = VllmSettings("m", speculative_config=with_whole_hits({"method": "eagle", "model": "head"}))
    assert settings.without(()).speculative_config[WHOLE_HITS]
    assert settings.without({"draft_hits"}).speculative_config == {"method": "eagle", "model": "head"}


@pytest.mark.parametrize(
    ("weights", "kv", "ranks", "told"),
    [
        (16, None, 1, ""),
        (26, None, 1, "too large for 1 GPU of 24.0 GiB: 26.0 GiB of weights; raise tensor_parallel_size"),
        (26, None, 2, ""),
        (60, None, 2, "too large for 2 GPUs of 24.0 GiB: 60.0 GiB of weights; raise"),
        (16, 8, 1, ""),
        (16, 12, 1, "16.0 GiB of weights and kv_cache_bytes of 12.0 GiB; lower kv_cache_bytes, raise"),
        (0, None, 1, ""),
    ],
)
def test_a_model_too_large_for_its_cards_is_one_sentence(weights: int, kv: int | None, ranks: int, told: str) -> None:
    """Each card has 24 GiB."""
    settings = VllmSettings(
        "m", weights_bytes=weights << 30, kv_cache_bytes=kv and kv << 30, tensor_parallel_size=ranks
    )
    found = refused_card(settings, 24 << 30)
    assert found == [] if not told else len(found) == 1 and told in found[0]


def test_prompts_stay_on_the_machine_and_out_of_logs() -> None:
    """vLLM's default publishes all prompts' token ids on a TCP port; a 64-bit hash can be made to collide."""
    found = arguments()
    events = found["kv_events_config"]
    assert events["endpoint"] == "ipc:///run/private/inproc-events"
    assert events["replay_endpoint"].startswith("ipc://")
    assert not found["enable_log_requests"]
    assert found["prefix_caching_hash_algo"] == "sha256"
    environment = {"VLLM_LOGGING_LEVEL": "DEBUG", "OMP_NUM_THREADS": "1"}
    set_environment(environment, 3)
    assert environment["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] == "0"
    assert (environment["OMP_NUM_THREADS"], environment["VLLM_LOGGING_LEVEL"]) == ("3", "DEBUG")


TENANT = {"name": "a", "key_sha256": ["0" * 64]}
CHANGED: dict[str, dict[str, Any]] = {
    "host_cache_bytes": {"host_cache_bytes": 1024},
    "kv_offloading_size": {"kv_offloading_size": 4, "enable_prefix_caching": False},
    "save_ttl_s": {"save_ttl_s": 60},
    "max_itl_ms": {"max_itl_ms": 50.0},
    "num_speculative_tokens": {"num_speculative_tokens": 2},
    "workers": {"workers": ["http://127.0.0.1:8000"]},
    "worker_key_file": {"worker_key_file": "key"},
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_setting_without_effect_is_refused_by_its_name(name: str) -> None:
    config = AppConfig.model_validate({"engine": "vllm", "block_size": 32, **CHANGED[name]})
    assert name in [sentence.split(":")[0] for sentence in refused_settings(config, on_cpu=True)]
    reread = AppConfig.model_validate(config.to_json())
    assert refused_settings(reread, on_cpu=True) == refused_settings(config, on_cpu=True), "in every process alike"


def test_every_setting_that_vllm_refuses_is_tried() -> None:
    lacking = [name for needing in ENGINES["vllm"].lacks() for name in needing.names]
    assert CHANGED.keys() == {*lacking, *(name for refusal in TABLE for name in refusal.settings)}


MOVES = {"kv_pull": True, "prewarm": True, "handover": True, "pin_budget": 0.5, "save_ttl_s": 60}
TENANTS = [{**TENANT, "requests_per_second": 2, "cache_share": 2, "trust_group": "g", "store_kv": False}]
PUBLIC = [{"name": "p", "version": "1", "text": "x"}]
DISK = {"disk_cache_bytes": "1GiB", "disk_cache_dir": "x", "disk_queue_bytes": "1MiB", "tier_load_ratio": 2}
STORE = {"object_cache_url": "file:///kv", "object_cache_bytes": "1GiB"}


@pytest.mark.parametrize(
    ("settings", "on_cpu"),
    [
        ({}, True),
        ({"replica_num_gpus": 1}, False),
        ({"speculative_model": "ngram", "num_speculative_tokens": 8}, True),
        ({"block_size": 64, "tenants": TENANTS, "lora_adapters": {"x": "x"}, **MOVES}, True),
        ({"public_prompts": PUBLIC, "prompts_dir": "x"}, True),
        ({**DISK, **STORE}, True),
    ],
)
def test_settings_that_vllm_supports_are_not_refused(settings: dict[str, Any], on_cpu: bool) -> None:
    config = AppConfig.model_validate({"engine": "vllm", **settings})
    assert refused_settings(AppConfig.model_validate(config.to_json()), on_cpu=on_cpu) == []


def test_blocks_of_a_cpu_are_multiples_of_32() -> None:
    (sentence,) = refused_settings(AppConfig(engine="vllm", replica_num_gpus=1), on_cpu=True)
    assert sentence == "block_size: with engine=vllm on a CPU it must be a multiple of 32; set block_size: 32"


def test_adapters_in_float32_are_refused_on_a_gpu_alone() -> None:
    config = AppConfig(engine="vllm", replica_num_gpus=1, dtype="float32", allow_runtime_lora=True, block_size=32)
    (sentence,) = refused_settings(config, on_cpu=False)
    assert "set dtype: bfloat16" in sentence
    assert refused_settings(config, on_cpu=True) == []


STATE = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
MAMBA = {"model_type": "jamba", "layers_block_type": ["mamba", "attention"]}


@pytest.mark.parametrize(
    ("fields", "moves", "on_cpu", "reason"),
    [
        ({"model_type": "mistral", "sliding_window": None}, True, True, None),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, True, True, None),
        ({"model_type": "mistral", "sliding_window": 4096}, False, True, None),
        ({"model_type": "mistral", "sliding_window": 4096}, True, False, "kv_pull: .* window of 4096"),
        ({"model_type": "gemma2", "layer_types": ["sliding_attention", "full_attention"]}, True, True, None),
        ({"text_config": {"sliding_window": 512, "layer_types": ["sliding_attention"]}}, True, True, "window of 512"),
        (STATE, False, True, None),
        (STATE, True, True, "kv_pull: .* conv"),
        (MAMBA, False, False, None),
        ({"model_type": "gpt_oss"}, True, True, "num_threads: 1"),
        ({"model_type": "gpt_oss"}, True, False, None),
        (MAMBA, False, True, "on a CPU .*mamba"),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]}, True, False, "kv_pull"),
        ({"model_type": "bamba", "mamba_d_state": 128}, False, True, "mamba_d_state"),
        ({"model_type": "mamba2", "state_size": 128}, False, False, "no attention"),
    ],
)
def test_settings_that_a_models_layers_rule_out_are_refused(
    fields: dict[str, Any], moves: bool, on_cpu: bool, reason: str | None
) -> None:
    config = AppConfig(engine="vllm", block_size=32, kv_pull=moves)
    found = refused_model(fields, config, on_cpu=on_cpu)
    assert found == [] if reason is None else len(found) == 1 and re.search(reason, found[0])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, ""),
        ({"model_type": "gemma2", "layer_types": ["sliding_attention", "full_attention"]}, ""),
        (STATE, "pin_budget: a model with conv"),
    ],
)
def test_windows_are_kept_and_states_are_not(fields: dict[str, Any], reason: str) -> None:
    found = refused_model(fields, AppConfig(engine="vllm", block_size=32, pin_budget=0.5), on_cpu=True)
    assert found == [] if not reason else len(found) == 1 and found[0].startswith(reason)


@pytest.mark.parametrize(("name", "tier"), [("disk_cache_bytes", DISK), ("object_cache_url", STORE)])
def test_tiers_need_all_kv_of_a_prefix(name: str, tier: dict[str, Any]) -> None:
    config = AppConfig(engine="vllm", block_size=32, **tier)
    for fields in ({"model_type": "mistral", "sliding_window": 4096}, STATE):
        (refused,) = refused_model(fields, config, on_cpu=True)
        assert refused.startswith(f"{name}: a model with")


MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 80}


@pytest.mark.parametrize(
    ("fields", "settings", "told"),
    [
        (MIXED, {}, ""),
        (MIXED, {"pin_budget": 0.5}, ""),
        (MIXED, {"kv_pull": True}, "kv_pull: with copies vLLM keeps all KV of the layers with a window of 80 tokens"),
        ({"text_config": MIXED}, {"prewarm": True, "handover": True}, "prewarm, handover: with copies"),
        ({"sliding_window_pattern": 6, "sliding_window": 512}, {"kv_pull": True}, "a window of 512 tokens"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 80}, {"kv_pull": True}, ""),
        ({"layer_types": ["full_attention"], "sliding_window": 80}, {"kv_pull": True}, ""),
        ({"sliding_window": 4096}, {"kv_pull": True}, ""),
    ],
)
def test_copies_of_a_model_with_some_windows_have_a_price(
    fields: dict[str, Any], settings: dict[str, Any], told: str
) -> None:
    found = costs_of_model(fields, AppConfig(engine="vllm", block_size=32, **settings))
    assert found == [] if not told else len(found) == 1 and told in found[0]


class Vllm:
    """A frontend and its vLLM, which records its calls and the files it was given."""

    def __init__(self) -> None:
        self.llm = self
        self.paths: dict[int, Path] = {}
        self.removed: list[int] = []
        self.error = ""

    async def add_lora(self, name: str, number: int, path: str) -> Any:
        self.paths[number] = Path(path)
        if self.error:
            raise ValueError(f"{path}: {self.error}")
        return SimpleNamespace(lora_int_id=number, lora_path=path)

    async def remove_lora(self, number: int) -> None:
        self.removed.append(number)

    def call(self, coroutine: Any) -> Any:
        result = asyncio.run(coroutine)
        return SimpleNamespace(result=lambda: result)


def adapters_of(vllm: Any, directory: Path, *, lora: bool = True) -> VllmAdapters:
    return VllmAdapters(directory, vllm, VllmSettings("m", lora=lora, max_loras=1, max_cpu_loras=1))


def test_vllm_reads_files_that_nobody_else_writes(tmp_path: Path) -> None:
    """The copy has the described bytes; it is removed with the adapter, and the next adapter has another copy."""
    vllm = Vllm()
    adapters = adapters_of(vllm, tmp_path / "private")
    spec, _ = described(save_plain(tmp_path / "a"))
    adapters.slots.load(spec)
    copy = vllm.paths[1]
    assert (copy / "adapter_model.safetensors").read_bytes() == (tmp_path / "a/adapter_model.safetensors").read_bytes()
    config = json.loads((copy / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (1, 1.0, ["x"])
    other, _ = described(save_plain(tmp_path / "b", 2.0), "b")
    adapters.slots.load(other)
    assert vllm.removed == [1]
    assert not copy.exists()
    assert vllm.paths[2].exists()


def test_changed_or_refused_files_are_errors_that_name_no_path(tmp_path: Path) -> None:
    """The sentence goes to a client."""
    vllm = Vllm()
    adapters = adapters_of(vllm, tmp_path / "private")
    spec, _ = described(save_plain(tmp_path / "a"))
    vllm.error = "target modules are not supported"
    with pytest.raises(AdapterError, match="cannot serve this adapter: a: target modules") as refused:
        adapters.slots.load(spec)
    assert str(tmp_path) not in str(refused.value)
    assert not vllm.paths[1].exists()
    save_plain(tmp_path / "a", 3.0)
    with pytest.raises(AdapterError, match="changed after it was loaded"):
        adapters.slots.load(spec)
    with pytest.raises(AdapterError, match="allow_runtime_lora"):
        adapters_of(vllm, tmp_path / "other", lora=False).slots.load(spec)
