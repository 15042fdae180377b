"""Settings of usage accounting: where it is kept, and what tokens cost."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class PricesConfig(BaseModel):
    """Prices by which `/v1/usage` tells what the same tokens would have cost elsewhere, in any currency."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input_per_million: float = Field(ge=0, le=1e9, description="of a million prompt tokens that no cache makes cheaper")
    output_per_million: float = Field(ge=0, le=1e9, description="of a million generated tokens")
    openai_cached_part: float = Field(
        0.5,
        ge=0,
        le=1,
        description="cost of a cached prompt token under OpenAI's rules, as a part of another's",
    )


class UsageSection(BaseModel):
    """What `/v1/usage` tells of."""

    usage_file: Path | None = Field(
        None,
        description="SQLite file that keeps usage by day over restarts; default: it is kept in memory",
    )
    prices: PricesConfig | None = Field(None, description="what tokens cost; default: /v1/usage tells no costs")
