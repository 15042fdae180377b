"""Settings of tenants, keys, common prompts, usage, and stored responses, files and batches."""

from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from serve_app.config.prompts import PublicPromptConfig, check_prompts
from serve_app.config.quantities import Bytes, Seconds

Sha256Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class ApiKeyConfig(BaseModel):
    """One API key, identified by its digest. Clients with an expired or revoked key get a specific error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: Sha256Hex = Field(description="SHA-256 of the key, printed by `warmpath keys new`")
    expires: AwareDatetime | None = Field(None, description="time of expiry, such as 2027-01-31T00:00:00Z")
    revoked: bool = Field(False, description="refuse the key from now on")


def _with_names(value: Any) -> Any:
    return {"sha256": value} if isinstance(value, str) else value


TenantKey = Annotated[ApiKeyConfig, BeforeValidator(_with_names, json_schema_input_type=Sha256Hex | ApiKeyConfig)]
"""A key in the settings: only its digest, or with expiry and revocation."""


class PlacedError(ValueError):
    """A mistake that a check of several settings found at one place of them."""

    def __init__(self, place: tuple[int | str, ...], sentence: str) -> None:
        super().__init__(sentence)
        self.place = place


class PriceConfig(BaseModel):
    """Prices of a model's or adapter's tokens, for a million of them, in any currency."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: Decimal = Field(ge=0, description="prompt tokens neither read from the cache nor written to it")
    cached: Decimal | None = Field(None, ge=0, description="prompt tokens read from the cache; default: as `input`")
    write: Decimal | None = Field(None, ge=0, description="prompt tokens written to the cache; default: as `input`")
    output: Decimal = Field(ge=0, description="tokens of answers")

    @property
    def read(self) -> Decimal:
        """The price of tokens from the cache."""
        return self.input if self.cached is None else self.cached

    @property
    def written(self) -> Decimal:
        """The price of tokens that are put into it."""
        return self.input if self.write is None else self.write

    @property
    def break_even_reads(self) -> float | None:
        """The reads after which a written token has paid for itself; None: reading costs as much as computing."""
        saved = self.input - self.read
        return float(max(Decimal(), self.written - self.input) / saved) if saved > 0 else None


class BudgetConfig(BaseModel):
    """What a tenant may spend in a period of UTC: tokens, or money by `prices`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: int | None = Field(None, ge=1, description="tokens of prompts, cached or not, and of answers")
    money: Decimal | None = Field(None, gt=0, description="in the currency of `prices`; what has no price is free")
    period: Literal["day", "month"] = Field("month", description="day or month, in UTC")
    hard: bool = Field(True, description="false: refuse nothing; the metric and /v1/usage tell what is used")

    @property
    def most(self) -> Decimal:
        """The amount."""
        return Decimal(self.tokens) if self.tokens is not None else self.money or Decimal()

    def formatted(self, amount: Decimal) -> str:
        """Return an amount for a sentence."""
        return f"{amount:,} tokens" if self.tokens is not None else f"{amount:,.2f}"

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        if (self.tokens is None) == (self.money is None):
            raise ValueError("a budget has either `tokens` or `money`")
        return self


class TenantConfig(BaseModel):
    """One tenant in the settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="shown in metrics")
    key_sha256: list[TenantKey] = Field(
        min_length=1,
        description="SHA-256 of each of the tenant's API keys, or `{sha256: ..., expires: ..., revoked: ...}`",
    )
    disabled: bool = Field(False, description="refuse all of its keys, and run none of its batches")
    models: list[str] | None = Field(None, description="models and LoRA adapters it may use, by name; default: all")
    requests_per_second: float | None = Field(
        None, gt=0, le=1_000_000, description="rate of new requests; one second's worth (at least one) may burst"
    )
    concurrent_requests: int | None = Field(
        None, ge=1, description="most requests of the tenant at once, over all ingresses"
    )
    concurrent_sessions: int | None = Field(
        None, ge=1, le=10_000, description="most live sessions (running, or soon expected back), over all ingresses"
    )
    tokens_per_minute: int | None = Field(
        None, ge=1, description="tokens of prompts, cached or not, and of answers; a request reserves its max_tokens"
    )
    budget: BudgetConfig | None = Field(
        None,
        description="what it may spend in a day or month, over all ingresses: `{tokens: 5000000, period: day}`; "
        "by minute: tokens_per_minute",
    )
    store_kv: bool = Field(True, description="false: its requests only read the cache")
    cache_share: float = Field(1.0, gt=0, le=1000, description="weight of the tenant's share of each KV pool")
    trust_group: str | None = Field(
        None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="tenants of one group share all their KV"
    )


class TenantsSection(BaseModel):
    """Tenants, operators, the deployment's secret, public prompts, usage, and stored responses."""

    tenants: list[TenantConfig] = Field(default_factory=list, description="without any: one open `default` tenant")
    public_prompts: list[PublicPromptConfig] = Field(
        default_factory=list, description="system prompts with KV that all tenants share"
    )
    prompts_dir: Path | None = Field(None, description="versioned prompts with prompts.lock (`warmpath prompts add`)")
    operator_key_sha256: list[Sha256Hex] = Field(
        default_factory=list, description="SHA-256 of each key for /metrics, /v1/cache, /v1/admin, adapters and resets"
    )
    require_tenants: bool | None = Field(
        None,
        description="without any tenant, refuse every client instead of serving all; default: if the database knows "
        "that there were some",
    )
    metrics_public: bool = Field(
        False, description="although tenants exist, serve /metrics without an operator key, then without tenant names"
    )
    vllm_metrics: bool = Field(
        False, description="/metrics also has vLLM's names of what both count (docs/reference/metrics.md)"
    )
    secret_file: Path | None = Field(None, description="deployment secret; default: $WARMPATH_SECRET, or a state file")
    prices: dict[str, PriceConfig] = Field(
        default_factory=dict,
        description="by name of a model or adapter, of a million tokens: `{qwen3: {input: 1, cached: 0.1, output: 4}}`",
    )
    usage_file: Path | None = Field(None, description="SQLite file of usage by day; default: kept in memory")
    store_responses: bool = Field(
        True, description="keep responses, encrypted, unless a request has `store: false`; false: store no responses"
    )
    responses_file: Path | None = Field(
        None,
        description="SQLite file of stored responses, for ingresses on one machine, if $WARMPATH_RESPONSES_URL is not "
        "set to a Redis or Postgres; default: beside the secret's state file, only on Ray's head node",
    )
    responses_ttl_s: Seconds = Field(
        2_592_000.0, ge=1, le=315_360_000, description="lifetime of a stored response, and the longest of a file"
    )
    responses_max_bytes: Bytes = Field(
        1 << 30, ge=1 << 24, description="most stored for each tenant; beyond it the oldest are removed"
    )
    files_max_bytes: Bytes = Field(
        1 << 30,
        ge=0,
        description="most bytes of files and batches of each tenant, in the database of responses; more are refused, "
        "but results of batches in progress are stored; 0: no files and batches",
    )

    @property
    def cache_shares(self) -> dict[str, float]:
        """The tenants' weights by name."""
        return {tenant.name: tenant.cache_share for tenant in self.tenants}

    @model_validator(mode="after")
    def _names_and_keys_differ(self) -> Self:
        names: dict[str, int] = {}
        owners: dict[str, str] = {}
        lists = []
        for number, tenant in enumerate(self.tenants):
            if (other := names.setdefault(tenant.name, number)) != number:
                sentence = f"tenants.{other} has this name, too; give each tenant its own"
                raise PlacedError(("tenants", number, "name"), sentence)
            lists.append((("tenants", number, "key_sha256"), [key.sha256 for key in tenant.key_sha256]))
        for place, keys in (*lists, (("operator_key_sha256",), self.operator_key_sha256)):
            for key in keys:
                if key in owners:
                    twice = f"a key is given twice, first in {owners[key]}"
                    raise PlacedError(place, f"{twice}; tenants and operators need keys of their own")
                owners[key] = ".".join(map(str, place[:2]))
        return self

    @model_validator(mode="after")
    def _money_has_prices(self) -> Self:
        for number, tenant in enumerate(self.tenants):
            if not self.prices and tenant.budget and tenant.budget.money is not None:
                raise PlacedError(("tenants", number, "budget", "money"), "a budget in money needs `prices`")
        return self

    @model_validator(mode="after")
    def _prompts_fit(self) -> Self:
        check_prompts(self.public_prompts)
        return self
