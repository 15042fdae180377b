"""Settings of autoscaling: how many replicas there may be, and what decides their number (docs/autoscaling.md)."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from serve_app.config.quantities import Seconds

MAX_REPLICAS = 512


class AutoscalingConfig(BaseModel):
    """The fields of `autoscaling`. Their values reach the policy in the controller with the ingresses' figures."""

    model_config = ConfigDict(extra="forbid")

    min_replicas: int = Field(1, ge=1, le=MAX_REPLICAS, description="never fewer; as many start")
    max_replicas: int = Field(ge=1, le=MAX_REPLICAS, description="never more")
    target_ttft_s: Seconds = Field(
        2.0,
        gt=0,
        le=600,
        description="p90 of the time to first token to keep, or 1.1 times that of the requests' own prefill",
    )
    upscale_delay_s: Seconds = Field(10.0, ge=0, le=3600, description="more are needed for so long before they start")
    downscale_delay_s: Seconds = Field(
        600.0, ge=10, le=86_400, description="fewer were enough for so long before any is stopped"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError("max_replicas is less than min_replicas")
        return self
