"""All settings of a deployment except secrets: one flat pydantic model, with vLLM's names for settings of vLLM."""

import re
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    field_validator,
    model_validator,
)

from router.settings import DEFAULT_POLICY, DEFAULTS, MAX_ATTRIBUTES, PolicyName
from serve_app.config.cache import MIB, CacheSection, LifecycleSection
from serve_app.config.engine import ENGINES, EngineSection, EngineTraits, LoraSection
from serve_app.config.quantities import Bytes, Seconds
from serve_app.config.tenants import PlacedError, TenantsSection
from serve_app.config.traffic import TrafficLogConfig
from serve_app.config.workers import LISTS

ModelEntry = dict[str, Any]
"""One of `models`: the settings of its own, by name."""

MAX_REPLICAS = 512
MAX_MODELS = 64
START_WAIT_S = 600.0
"""The default of ``no_replica_wait_s`` with ``min_replicas: 0``: the first replica may load a large model."""

REPLICAS = "Replica"
"""The name of the deployment of a single model's replicas; those of one of several have names that begin with it."""

_HTTP = re.compile(r"https?://[^\s/]+(/\S*)?")
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_./ -]*")
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+", re.ASCII)


def is_hub_id(model: str) -> bool:
    """Return whether ``model`` is NAMESPACE/NAME of a hub, and not a directory or GGUF file."""
    return _HUB_ID.fullmatch(model) is not None and not model.endswith(".gguf") and not Path(model).is_dir()


class AutoscalingConfig(BaseModel):
    """The fields of `autoscaling`."""

    model_config = ConfigDict(extra="forbid")

    min_replicas: int = Field(
        1, ge=0, le=MAX_REPLICAS, description="minimum, and number at the start; 0: none without requests"
    )
    max_replicas: int = Field(ge=1, le=MAX_REPLICAS, description="maximum")
    target_ttft_s: Seconds = Field(
        2.0, gt=0, le=600, description="target for the p90 of TTFT, but at least 1.1 times the p90 of own prefill"
    )
    upscale_delay_s: Seconds = Field(10.0, ge=0, le=3600, description="time that more are needed before they start")
    downscale_delay_s: Seconds = Field(
        600.0, ge=10, le=86_400, description="time that fewer are enough before any stops"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError("max_replicas is less than min_replicas")
        return self


def is_template(value: object) -> bool:
    """Return whether a value is a template's text, not a path."""
    return isinstance(value, str) and ("{" in value or "\n" in value)


AttributeName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,63}$")]
AttributeValue = Annotated[str, StringConstraints(max_length=64)] | FiniteFloat


def _origin(text: str) -> str:
    """Return an origin as browsers write it."""
    origin = text.lower().rstrip("/")
    if origin != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin) is None:
        raise ValueError("must be the origin of a page, such as https://chat.example.com, or *")
    return origin


Origin = Annotated[str, AfterValidator(_origin)]


class RoutingSection(BaseModel):
    """The choice of a replica, and the requests that wait for one."""

    policy: PolicyName = Field(DEFAULT_POLICY, description="policy that chooses replicas (docs/explanation/routing.md)")
    shadow_policy: PolicyName | None = Field(
        None,
        description="policy that also decides, without acting; metrics, explain and `traffic_log` tell what it would "
        "have chosen. It sees only the caches that `policy` made",
    )
    replica_attributes: dict[AttributeName, AttributeValue] = Field(
        default_factory=dict,
        max_length=MAX_ATTRIBUTES,
        description="facts of replicas for policies, such as `{zone: a, price: 2.1}`, besides the labels of their Ray "
        "node; /v1/cache/state and explain show them",
    )
    no_replica_wait_s: Seconds = Field(
        DEFAULTS.no_replica_wait_s, ge=0, le=600, description="a request's wait without any replica, then 503"
    )
    directory_max_blocks: int = Field(
        DEFAULTS.max_blocks, ge=1000, le=100_000_000, description="block hashes a router remembers"
    )
    max_queued_requests: int = Field(
        512, ge=1, description="most requests that wait in an ingress; a tenant over its share of them gets 429"
    )
    load_report_interval_s: Seconds = Field(0.05, gt=0, le=10, description="time between a replica's load reports")


class AppConfig(TenantsSection, LoraSection, LifecycleSection, RoutingSection, CacheSection, EngineSection):
    """All settings. Unknown names are refused, so that a typo does not silently keep a default."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(
        "smollm2",
        description="'smollm2' (fetched once), 'demo' or 'small' (random weights), the directory of a checkpoint, "
        "a GGUF file, or a hub id; if it is not set and 'smollm2' cannot be fetched, `warmpath serve` uses 'demo'",
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub id; default: its main branch")
    served_model_name: str | None = Field(None, description="name in /v1/models; default: the model's own name")
    models: list[ModelEntry] = Field(
        default_factory=list,
        max_length=MAX_MODELS,
        description="several models at one address: a map of settings for each, by which it differs from those outside",
    )
    aliases: dict[str, str] = Field(
        default_factory=dict, description="other names of models and adapters: `{gpt-4o: qwen3-32b}`"
    )
    fallback: str | None = Field(
        None,
        description="in an entry of `models`: the model that answers while this one has no replica or its queue is "
        "full; x-warmpath-warning says so",
    )
    replicas: int = Field(2, ge=1, le=MAX_REPLICAS, description="number of engine replicas, without `autoscaling`")
    autoscaling: AutoscalingConfig | None = Field(None, description="replicas by load; default: fixed `replicas`")
    ingress_replicas: int = Field(1, ge=1, le=64, description="HTTP ingress replicas, each with its own router")
    default_max_tokens: int = Field(1024, ge=1, description="max_tokens of a chat without it")
    max_body_bytes: Bytes = Field(8 * MIB, ge=1024, description="larger bodies are refused with 413")
    request_timeout_s: Seconds = Field(600.0, gt=0, description="a request that takes longer ends with an error")
    strict: bool = Field(
        False, description="refuse requests with unknown fields; else x-warmpath-warning names the ignored fields"
    )
    agent_prompt_rules: bool = Field(
        True,
        description="keep prompts of known agents' clients the same where they change what no model needs; "
        "x-warmpath-prompt-rules names the rules that applied",
    )
    chat_template: str | None = Field(
        None, description="Jinja template in place of the checkpoint's: its text or the path of a file, as in vLLM"
    )
    tool_parser: str = Field(
        "auto",
        description="format of tool calls by vLLM's name, such as hermes; auto: the one that reads back what the chat "
        "template writes",
    )
    reasoning_parser: str = Field(
        "auto",
        description="tags around reasoning by vLLM's name, such as qwen3; auto: from chat template and special tokens; "
        "none: reasoning is text",
    )
    stop_in_reasoning: bool = Field(
        False, description="stop strings end an answer inside its reasoning too, as in vLLM; default: only its content"
    )
    allowed_hosts: list[str] | None = Field(
        None,
        description="names of this server, in lower case; requests to others are refused, except to addresses, "
        "localhost and .internal; default: any, but none for `warmpath serve` on loopback without tenants",
    )
    allowed_origins: list[Origin] = Field(
        default_factory=list,
        description="origins of other sites' pages whose scripts may ask this server from a browser (CORS), "
        "such as https://chat.example.com, or *; default: none",
    )
    enable_docs: bool | None = Field(
        None,
        description="serve /openapi.json, and /docs, which shows it to people; default: only without tenants; beside "
        "them a key opens /openapi.json",
    )
    otlp_endpoint: str | None = Field(
        None,
        description="URL of an OpenTelemetry collector (OTLP over HTTP) for traces of requests, such as "
        "http://127.0.0.1:4318; /v1/traces is appended; default: no traces",
    )
    traffic_log: TrafficLogConfig | None = Field(
        None,
        description="record each request as a line of JSON, without text, keys or names of tenants, for "
        "`warmpath replay`; default: off",
    )
    tokenizer_cache_bytes: Bytes = Field(256 * MIB, ge=MIB, description="an ingress's cache of token ids and hashes")

    @field_validator("chat_template")
    @classmethod
    def _text_of_the_template(cls, value: str | None) -> str | None:
        """Return the text, which goes to every process; the file need not be on all machines."""
        if value is None or is_template(value):
            return value
        try:
            return Path(value).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"must be a Jinja template or a file with one; {value!r} is neither ({error})") from None

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_a_collectors(cls, value: str | None) -> str | None:
        if value is not None and not _HTTP.fullmatch(value):
            raise ValueError("must be the URL of an OpenTelemetry collector, such as http://127.0.0.1:4318")
        return value

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if self.model_name in self.lora_adapters:
            raise ValueError(f"an adapter cannot be called {self.model_name!r}, as the model is")
        return self

    @model_validator(mode="after")
    def _ids_are_of_whole_blocks(self) -> Self:
        if self.traffic_log is not None and not self.models:
            try:
                self.traffic_log.tokens_of_a_block({self.block_size})
            except ValueError as error:
                raise PlacedError(("traffic_log", "block_tokens"), str(error)) from None
        return self

    @model_validator(mode="after")
    def _defaults_of_the_engine(self) -> Self:
        """Set the engine's own defaults. Given values that do not fit it are refused later (``lacking``)."""
        traits = self.engine_traits
        own = traits.defaults | ({} if self.replica_num_gpus else traits.cpu_defaults)
        for needing in traits.lacks():
            own |= needing.off
        if not self.first_replicas:
            own["no_replica_wait_s"] = START_WAIT_S
        if traits.external:
            own["replicas"] = max(1, sum("://" in entry and not entry.startswith(LISTS) for entry in self.workers))
            if self.autoscaling is not None:
                raise ValueError("autoscaling: engine=remote starts no servers, it follows the list of workers")
        for name in own.keys() - set(self.model_fields_set):
            self.__dict__[name] = own[name]  # not as given: another engine has other defaults
        return self

    @model_validator(mode="after")
    def _groups_are_fixed(self) -> Self:
        if self.autoscaling is not None and self.data_parallel_size > 1:
            raise ValueError(
                "autoscaling adds and ends single replicas, and data_parallel_size makes groups of them: leave one out"
            )
        return self

    def entries(self) -> list[ModelEntry]:
        """Return all settings of each of ``models``, for ``AppConfig.model_validate``: its own before those outside."""
        outside = self.model_dump(mode="json", exclude_unset=True, exclude=_OF_NO_MODEL)
        return [_joined(outside, entry) for entry in self.models]

    def served(self) -> dict[str, Self]:
        """Return the settings of each served model by its name; without ``models``, these of the only one."""
        if not self.models:
            return {self.model_name: self}
        served: dict[str, Self] = {}
        folders = Counter(str(entry.get("disk_cache_dir")) for entry in self.models)
        for entry, joined in zip(self.models, self.entries(), strict=True):
            one = type(self).model_validate(joined)
            own = "disk_cache_dir" in entry and folders[str(entry["disk_cache_dir"])] == 1
            if one.disk_cache_dir is not None and not own:
                # A slot's blocks have one form, so a replica of another model would drop them.
                one = one.model_copy(update={"disk_cache_dir": one.disk_cache_dir / slug(one.model_name)})
            served[one.model_name] = one
        return served

    @property
    def engine_traits(self) -> EngineTraits:
        """The engine's traits."""
        return ENGINES[self.engine]

    def lacking(self) -> list[str]:
        """Return a sentence for each setting that needs a capability which the engine does not have."""
        fields = type(self).model_fields
        unknown = [name for name in self.required_capabilities if name not in self.engine_traits.can]
        return [f"required_capabilities: engine={self.engine} has no {name}; leave it out" for name in unknown] + [
            f"{name}: engine={self.engine} has no {needing.what}; leave it out"
            for needing in self.engine_traits.lacks()
            for name in needing.names
            if getattr(self, name) != needing.off.get(name, fields[name].get_default(call_default_factory=True))
        ]

    @property
    def model_name(self) -> str:
        """The model's name for clients: the configured one, else the built-in name, hub id or path's last part."""
        if self.served_model_name or is_hub_id(self.model):
            return self.served_model_name or self.model
        return Path(self.model).name.removesuffix(".gguf")

    @property
    def first_replicas(self) -> int:
        """The number of replicas at the start, data-parallel ranks included."""
        return self.replicas * self.data_parallel_size if self.autoscaling is None else self.autoscaling.min_replicas

    @property
    def most_replicas(self) -> int:
        """The highest number of replicas."""
        return self.first_replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def documented(self) -> bool:
        """Whether /openapi.json and /docs are served."""
        return not self.tenants if self.enable_docs is None else self.enable_docs

    def routing(self) -> dict[str, Any]:
        """Return the router's settings for ``RouterSettings.from_json``."""
        return {
            "policy": self.policy,
            "shadow_policy": self.shadow_policy or "",
            "block_size": self.block_size,
            "max_blocks": self.directory_max_blocks,
            "no_replica_wait_s": self.no_replica_wait_s,
            "scoring": {"min_pull_tokens": self.min_pull_tokens, "max_holders": self.max_holders},
        }

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able copy for ``AppConfig.model_validate``; with ``models``, of the given settings alone."""
        return self.model_dump(mode="json", exclude_unset=bool(self.models))


SHARED = frozenset(TenantsSection.model_fields) - {"public_prompts", "prompts_dir"} | {
    *(
        "models",
        "aliases",
        "ingress_replicas",
        "allowed_hosts",
        "allowed_origins",
        "enable_docs",
        "otlp_endpoint",
        "max_body_bytes",
    ),
    *("shutdown_timeout_s", "agent_prompt_rules", "traffic_log"),
}
"""The settings that all models have in common, so no entry of `models` has them."""

_OF_NO_MODEL = {"models", "served_model_name", "fallback"}


def _joined(outside: ModelEntry, entry: ModelEntry) -> ModelEntry:
    """Return all settings of one of ``models``. What says how many replicas, or which weights, is of one piece."""
    joined = {**outside, **entry}
    for name, other in (("replicas", "autoscaling"), ("autoscaling", "replicas"), ("model", "revision")):
        if name in entry and other not in entry:
            joined.pop(other, None)
    return joined


def deployment_of(model: str, settings: AppConfig) -> str:
    """Return the name of the Serve deployment of a served model's replicas."""
    return f"{REPLICAS}-{slug(model)}" if settings.models else REPLICAS


def slug(name: str) -> str:
    """Return a model's name as a part of names of deployments, directories and notices.

    Only `/`, a space and `-` are not told apart; the settings are refused then (``config.live``).
    """
    made = re.sub(r"[^A-Za-z0-9_.-]", "-", name)
    return made if _PLAIN.fullmatch(name) else f"{made}-{sha256(name.encode()).hexdigest()[:8]}"
