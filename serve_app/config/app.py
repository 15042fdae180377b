"""Settings of a deployment: one flat pydantic model, used by the CLI, `serve run`, and a Serve config's ``args:``.

Owns names, defaults and bounds; settings that vLLM also has carry vLLM's names. Knows nothing of how any of it
is used. Secrets are not here: see ``tenancy.load_secret``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from serve_app.config.prompts import PublicPromptConfig, check_prompts
from serve_app.config.tenants import TenantConfig

Policy = Literal["estimated_ttft", "lmetric", "bounded_hash", "sglang", "power_of_two", "round_robin"]

MIB = 1024 * 1024


class AppConfig(BaseModel):
    """Everything ``build_app`` takes. Unknown names are refused, so that a typo is an error and not a default."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field("demo", description="'demo', 'small', or the path of a local checkpoint")
    served_model_name: str | None = Field(None, description="name in /v1/models; default: the model's own name")
    engine: Literal["torch", "simulated"] = Field(
        "torch", description="'simulated' replaces the forward by a cost model"
    )
    replicas: int = Field(2, ge=1, le=512, description="engine replicas")
    ingress_replicas: int = Field(1, ge=1, le=64, description="HTTP ingress replicas; each is a router of its own")
    replica_num_cpus: float = Field(0.1, ge=0, description="logical CPUs Ray reserves for an engine replica")
    replica_num_gpus: float = Field(0.0, ge=0, description="GPUs Ray reserves for an engine replica")

    block_size: int = Field(16, ge=1, le=1024, description="tokens in a KV block")
    num_blocks: int | None = Field(None, ge=2, description="blocks in a replica's pool; default: from kv_cache_bytes")
    kv_cache_bytes: int | None = Field(
        None, ge=MIB, description="bytes of a replica's KV pool; default: 512 MiB, on a GPU by gpu_memory_utilization"
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="part of a GPU that a replica may take: weights, a step's work, the rest KV"
    )
    max_model_len: int | None = Field(None, ge=2, description="tokens in prompt plus output; default: the model's own")
    max_num_seqs: int = Field(64, ge=1, le=4096, description="sequences running at once in a replica")
    max_num_batched_tokens: int = Field(2048, ge=16, description="tokens in one engine step")
    max_waiting_requests: int = Field(256, ge=1, description="requests waiting in a replica before it answers 429")
    admission: Literal["optimistic", "worst_case"] = Field(
        "optimistic", description="'worst_case' reserves room for all of max_tokens; else a full pool preempts"
    )
    enable_prefix_caching: bool = True
    speculative_model: str | None = Field(
        None,
        description="drafts tokens for the model: a checkpoint or built-in model of its vocabulary, an EAGLE-3 head",
    )
    num_speculative_tokens: int = Field(4, ge=1, le=32, description="tokens drafted ahead of each verification")
    host_cache_bytes: int = Field(0, ge=0, description="host memory of a replica for blocks evicted from its pool")
    disk_cache_bytes: int = Field(0, ge=0, description="disk of a replica for blocks evicted from the tier above")
    disk_cache_dir: Path | None = Field(None, description="directory of the disk tier; replicas take a slot in it each")
    disk_queue_bytes: int = Field(256 * MIB, ge=MIB, description="memory for blocks that wait to be written to disk")
    tier_load_ratio: float = Field(
        1.0, ge=0, description="load from a tier when that takes at most this part of computing the tokens"
    )
    kv_pull: bool = Field(True, description="copy a prefix from another replica where that is faster than computing it")
    max_pulls: int = Field(4, ge=1, le=64, description="prefixes that a replica copies from others at once")
    max_pull_bytes: int = Field(256 * MIB, ge=MIB, description="KV copied for one request at most")
    min_pull_tokens: int = Field(512, ge=1, description="a shorter missing prefix is computed")
    max_holders: int = Field(
        16, ge=1, description="replicas that hold one prefix at most; more hold it as its demand grows"
    )
    pin_budget: float = Field(
        0.25, ge=0, description="KV that explicit saves may keep: a part of the pool below 1, else blocks"
    )
    save_ttl_s: float | None = Field(
        None, gt=0, description="seconds after its last use that a saved prompt stays; default: until a reset"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field("auto", description="'cpu', 'cuda', or 'auto': a GPU where the replica sees one")
    attention_backend: str = Field(
        "auto",
        description="on a GPU, the first that passes a check at the start: fa3_torch, varlen_torch, sdpa",
    )
    enforce_eager: bool = Field(False, description="no CUDA graphs for decode steps")
    compile_model: bool = Field(
        False, description="on a CPU with a C++ compiler: compile the model at the start, for faster steps"
    )
    num_threads: int = Field(0, ge=0, description="torch threads of a replica; 0: the machine's cores / replicas")
    lora_adapters: dict[str, Path] = Field(default_factory=dict, description="adapters to preload: name -> path")
    max_loras: int = Field(4, ge=1, le=256, description="LoRA adapters in one batch of a replica")
    max_cpu_loras: int = Field(32, ge=1, le=4096, description="LoRA adapters in a replica's host memory")
    max_lora_rank: int = Field(64, ge=1, le=1024, description="adapters of a higher rank are refused")
    allow_runtime_lora: bool = Field(False, description="let operators load and unload adapters over HTTP")
    lora_root: Path | None = Field(None, description="only adapters inside this directory are loaded over HTTP")
    simulated_prefill_tokens_per_s: float = Field(5000.0, gt=0)
    simulated_decode_step_s: float = Field(0.02, gt=0)

    policy: Policy = "estimated_ttft"
    shadow_policy: Policy | None = Field(
        None, description="decides about every request beside `policy` without acting; counted apart"
    )
    no_replica_wait_s: float = Field(
        5.0, ge=0, le=600, description="requests wait this long after the last replica has gone, then get 503"
    )
    directory_max_blocks: int = Field(2_000_000, ge=1000, le=100_000_000, description="block hashes a router remembers")
    tokenizer_cache_bytes: int = Field(256 * MIB, ge=MIB, description="token ids and hashes an ingress remembers")
    max_queued_requests: int = Field(512, ge=1, description="requests an ingress holds while every replica is full")
    load_report_interval_s: float = Field(0.05, gt=0, le=10)

    default_max_tokens: int = Field(1024, ge=1, description="max_tokens of a chat that names none")
    max_body_bytes: int = Field(8 * MIB, ge=1024, description="larger bodies are refused with 413")
    request_timeout_s: float = Field(600.0, gt=0, description="a request that takes longer is ended with an error")

    tenants: list[TenantConfig] = Field(default_factory=list, description="none: one open `default` tenant")
    public_prompts: list[PublicPromptConfig] = Field(
        default_factory=list, description="system prompts whose KV all tenants share"
    )
    operator_key_sha256: list[str] = Field(default_factory=list, description="keys that may read /v1/cache/state")
    metrics_public: bool = Field(False, description="serve /metrics without an operator key although tenants exist")
    secret_file: Path | None = Field(
        None, description="deployment secret; default: $WARMPATH_SECRET, then a state file"
    )

    @model_validator(mode="after")
    def _settings_fit(self) -> AppConfig:
        if self.max_cpu_loras < self.max_loras:
            raise ValueError("max_cpu_loras must be at least max_loras")
        if self.device.startswith("cuda") and self.replica_num_gpus == 0:
            raise ValueError("device=cuda needs replica_num_gpus (1, say): Ray hides GPUs from who reserves none")
        if self.compile_model and self.speculative_model is not None:
            raise ValueError("compile_model and speculative_model cannot be used together: leave one out")
        if self.model_name in self.lora_adapters:
            raise ValueError(f"an adapter cannot be called {self.model_name!r}, as the model is")
        # Ray's workers need not run in the directory that a relative path means.
        self.lora_adapters = {name: path.expanduser().absolute() for name, path in self.lora_adapters.items()}
        self.lora_root = self.lora_root.expanduser().absolute() if self.lora_root is not None else None
        return self

    @model_validator(mode="after")
    def _prompts_fit(self) -> AppConfig:
        check_prompts(self.public_prompts)
        return self

    @property
    def model_name(self) -> str:
        """The name clients use: the configured one, else the built-in name or the checkpoint directory's."""
        return self.served_model_name or Path(self.model).name

    def routing(self) -> dict[str, Any]:
        """The router's part, as ``RouterSettings.from_json`` takes it."""
        return {
            "policy": self.policy,
            "shadow_policy": self.shadow_policy or "",
            "block_size": self.block_size,
            "max_blocks": self.directory_max_blocks,
            "no_replica_wait_s": self.no_replica_wait_s,
            "scoring": {"min_pull_tokens": self.min_pull_tokens, "max_holders": self.max_holders},
        }

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able copy, which ``AppConfig.model_validate`` reads back."""
        return self.model_dump(mode="json")
