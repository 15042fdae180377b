"""The engines and their settings. A new engine is a package, its name in ``EngineName``, and a row in ``ENGINES``."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from serve_app.config.cache import TIER_SETTINGS
from serve_app.config.quantities import Seconds
from serve_app.config.workers import check_entry

EngineName = Literal["torch", "vllm", "simulated", "remote"]

SIMULATED_DECODE_EACH_S = 0.0005
"""What each sequence adds to a simulated engine's decode step."""
ExactResume = Literal["auto", "on", "off"]

VLLM_CPU_BLOCK_SIZE = 32
"""The default of `block_size` for vLLM without a GPU, which computes in multiples of it there."""

MAX_MODEL_LEN = 32_768
"""The default of `max_model_len` of an engine that is made without a model's own."""

NGRAM = "ngram"
"""The only `speculative_model`. It is not a model: it drafts the tokens that followed the same tokens before."""

SPEC_ARGS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
"""vLLM's shorter arguments -> the fields of its ``speculative_config`` that they set."""

_COUNTED = frozenset({NGRAM, "ngram_gpu", "eagle", "eagle3", "draft_model"})
"""Methods of drafts for which vLLM has no number of tokens of its own."""

WITHOUT_KV = frozenset({NGRAM, "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""Methods of drafts that keep no KV."""

_OF_PAST = WITHOUT_KV | {"draft_model", "dflash", "dspark"}
"""Methods whose KV, if any, depends on no later token."""

MOST_AHEAD = 16
"""The number of drafted tokens to expect if only the drafter knows it."""

VLLM_VERSIONS = "0.31 to 0.33"
"""Those that pyproject.toml allows."""

VLLM_MISSING = (
    f"engine=vllm needs vLLM {VLLM_VERSIONS} in the environment of the replicas: on a GPU run `pip install '.[vllm]'` "
    "in a clone; on a CPU run `make venv-vllm`, then start with .venv-vllm/bin/warmpath"
)


def vllm_missing() -> bool:
    """Return whether vLLM is not installed here."""
    return importlib.util.find_spec("vllm") is None


Capability = Literal[
    "prefixes",
    "copies",
    "saves",
    "tiers",
    "adapters",
    "step_time",
    "ranks",
    "drafts",
    "turns",
    "shares",
    "public_prompts",
    "store_kv",
    "predictions",
    "exact_resume",
    "resume",
    "grammars",
    "draft_hits",
    "servers",
    "host_memory",
]
"""What an engine need not have: beside the settings in ``CAPABILITIES``, the methods with a body in
``engine.protocol.Engine``. "ranks": several in a replica, and arguments of its own; "drafts": speculation."""


@dataclass(frozen=True, slots=True)
class CapabilitySettings:
    """The settings ``names`` that need a capability; ``what`` it is. ``off``: their values without it, if not defaults.

    An engine without the capability gets these values, and any other value is refused. ``without``: what users notice
    when an engine that has it cannot keep it with the installed version of its library.
    """

    what: str
    names: tuple[str, ...] = ()
    off: Mapping[str, Any] = field(default_factory=dict)
    without: str = ""


CAPABILITIES: dict[Capability, CapabilitySettings] = {
    "prefixes": CapabilitySettings(
        "prefix cache",
        ("enable_prefix_caching", "session_wait_s"),
        {"enable_prefix_caching": False, "session_wait_s": 0.0},
    ),
    "copies": CapabilitySettings(
        "copies of KV to or from other replicas",
        ("kv_pull", "prewarm", "handover"),
        {"kv_pull": False, "prewarm": False, "handover": False},
        without="no KV is copied between replicas",
    ),
    "saves": CapabilitySettings(
        "saved prompts", ("pin_budget", "save_ttl_s"), {"pin_budget": 0.0}, without="no prompt is kept in the cache"
    ),
    "tiers": CapabilitySettings(
        "tiers below its pool", TIER_SETTINGS, without="no KV goes to disk or to an object store"
    ),
    "host_memory": CapabilitySettings(
        "offloading of vLLM's; its own host memory is host_cache_bytes",
        ("kv_offloading_size",),
        without="evicted blocks are lost",
    ),
    "adapters": CapabilitySettings("LoRA adapters", ("lora_adapters", "allow_runtime_lora")),
    "step_time": CapabilitySettings("steps sized by time, only by max_num_batched_tokens", ("max_itl_ms",)),
    "turns": CapabilitySettings(
        "turns of tenants inside a step", without="prompts are computed in the order of arrival, whoever floods"
    ),
    "shares": CapabilitySettings(
        "tenants' shares of the cache", without="one tenant's prompts can evict the cache of all others"
    ),
    "public_prompts": CapabilitySettings(
        "prompts that tenants share", without="each tenant computes registered prompts anew, unseen by the routers"
    ),
    "store_kv": CapabilitySettings(
        "requests that leave no KV", without="requests with store_kv false read no cached KV, and theirs stays unread"
    ),
    "predictions": CapabilitySettings(
        "exact knowledge of its cache", without="requests go by load alone, and no KV is copied"
    ),
    "exact_resume": CapabilitySettings(
        "token-exact continuation", without="an interrupted answer continues with other tokens"
    ),
    "resume": CapabilitySettings(
        "interrupted answers as one", without="penalties and draws of an interrupted answer begin anew where it goes on"
    ),
    "grammars": CapabilitySettings("grammars", without="requests with a grammar, or very long rules, are refused"),
    "draft_hits": CapabilitySettings(
        "hits beside drafts", without="beside drafts a prompt finds a block less, and less than predicted"
    ),
    "servers": CapabilitySettings("servers that it does not start", ("workers", "worker_key_file")),
}


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """An engine's traits. ``maker``: where its ``engine.protocol.EngineMaker`` is, as "module:name".

    ``can``: its optional capabilities. ``simulated``: no model runs.
    ``built_in``: it loads models with transformers. ``missing``: the reason why it cannot be used in this environment,
    or "". ``defaults``, ``cpu_defaults`` (without GPUs): its own defaults of settings. ``tried``: the module that tries
    what the installed version of its library allows, "" for none. ``external``: its servers are no processes of ours.
    """

    maker: str
    can: frozenset[Capability]
    simulated: bool = False
    built_in: bool = False
    missing: Callable[[], str] = str
    defaults: dict[str, Any] = field(default_factory=dict)
    cpu_defaults: dict[str, Any] = field(default_factory=dict)
    tried: str = ""
    external: bool = False

    def lacks(self) -> list[CapabilitySettings]:
        """Return the settings of each capability that it does not have."""
        return [needing for capability, needing in CAPABILITIES.items() if capability not in self.can]


_OF_ALL: frozenset[Capability] = frozenset(
    {
        *("prefixes", "copies", "saves", "tiers", "adapters"),
        *("turns", "shares", "public_prompts", "store_kv", "predictions", "exact_resume"),
        *("resume", "grammars"),
    }
)
_BUILT_IN: frozenset[Capability] = _OF_ALL | {"step_time"}

ENGINES: dict[EngineName, EngineTraits] = {
    "torch": EngineTraits("serve_app.replica.engine_factory:TORCH", _BUILT_IN, built_in=True),
    "vllm": EngineTraits(
        "serve_app.replica.engine_factory:VLLM",
        _OF_ALL | {"ranks", "drafts", "draft_hits", "host_memory"},
        missing=lambda: VLLM_MISSING if vllm_missing() else "",
        defaults={"kv_pull": False, "prewarm": False, "handover": False, "pin_budget": 0.0},
        cpu_defaults={"block_size": VLLM_CPU_BLOCK_SIZE},
        tried="serve_app.engine.vllm.scheduling.hooks",
    ),
    "simulated": EngineTraits("serve_app.replica.engine_factory:SIMULATED", _BUILT_IN, simulated=True),
    "remote": EngineTraits(
        "serve_app.replica.engine_factory:REMOTE",
        frozenset({"prefixes", "adapters", "predictions", "grammars", "servers"}),
        external=True,
    ),
}


class EngineSection(BaseModel):
    """The engine of a replica."""

    engine: EngineName = Field(
        "torch",
        description="'torch': the built-in engine; 'vllm': vLLM in each replica; 'simulated': a cost model only; "
        "'remote': servers that already run (docs/how-to/remote.md)",
    )
    workers: list[str] = Field(
        default_factory=list,
        max_length=512,
        description="with engine remote: URLs of servers, http://HOST:PORT; `file:PATH` names a file of them, one a "
        "line, and `dns+http://NAME:PORT` every address of a name; both may change at any time",
    )
    worker_key_file: Path | None = Field(
        None, description="private file with the API key of the workers; default: WARMPATH_WORKER_KEY"
    )
    replica_num_cpus: float = Field(0.1, ge=0, description="logical CPUs Ray reserves for an engine replica")
    replica_num_gpus: float = Field(
        0.0,
        ge=0,
        description="GPUs Ray reserves for an engine replica, one for each rank; `warmpath serve` with engine vllm "
        "uses the GPUs it finds",
    )
    tensor_parallel_size: int = Field(
        1, ge=1, le=64, description="with engine vllm: ranks on one node, each with a part of every layer"
    )
    pipeline_parallel_size: int = Field(
        1, ge=1, le=64, description="with engine vllm: stages on one node, each with a part of the layers"
    )
    data_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="with engine vllm: data-parallel ranks on one node, each a replica with its own cache and load; "
        "`replicas` counts groups of them",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="with engine vllm: further arguments of vLLM, by its names (docs/tutorials/vllm.md)",
    )
    required_capabilities: list[Capability] = Field(
        default_factory=list,
        description="capabilities without which a replica does not start; `warmpath doctor` lists the engine's",
    )
    exact_resume: ExactResume = Field(
        "auto",
        description="with engine vllm, whether a seeded answer that another replica goes on with has the very tokens "
        "that it would have had: 'on' draws each token by seed and position, outside vLLM's sampler; 'auto' with "
        "float32 alone, since 16 bits can change a token with the batch; 'off' never",
    )
    max_model_len: int | None = Field(None, ge=2, description="most tokens of prompt plus output; default: the model's")
    max_num_seqs: int = Field(64, ge=1, le=4096, description="most sequences that run at once in a replica")
    max_num_batched_tokens: int = Field(2048, ge=16, description="most tokens in one engine step")
    max_itl_ms: float | None = Field(
        None, gt=0, description="longest step while answers are generated; prompt chunks are shortened to fit"
    )
    max_waiting_requests: int = Field(
        256, ge=1, description="most requests that wait in a replica; it refuses more, and their ingress retries"
    )
    speculative_model: str | None = Field(
        None,
        description="with engine vllm 'ngram': draft the tokens that followed the same tokens before in the sequence",
    )
    num_speculative_tokens: int = Field(
        4, ge=1, le=32, description="with engine vllm: tokens drafted ahead of each verification"
    )
    speculative_config: dict[str, Any] | None = Field(
        None, description="with engine vllm: drafts by any of vLLM's methods, with its fields (docs/tutorials/vllm.md)"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="format of weights and KV; 'auto': bfloat16 if the device multiplies it, else float32"
    )
    device: str = Field("auto", description="'cpu', 'cuda', or 'auto': a GPU if the replica has one")
    enforce_eager: bool = Field(False, description="with engine vllm: no CUDA graphs, no compilation")
    num_threads: int = Field(0, ge=0, description="torch threads of a replica; 0: the machine's cores / replicas")
    simulated_prefill_tokens_per_s: float = Field(5000.0, gt=0, description="prefill rate of a simulated engine")
    simulated_decode_step_s: Seconds = Field(0.02, gt=0, description="time of a simulated engine's decode step")

    @field_validator("workers")
    @classmethod
    def _name_workers(cls, value: list[str]) -> list[str]:
        for entry in value:
            check_entry(entry)
        return value

    @property
    def hf_overrides(self) -> dict[str, Any]:
        """The fields in ``engine_args`` that replace fields of the model's config.json."""
        overrides = self.engine_args.get("hf_overrides")
        return overrides if isinstance(overrides, dict) else {}

    @property
    def drafting(self) -> dict[str, Any]:
        """vLLM's ``speculative_config``, whichever settings give it; empty without drafts."""
        if self.speculative_model is not None:
            return {"method": NGRAM, "num_speculative_tokens": self.num_speculative_tokens}
        short = {field: self.engine_args.get(name) for name, field in SPEC_ARGS.items()}
        given = {name.replace("-", "_"): value for name, value in (self.speculative_config or {}).items()}
        given |= {field: value for field, value in short.items() if value is not None}
        if given.get("model") in (NGRAM, f"[{NGRAM}]") and given.get("method") in (None, NGRAM):
            given = {**given, "method": given.pop("model").strip("[]")}
        if given.get("method") in _COUNTED:
            given.setdefault("num_speculative_tokens", self.num_speculative_tokens)
        return given

    @property
    def draft_lookahead_tokens(self) -> int:
        """How many tokens after a position may change a drafter's KV of it; 0 without such a drafter."""
        drafting = self.drafting
        if not drafting or drafting.get("method") in _OF_PAST:
            return 0
        return int(drafting.get("num_speculative_tokens") or MOST_AHEAD)

    @property
    def rank_sizes(self) -> tuple[int, int]:
        """A replica's tensor-parallel ranks, which split each layer, and pipeline stages, which split the layers."""
        return self.tensor_parallel_size, self.pipeline_parallel_size

    @property
    def ranks(self) -> int:
        """The number of a replica's compute processes, each with its own device."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @model_validator(mode="after")
    def _engine_fits(self) -> Self:
        can, external = ENGINES[self.engine].can, ENGINES[self.engine].external
        if "ranks" not in can and (self.ranks * self.data_parallel_size > 1 or self.engine_args):
            own = "does not start its servers" if external else "computes on one device"
            raise ValueError(
                f"engine={self.engine} {own} and accepts no engine_args: set engine: vllm, or remove "
                "tensor_parallel_size, pipeline_parallel_size, data_parallel_size and engine_args"
            )
        if self.speculative_model is not None and (self.speculative_model != NGRAM or "drafts" not in can):
            raise ValueError(
                f"speculative_model={self.speculative_model!r} with engine={self.engine}: only {NGRAM!r} is supported, "
                "with engine: vllm; name other drafters in speculative_config"
            )
        if self.speculative_config and "drafts" not in can:
            raise ValueError(f"speculative_config with engine={self.engine}: only engine: vllm drafts tokens")
        short = [f"engine_args.{name}" for name in SPEC_ARGS if self.engine_args.get(name) is not None]
        named = {name.replace("-", "_") for name in self.speculative_config or ()}
        twice = [name for name in short if SPEC_ARGS[name.partition(".")[2]] in named]
        ways = ["speculative_config"] * bool(named) + short
        if twice or (ways and self.speculative_model is not None):
            other = "speculative_config" if twice else "speculative_model"
            raise ValueError(f"{other} and {(twice or ways)[0]} both say how to draft; leave one out")
        gpus = self.ranks if max(self.ranks, self.replica_num_gpus) > 1 else self.replica_num_gpus
        if "ranks" in can and self.replica_num_gpus not in (0, gpus):
            raise ValueError(
                f"replica_num_gpus={self.replica_num_gpus:g}, but tensor_parallel_size x pipeline_parallel_size is "
                f"{self.ranks}: each rank needs a GPU, so set replica_num_gpus: {self.ranks}"
            )
        if self.device.startswith("cuda") and self.replica_num_gpus == 0:
            raise ValueError("device=cuda needs replica_num_gpus (1, say): a replica sees only GPUs that it reserves")
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must exceed max_num_seqs, or prefill could starve")
        return self


class LoraSection(BaseModel):
    """LoRA adapters."""

    lora_adapters: dict[str, Path] = Field(default_factory=dict, description="adapters to preload: name -> path")
    max_loras: int = Field(4, ge=1, le=256, description="LoRA adapters in one batch of a replica")
    max_cpu_loras: int = Field(32, ge=1, le=4096, description="LoRA adapters in a replica's host memory")
    max_lora_rank: int = Field(64, ge=1, le=1024, description="adapters of a higher rank are refused")
    allow_runtime_lora: bool = Field(False, description="let operators load and unload adapters over HTTP")
    lora_root: Path | None = Field(None, description="only adapters inside this directory are loaded over HTTP")

    @model_validator(mode="after")
    def _adapters_fit(self) -> Self:
        if self.max_cpu_loras < self.max_loras:
            raise ValueError("max_cpu_loras must be at least max_loras")
        # Ray's workers may run in another directory.
        self.lora_adapters = {name: path.expanduser().absolute() for name, path in self.lora_adapters.items()}
        self.lora_root = self.lora_root.expanduser().absolute() if self.lora_root is not None else None
        return self
