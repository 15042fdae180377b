"""`engine_args`: vLLM's own arguments in the settings, which of them are allowed, and their parsing by vLLM.

Refused are arguments that are settings here, or that would break a promise. Imports vllm only for its parser.
"""

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from hashlib import sha256
from typing import Any

from serve_app.config.app import AppConfig

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_OURS = {
    "model": "tokenizer hf_config_path model_weights",
    "revision": "tokenizer_revision",
    "kv_cache_bytes": "kv_cache_memory_bytes",
    "num_blocks": "num_gpu_blocks_override",
    "allow_runtime_lora": "enable_lora",
    "max_waiting_requests": "max_num_queued_reqs max_num_queued_tokens",
    "otlp_endpoint": "otlp_traces_endpoint",
}
"""Settings -> the vLLM arguments that they replace; others have the same name."""

PROMISES = {
    "a hit is verified by its token ids": "prefix_caching_hash_algo",
    "the directory says exactly which blocks a replica holds": "kv_events_config kv_transfer_config mamba_block_size "
    "disable_hybrid_kv_cache_manager kv_offloading_backend prefill_context_parallel_size "
    "decode_context_parallel_size dcp_kv_cache_interleave_size cp_kv_cache_interleave_size prefix_match_unit "
    "prefix_cache_retention_interval swa_bounded_replay",
    "no tenant sees another's cache by its timing": "enable_log_requests",
    "tenants take turns inside a step": "scheduler_cls scheduling_policy enable_chunked_prefill",
    "a seeded answer goes on elsewhere, token by token": "logits_processors diffusion_config "
    "watermark_config enable_batch_sharded_sampling",
}
"""Promises of docs/tutorials/vllm.md -> arguments that would break them."""

_WHY = {
    **{f"use {setting}: in the settings instead": f"{setting} {names}" for setting, names in _OURS.items()},
    **{f"it would break a promise ({promise}); leave it out": names for promise, names in PROMISES.items()},
    "set data_parallel_size in the settings instead, and warmpath sets the rest": "data_parallel_rank "
    "data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port "
    "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend "
    "enable_elastic_ep elastic_ep_max_dp_size",
    "a replica's ranks are processes on one node; leave it out": "distributed_executor_backend nnodes node_rank "
    "master_addr master_port device_ids ray_workers_use_nsight",
    "warmpath gives vLLM its own; leave it out": "additional_config convert disable_log_stats generation_config runner "
    "enable_logging_iteration_details logprobs_mode max_logprobs override_generation_config pooler_config tokens_only "
    "skip_tokenizer_init worker_cls worker_extension_cls",
}
REFUSED = {name: f"use {name}: in the settings instead" for name in AppConfig.model_fields} | {
    name: why for why, names in _WHY.items() for name in names.split()
}
"""Arguments -> the reason of their refusal, with the remedy."""


def refused_engine_args(arguments: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each refused argument, by its name alone."""
    unnamed = {name: "vLLM's names look like kv_cache_dtype" for name in arguments if not _NAME.fullmatch(name)}
    return [f"engine_args.{name}: {why}" for name in arguments if (why := (REFUSED | unnamed).get(name))]


def parsed_engine_args(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments in the form of ``AsyncEngineArgs``; null is vLLM's default. Imports vllm, which takes seconds.

    Raises ValueError, with the parser's own message, for arguments and values that vLLM does not accept.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> Any:
            raise ValueError(f"engine_args: vLLM reports: {message}")

    parser = AsyncEngineArgs.add_cli_args(Parser())
    options = {action.dest for action in parser._actions}
    given = {name: value for name, value in arguments.items() if value is not None}
    words: list[str] = []
    for name, value in given.items():
        if name not in options:
            near = get_close_matches(name, options - REFUSED.keys(), n=1)
            hint = f"did you mean {near[0]}?" if near else "`vllm serve --help=all` lists them"
            raise ValueError(f"engine_args.{name}: vLLM has no such argument; {hint}")
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *map(_word, value)]
        else:
            words.append(f"--{flag}={_word(value)}")
    parsed = parser.parse_args(words)
    return {name: getattr(parsed, name) for name in given}


def check_drafts(drafting: Mapping[str, Any]) -> None:
    """Raise ValueError for a name that is no field of vLLM's ``speculative_config``. Imports vllm."""
    from vllm.config.speculative import SpeculativeConfig

    fields = SpeculativeConfig.__dataclass_fields__.keys()
    for name in drafting.keys() - fields:
        near = get_close_matches(name, fields, n=1)
        raise ValueError(
            f"speculative_config.{name}: vLLM has no such field{f'; did you mean {near[0]}?' * bool(near)}"
        )


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def fingerprint_with(model: str, arguments: Mapping[str, Any]) -> str:
    """Return a model's fingerprint that includes its arguments: any of them may change its KV."""
    digest = sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()
    return f"{model}/{digest[:32]}" if arguments else model
