"""vLLM's arguments that the settings accept, by name; no vLLM."""

from pathlib import Path
from typing import Any

import pytest

from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.checkpoints.limits import max_model_len
from serve_app.config.app import AppConfig
from serve_app.config.files import load_settings
from serve_app.config.live import BadSettings, app_config
from serve_app.engine.vllm.engine_args import fingerprint_with, refused_engine_args
from serve_app.engine.vllm.event_endpoints import EventEndpoints
from serve_app.engine.vllm.refusals import refused_model, refused_ranks, refused_settings
from serve_app.engine.vllm.settings import DataParallel, VllmSettings, engine_arguments
from serve_app.replica.engine_factory import maker_of, served_fields


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("prefix_caching_hash_algo", "(a hit is verified by its token ids)"),
        ("disable_hybrid_kv_cache_manager", "(the directory says exactly which blocks a replica holds)"),
        ("scheduler_cls", "(tenants take turns inside a step)"),
        ("logits_processors", "(a seeded answer goes on elsewhere, token by token)"),
        ("enable_log_requests", "(no tenant sees another's cache by its timing)"),
        ("data_parallel_rank", "set data_parallel_size in the settings"),
        ("kv_offloading_size", "use kv_offloading_size:"),
        ("block_size", "use block_size:"),
        ("kv_cache_memory_bytes", "use kv_cache_bytes:"),
        ("tensor_parallel_size", "use tensor_parallel_size:"),
        ("kv-cache-dtype", "vLLM's names look like kv_cache_dtype"),
    ],
)
def test_arguments_that_would_break_a_promise_are_refused_by_name(name: str, told: str) -> None:
    config = AppConfig.model_validate({"engine": "vllm", "engine_args": {name: 1, "seed": 2}})
    (sentence,) = refused_settings(config, on_cpu=True)
    assert sentence.startswith(f"engine_args.{name}: ") and told in sentence


def test_everything_that_warmpath_gives_vllm_is_refused() -> None:
    """Otherwise one of the two values would silently be ignored."""
    settings = VllmSettings("m", num_blocks=2, copies=True, lora=True)
    given = engine_arguments(settings, EventEndpoints(Path("/run/private")), on_cpu=True)
    assert len(refused_engine_args(given)) == len(given)


def test_copies_between_other_arguments_are_other_models() -> None:
    """Any of these arguments may change the KV."""
    told = [fingerprint_with("m", arguments) for arguments in ({}, {"quantization": "fp8"}, {"quantization": "awq"})]
    assert told[0] == "m" and len(set(told)) == 3
    assert fingerprint_with("m", {"a": 1, "b": 2}) == fingerprint_with("m", {"b": 2, "a": 1})


def test_ranks_divide_memory_and_are_processes_of_vllm() -> None:
    """vLLM counts a rank's bytes, the settings a replica's."""
    settings = VllmSettings("m", num_blocks=9, block_bytes=1000, tensor_parallel_size=2, pipeline_parallel_size=2)
    cpu = engine_arguments(settings, EventEndpoints(Path("/run/private")), on_cpu=True)
    assert (cpu["kv_cache_memory_bytes"], cpu["distributed_executor_backend"]) == (2500, "mp")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"engine": "torch", "tensor_parallel_size": 2}, "set engine: vllm"),
        ({"engine": "torch", "engine_args": {"seed": 1}}, "set engine: vllm"),
        ({"engine": "vllm", "tensor_parallel_size": 2, "replica_num_gpus": 1}, "set replica_num_gpus: 2"),
        ({"engine": "vllm", "replica_num_gpus": 2}, "set replica_num_gpus: 1"),
    ],
)
def test_each_rank_has_a_gpu(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        AppConfig.model_validate(settings)
    assert AppConfig(engine="vllm", replica_num_gpus=0.5).ranks == 1


@pytest.mark.parametrize(
    ("sizes", "refused"),
    [((4, 1), False), ((8, 1), False), ((3, 1), True), ((1, 5), True), ((1, 4), False), ((16, 1), True)],
)
def test_ranks_divide_heads_and_layers(sizes: tuple[int, int], refused: bool) -> None:
    """KV heads may also be fewer, and then several ranks hold each."""
    fields = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}
    config = AppConfig(engine="vllm", tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1])
    assert bool(refused_ranks(config, fields)) == refused


def test_flags_go_over_a_files_arguments(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("engine: vllm\nengine_args: {seed: 1, quantization: awq}")
    found = load_settings(tmp_path / "s.yaml", [], ["kv-cache-dtype=fp8", "seed=2", 'hf_overrides={"a": [1]}'])
    expected = {"seed": 2, "quantization": "awq", "kv_cache_dtype": "fp8", "hf_overrides": {"a": [1]}}
    assert found.engine_args == expected
    with pytest.raises(ValueError, match="--engine-arg takes NAME=VALUE"):
        load_settings(None, [], ["seed"])


def test_overrides_of_a_models_config_count_before_it_is_loaded(demo_model_path: Path) -> None:
    """They change its positions, and the reasons to refuse it."""
    info = load_checkpoint_info(demo_model_path)
    longer = 4 * info.max_model_len
    overrides = {"max_position_embeddings": longer, "layer_types": ["mamba"]}
    config = AppConfig(engine="vllm", engine_args={"hf_overrides": overrides}, max_model_len=longer)
    assert max_model_len(config, info) == longer
    with pytest.raises(ValueError, match="positions"):
        max_model_len(AppConfig(max_model_len=longer), info)
    (sentence,) = maker_of(config).refused_model(served_fields(config, info.path), config, on_cpu=True)
    assert "mamba" in sentence


def test_data_parallel_ranks_are_replicas_of_their_own() -> None:
    """Serve starts a group's ranks together; each has its own GPUs, so replica_num_gpus counts those of one rank."""
    config = app_config({"engine": "vllm", "data_parallel_size": 2, "replicas": 3, "replica_num_gpus": 1})
    assert (config.first_replicas, config.most_replicas, config.ranks) == (6, 6, 1)
    for wrong, told in (
        ({"data_parallel_rank": 1}, "set data_parallel_size"),
        ({"data_parallel_size": 2}, "set engine: vllm"),
        ({"engine": "vllm", "data_parallel_size": 2, "autoscaling": {"max_replicas": 4}}, "leave one out"),
    ):
        with pytest.raises(BadSettings, match=told):
            app_config(wrong)


def test_ranks_with_experts_meet_at_a_port_of_their_machine() -> None:
    settings = VllmSettings("m", data_parallel=DataParallel(1, 2, 4567))
    given = engine_arguments(settings, EventEndpoints(Path("/run/private")), on_cpu=False)
    told = {name: given[f"data_parallel_{name}"] for name in ("size", "rank", "address", "rpc_port")}
    assert told == {"size": 2, "rank": 1, "address": "127.0.0.1", "rpc_port": 4567}
    assert not [
        name
        for name in engine_arguments(VllmSettings("m"), EventEndpoints(Path("/x")), on_cpu=False)
        if "data_" in name
    ]


@pytest.mark.parametrize("fields", [{"num_experts": 4}, {"text_config": {"n_routed_experts": 8}}])
def test_ranks_share_experts_on_gpus_alone(fields: dict[str, Any]) -> None:
    config = AppConfig(engine="vllm", data_parallel_size=2)
    (sentence,) = refused_model(fields, config, on_cpu=True)
    assert "exchange the tokens of their experts" in sentence
    assert refused_model(fields, config, on_cpu=False) == refused_model({}, config, on_cpu=True) == []


def test_whole_experts_on_each_rank_need_gpus() -> None:
    """vLLM's kernel for experts on a CPU ends the process; one rank has all of them anyway."""
    config = AppConfig(engine="vllm", tensor_parallel_size=2, engine_args={"enable_expert_parallel": True})
    (sentence,) = refused_settings(config, on_cpu=True)
    assert sentence.startswith("engine_args.enable_expert_parallel:")
    alone = config.model_copy(update={"tensor_parallel_size": 1})
    assert refused_settings(config, on_cpu=False) == refused_settings(alone, on_cpu=True) == []
