"""Sizes and switches of a vLLM engine, and their form as engine arguments and environment. Imports no vllm.

Names are vLLM's. Its defaults are overridden where they change answers, expose prompts or hide KV events.
"""

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from router.protocol.samples import Labels, Sample
from serve_app.config.cache import CacheSection
from serve_app.config.engine import (
    MAX_MODEL_LEN,
    VLLM_CPU_BLOCK_SIZE,
    Capability,
    EngineSection,
    ExactResume,
    LoraSection,
)
from serve_app.engine.vllm.event_endpoints import EventEndpoints

CONFIG_ENDS = "warmpath_end_token_ids"
"""Key of an answer's end tokens for the token choice, in vLLM's ``additional_config``."""

CONFIG_OFF = "warmpath.off"
"""Key of the names of capabilities that are off, there too."""

IN_CORE: frozenset[Capability] = frozenset({"turns", "shares", "public_prompts", "store_kv", "predictions"})
"""The capabilities of this package's scheduler."""

CHECKED: frozenset[Capability] = IN_CORE | {
    *("saves", "copies", "tiers", "host_memory"),
    *("exact_resume", "resume", "grammars", "draft_hits"),
}
"""Those that the installed version of vLLM may not allow: see ``scheduling.hooks``."""

CONFIG_EXACT = "warmpath.exact"
"""Key, there too, of whether each token is drawn by (seed, position)."""

EXECUTOR = "serve_app.engine.vllm.executor.InCore"
"""vLLM's path to the executor for a CPU with one rank."""

SCHEDULER = "serve_app.engine.vllm.scheduling.scheduler.tenant_scheduler"
"""vLLM's path to its scheduler."""

WHOLE_HITS = "disable_eagle_block_drop"
"""The field of ``speculative_config`` with which a hit keeps its last block beside drafts."""

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum ranks that vLLM supports. Source: vLLM's ``MaxLoRARanks``."""

_CPU_MEMORY_PART = 0.05
"""``kv_cache_memory_bytes`` sizes the pool; vLLM refuses to start unless this part of a node's memory is free."""

_CACHE, _ENGINE, _LORA = CacheSection(), EngineSection(), LoraSection()


@dataclass(frozen=True, slots=True)
class DataParallel:
    """One of ``size`` data-parallel ranks of a model with experts, which meet at ``port`` of this machine."""

    rank: int
    size: int
    port: int


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """A replica's settings for vLLM."""

    model: str
    """A checkpoint's directory."""
    weights_bytes: int = 0
    """When loaded, 0 if unknown."""
    end_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer."""
    block_size: int = VLLM_CPU_BLOCK_SIZE
    block_bytes: int = 0
    """Bytes of one block's KV, in all ranks."""
    num_blocks: int | None = None
    """None: as many as ``kv_cache_bytes`` holds, or as ``gpu_memory_utilization`` leaves space for; not on a CPU."""
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = _CACHE.gpu_memory_utilization
    max_model_len: int = MAX_MODEL_LEN
    max_num_seqs: int = _ENGINE.max_num_seqs
    max_num_batched_tokens: int = _ENGINE.max_num_batched_tokens
    max_waiting_requests: int = _ENGINE.max_waiting_requests
    enable_prefix_caching: bool = True
    dtype: str = "auto"
    """"auto" is the model's own."""
    model_fingerprint: str = ""
    """Of config and weights."""
    copies: bool = False
    """Whether KV is copied to and from other replicas, or tiers."""
    tiers: CacheSection = field(default_factory=CacheSection)
    """The tiers below the pool."""
    pin_budget: float = 0.0
    """The limit of pins, as a part of the pool if below 1, else in its blocks."""
    enforce_eager: bool = False
    num_threads: int = 1
    """Of the CPU build, in all ranks."""
    lora: bool = False
    """Whether adapters are allowed."""
    max_loras: int = _LORA.max_loras
    max_cpu_loras: int = _LORA.max_cpu_loras
    max_lora_rank: int = _LORA.max_lora_rank
    speculative_config: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's, empty without drafts."""
    tenant_shares: Mapping[str, float] = field(default_factory=dict)
    """Weights by tenant."""
    required_capabilities: Sequence[Capability] = ()
    """Those without which vLLM does not start."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel: DataParallel | None = None
    """None for an engine that computes alone, which vLLM requires without experts."""
    kv_offloading_size: float | None = None
    """GiB of host memory for computed blocks, None without."""
    offloading: Mapping[str, Any] = field(default_factory=dict)
    """More fields of vLLM's connector, as tests need on a CPU."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """More of vLLM's arguments, as given in the settings."""
    exact_resume: ExactResume = "auto"
    """As in the settings."""

    def without(self, off: Collection[Capability]) -> "VllmSettings":
        """Return the settings for a vLLM in which some capabilities are off."""
        return replace(
            self,
            copies=self.copies and "copies" not in off,
            tiers=CacheSection() if "tiers" in off else self.tiers,
            pin_budget=0.0 if "saves" in off else self.pin_budget,
            exact_resume="off" if "exact_resume" in off else self.exact_resume,
            speculative_config={
                name: value
                for name, value in self.speculative_config.items()
                if name != WHOLE_HITS or "draft_hits" not in off
            },
            kv_offloading_size=None if "host_memory" in off else self.kv_offloading_size,
        )

    @property
    def transfer(self) -> bool:
        """Whether vLLM gets a KV connector, for copies or pins."""
        return self.copies or self.pin_budget > 0

    @property
    def exact(self) -> bool:
        """Whether each token is drawn by (seed, position), outside vLLM."""
        return self.exact_resume == "on" or (self.exact_resume == "auto" and self.dtype == "float32")

    @property
    def ranks(self) -> int:
        """Number of processes that compute, each with a part of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


def engine_arguments(
    settings: VllmSettings, endpoints: EventEndpoints, *, on_cpu: bool, off: Collection[Capability] = ()
) -> dict[str, Any]:
    """Return the arguments of vLLM's ``AsyncEngineArgs``; its events go to ``endpoints`` alone.

    ``off``: capabilities that this vLLM does not allow.
    """
    return {
        "model": settings.model,
        "dtype": settings.dtype,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # else the model's own temperature and top-p would apply by default
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "enforce_eager": settings.enforce_eager,
        "max_logprobs": 20,  # the limit of OpenAI's API
        "worker_extension_cls": "serve_app.engine.vllm.sampling.processor.SamplingExtension",
        "additional_config": {
            CONFIG_ENDS: list(settings.end_token_ids),
            CONFIG_OFF: sorted(off),
            CONFIG_EXACT: settings.exact,
        },
        "scheduler_cls": SCHEDULER,
        "scheduling_policy": "priority",  # all requests have the same one, so arrival decides; copies go first
        "enable_logging_iteration_details": True,  # reports the prompt tokens computed by each step
        "disable_log_stats": True,
        "enable_log_requests": False,  # requests hold the tenants' roots
        **_pool_arguments(settings, on_cpu=on_cpu),
        **_event_arguments(settings, endpoints),
        **_connector_arguments(settings, endpoints),
        **_rank_arguments(settings, on_cpu=on_cpu),
        **_draft_arguments(settings),
        **_lora_arguments(settings),
    }


def _pool_arguments(settings: VllmSettings, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments of the pool: its blocks, how they are named and grouped, and their number or bytes."""
    blocks = settings.num_blocks
    arguments: dict[str, Any] = {
        "block_size": settings.block_size,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "prefix_caching_hash_algo": "sha256",  # collision-proof: vLLM compares no tokens
        # Copies need all KV in one group: a prefix is sent in parts, of which windows hold the last one alone, and vLLM
        # stops for good if a load into several groups fails. Without them the layers' groups are vLLM's own.
        "disable_hybrid_kv_cache_manager": True if settings.copies else None,
        "prefix_cache_retention_interval": None,  # else events of windows and states do not identify their blocks
        "gpu_memory_utilization": _CPU_MEMORY_PART if on_cpu else settings.gpu_memory_utilization,
    }
    if blocks is not None:
        arguments["num_gpu_blocks_override"] = blocks + 1  # one is vLLM's null block
    if on_cpu and blocks is not None:
        arguments["kv_cache_memory_bytes"] = settings.block_bytes * (blocks + 1) // settings.ranks  # vLLM's is per rank
    elif settings.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = settings.kv_cache_bytes // settings.ranks
    return arguments


def _event_arguments(settings: VllmSettings, endpoints: EventEndpoints) -> dict[str, Any]:
    if not settings.enable_prefix_caching:
        return {}
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    return {"kv_events_config": events | {"endpoint": endpoints.publish, "replay_endpoint": endpoints.replay}}


def _connector_arguments(settings: VllmSettings, endpoints: EventEndpoints) -> dict[str, Any]:
    """Return the argument of the KV connectors: ours for copies and pins, vLLM's own for host memory."""
    connectors: list[dict[str, Any]] = []
    if settings.transfer:
        connectors.append(
            {
                "kv_connector": "WarmpathConnector",
                "kv_connector_module_path": "serve_app.engine.vllm.transfer.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"directory": str(endpoints.directory), "copies": settings.copies},
            }
        )
    if settings.kv_offloading_size:
        connectors.append(offloading_connector(settings.kv_offloading_size, settings.offloading))
    if not connectors:
        return {}
    children = {"kv_connector_extra_config": {"connectors": connectors}}
    both = {"kv_connector": "MultiConnector", "kv_role": "kv_both", **children}
    one = both if len(connectors) > 1 else connectors[0]
    return {"kv_transfer_config": {**one, "kv_load_failure_policy": "recompute"}}


def _rank_arguments(settings: VllmSettings, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments of the processes that compute."""
    group = settings.data_parallel
    arguments: dict[str, Any] = {
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
    }
    if group is not None:
        arguments |= {
            "data_parallel_size": group.size,
            "data_parallel_rank": group.rank,
            "data_parallel_address": "127.0.0.1",
            "data_parallel_rpc_port": group.port,
        }
    if settings.ranks > 1 or group is not None:
        arguments["distributed_executor_backend"] = "mp"  # not Ray's, which vLLM would choose in a placement group
    elif on_cpu:
        arguments["distributed_executor_backend"] = EXECUTOR  # for a GPU vLLM's own choice is as good
    return arguments


def _draft_arguments(settings: VllmSettings) -> dict[str, Any]:
    if not settings.speculative_config:
        return {}
    arguments: dict[str, Any] = {"speculative_config": dict(settings.speculative_config)}
    if settings.exact:
        arguments["async_scheduling"] = False  # positions are known only once a step's accepted drafts are
    return arguments


def _lora_arguments(settings: VllmSettings) -> dict[str, Any]:
    if not settings.lora:
        return {}
    return {
        "enable_lora": True,
        "max_loras": settings.max_loras,
        "max_cpu_loras": settings.max_cpu_loras,
        "max_lora_rank": lora_rank(settings.max_lora_rank),
    }


def offloading_connector(size_gib: float, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fields of vLLM's own connector for host memory, which also keeps answers: the next turn reads them."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": size_gib * (1 << 30),
            "eviction_policy": "TenantPolicy",
            "cache_policy_module_path": "serve_app.engine.vllm.scheduling.host_memory",
            "offload_prompt_only": False,
            **(more or {}),
        },
    }


def capability_samples(off: Collection[Capability], labels: Labels) -> list[Sample]:
    """Return the gauges that say which capabilities this vLLM allows."""
    name = "warmpath_engine_capability"
    return [(name, (*labels, ("capability", one)), float(one not in off)) for one in sorted(CHECKED)]


def lora_rank(rank_needed: int) -> int:
    """Return the least rank that vLLM supports and that holds ``rank_needed``. Raises ValueError over its largest."""
    for rank in LORA_RANKS:
        if rank_needed <= rank:
            return rank
    raise ValueError(f"max_lora_rank={rank_needed}: with engine=vllm it is at most {LORA_RANKS[-1]}")


def set_environment(environment: MutableMapping[str, str], num_threads: int) -> None:
    """Set the environment variables of vLLM and its processes; call it before vllm is imported."""
    environment["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"  # whole SHA-256s, not 64 bits of them
    environment.setdefault("VLLM_COMPUTE_NANS_IN_LOGITS", "1")  # else a broken model's answers look like answers
    environment["VLLM_NO_USAGE_STATS"] = "1"
    environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # several replicas share a machine's cores
    environment["OMP_NUM_THREADS"] = str(num_threads)
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environment.setdefault("HF_HUB_OFFLINE", "1")
