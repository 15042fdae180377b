"""Make an engine of the right size from a deployment's settings and a checkpoint's facts."""

import json
import logging
import math
import os
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from serve_app.checkpoints.checkpoint import CheckpointError, CheckpointInfo, stored_bytes, weights_fingerprint
from serve_app.checkpoints.limits import max_model_len, pin_budget_blocks
from serve_app.checkpoints.sources import with_local_drafter
from serve_app.config.app import AppConfig
from serve_app.config.cache import CPU_POOL_BYTES, CacheSection
from serve_app.config.engine import SPEC_ARGS
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import Engine, EngineMaker, EventSink
from serve_app.engine.runner.kv_size import blocks_in_budget, kv_bytes_per_block
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.settings import EngineSettings
from serve_app.engine.vllm import refusals as vllm_refusals
from serve_app.engine.vllm.drafts import draft_layers, refused_drafter, with_whole_hits
from serve_app.engine.vllm.engine_args import fingerprint_with
from serve_app.tenants import worker_key

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_log = logging.getLogger(__name__)
T = TypeVar("T", bound="DataclassInstance")

_KV_FIELDS = {"num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"}
_KINDS = {"layer_types", "layers_block_type"}


def make_engine(config: AppConfig, info: CheckpointInfo, event_sink: EventSink) -> Engine:
    """Return the engine, not started. Raises ValueError for unfit settings, and the errors of ``load_runner``."""
    if refused := config.lacking():
        raise ValueError("; ".join(refused))
    return maker_of(config).build(config, info, event_sink)


def maker_of(config: AppConfig) -> EngineMaker:
    """Return the maker of the engine."""
    maker: EngineMaker = pkgutil.resolve_name(config.engine_traits.maker)
    return maker


def refused_settings(config: AppConfig, *, on_cpu: bool) -> list[str]:
    """Return a sentence for each setting that the engine cannot follow."""
    return config.lacking() + maker_of(config).refused_settings(config, on_cpu=on_cpu)


def _torch_engine(config: AppConfig, info: CheckpointInfo, event_sink: EventSink) -> Engine:
    # Imported here: they take seconds and hundreds of megabytes, which simulated replicas save.
    from serve_app.engine.runner.model_runner import load_runner
    from serve_app.replica.pool_size import pool_blocks

    settings = _torch_settings(config, info, pool_blocks(config, info.path))
    return TorchEngine(load_runner(info.path, settings), settings, event_sink)


def _vllm_engine(config: AppConfig, info: CheckpointInfo, event_sink: EventSink) -> Engine:
    # Imported here: vLLM may not be installed.
    from serve_app.engine.runner.model_runner import choose_device, choose_dtype
    from serve_app.engine.vllm.engine import VllmEngine
    from serve_app.engine.vllm.settings import VllmSettings
    from serve_app.replica.data_parallel import join_group  # imports Ray Serve, which reads its environment then

    device = choose_device(config.device)
    on_cpu = device.type == "cpu"
    if refused := vllm_refusals.refused_settings(config, on_cpu=on_cpu):
        raise ValueError("; ".join(refused))
    config, fields = with_local_drafter(config), served_fields(config, info.path)
    if refused := vllm_refusals.refused_model(fields, config, on_cpu=on_cpu):
        raise ValueError("; ".join(refused))
    for sentence in vllm_refusals.costs_of_model(fields, config):
        _log.warning(sentence)
    drafting, drafter = config.drafting, drafter_fields(config, fields)
    dtype = str(choose_dtype(config.dtype, device)).removeprefix("torch.")
    kv_dtype = config.engine_args.get("kv_cache_dtype") or "auto"
    if kv_dtype not in ("float16", "bfloat16"):
        kv_dtype = dtype if kv_dtype == "auto" else "fp8"  # numbers of four bits are counted as eight
    model_config = _model_config(info.path, config.hf_overrides)
    copies = config.enable_prefix_caching and bool(vllm_refusals.kv_moves(config))
    sizes = (config.block_size, *config.rank_sizes)
    block_bytes = kv_bytes_per_block(model_config, kv_dtype, *sizes, grouped=not copies)
    arguments = {name: value for name, value in config.engine_args.items() if name not in SPEC_ARGS}
    given = dict(arguments)
    unknown = any(name in vllm_refusals.OTHER_WEIGHTS or "offload" in name for name in arguments)
    if layers := draft_layers(drafting, fields, drafter):
        block_bytes += kv_bytes_per_block(SimpleNamespace(**layers), kv_dtype, *sizes)
        given["drafter"] = _fingerprint(Path(drafting["model"])) if drafter else info.fingerprint
    num_blocks = config.num_blocks
    if on_cpu and num_blocks is None:
        num_blocks = blocks_in_budget(block_bytes, config.kv_cache_bytes or CPU_POOL_BYTES)
    settings = _settings(
        VllmSettings,
        config,
        model=str(info.path),
        weights_bytes=0 if unknown else stored_bytes(info.path, 4 if dtype == "float32" else 2),
        end_token_ids=info.eos_token_ids,
        block_bytes=block_bytes,
        model_fingerprint=fingerprint_with(info.fingerprint, given),
        copies=copies,
        tiers=config if config.enable_prefix_caching else CacheSection(),
        pin_budget=config.pin_budget if config.enable_prefix_caching else 0.0,
        num_blocks=num_blocks,
        max_model_len=max_model_len(config, info),
        dtype=dtype,
        lora=bool(config.lora_adapters) or config.allow_runtime_lora,
        speculative_config=with_whole_hits(drafting),
        engine_args=arguments,
        data_parallel=join_group() if config.data_parallel_size > 1 else None,
    )
    return VllmEngine(settings, event_sink)


def served_fields(config: AppConfig, path: Path) -> dict[str, Any]:
    """Return a checkpoint's config.json, with the overrides in ``engine_args``."""
    fields: dict[str, Any] = json.loads((path / "config.json").read_text())
    return fields | config.hf_overrides


def drafter_fields(config: AppConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the model that drafts; empty without one. ``fields``: that of the model.

    Raises CheckpointError for a drafter that is missing or of another model.
    """
    drafting = with_local_drafter(config).drafting
    if not isinstance(model := drafting.get("model"), str):
        return {}
    try:
        drafter = dict(json.loads((Path(model) / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"speculative_config.model: {model} holds no readable config.json") from error
    if refused := refused_drafter(drafting, fields, drafter):
        raise CheckpointError("; ".join(refused))
    return drafter


def _fingerprint(drafter: Path) -> str:
    try:
        return weights_fingerprint(drafter)
    except CheckpointError:  # no safetensors
        return drafter.name


def _without_workers(config: AppConfig, *, on_cpu: bool) -> list[str]:
    return [] if config.workers else ["workers: engine=remote needs the URLs of servers that run"]


def _remote_engine(config: AppConfig, info: CheckpointInfo, event_sink: EventSink) -> Engine:
    from serve_app.engine.remote.engine import RemoteEngine
    from serve_app.engine.remote.settings import RemoteSettings

    tokenizer = info.path / "tokenizer.json"
    settings = _settings(
        RemoteSettings,
        config,
        workers=tuple(config.workers),
        model=str(info.path),
        tokenizer=str(tokenizer) if tokenizer.is_file() else "",
        key=worker_key(config.worker_key_file),
        vocab_size=info.vocab_size,
        max_model_len=max_model_len(config, info),
        apart=bool(config.tenants or config.require_tenants),
    )
    return RemoteEngine(settings, event_sink)


def _simulated_engine(config: AppConfig, info: CheckpointInfo, event_sink: EventSink) -> TorchEngine:
    dtype = "float32" if config.dtype == "auto" else config.dtype
    model_config = _model_config(info.path)
    block_bytes = kv_bytes_per_block(model_config, dtype, config.block_size)
    num_blocks = config.num_blocks or blocks_in_budget(block_bytes, config.kv_cache_bytes or CPU_POOL_BYTES)
    settings = _torch_settings(config, info, num_blocks)
    cost = CostModel(
        prefill_tokens_per_s=config.simulated_prefill_tokens_per_s,
        decode_base_s=config.simulated_decode_step_s,
        vocab_size=info.vocab_size,
        max_positions=settings.max_model_len,
        block_bytes=block_bytes,
    )
    return TorchEngine(SimulatedRunner(cost, settings), settings, event_sink)


def _model_config(path: Path, overrides: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return the config fields that size KV; asks transformers, which loads torch, only for missing defaults."""
    fields = json.loads((path / "config.json").read_text()) | overrides
    if fields.keys() >= _KV_FIELDS and (fields.keys() & _KINDS or not fields.get("sliding_window")):
        return SimpleNamespace(**{name: fields[name] for name in fields.keys() & (_KV_FIELDS | _KINDS)})
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(path), local_files_only=True, **overrides).get_text_config()


def _torch_settings(config: AppConfig, info: CheckpointInfo, num_blocks: int) -> EngineSettings:
    return _settings(
        EngineSettings,
        config,
        num_blocks=num_blocks,
        max_model_len=max_model_len(config, info),
        pin_budget_blocks=pin_budget_blocks(config, num_blocks) if config.enable_prefix_caching else 0,
        max_itl_s=math.inf if config.max_itl_ms is None else config.max_itl_ms / 1000,
        model_fingerprint=info.fingerprint,
        tiers=config,
    )


def _settings(kind: type[T], config: AppConfig, **own: Any) -> T:
    """Return an engine's settings: ``own``, and the deployment's settings of the same names."""
    fields = kind.__dataclass_fields__.keys()
    num_threads = config.num_threads or max(1, (os.cpu_count() or 1) // config.most_replicas)
    derived = {"num_threads": num_threads, "tenant_shares": config.cache_shares, "model_name": config.model_name}
    same = {name: getattr(config, name) for name in fields & AppConfig.model_fields.keys()}
    return kind(**{**same, **{name: derived[name] for name in fields & derived.keys()}, **own})


TORCH = EngineMaker(_torch_engine)
VLLM = EngineMaker(
    _vllm_engine, vllm_refusals.refused_settings, vllm_refusals.refused_model, vllm_refusals.costs_of_model
)
SIMULATED = EngineMaker(_simulated_engine)
REMOTE = EngineMaker(_remote_engine, _without_workers)
