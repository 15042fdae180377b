"""Settings of replicas that join and leave."""

from __future__ import annotations

from pydantic import BaseModel, Field

from serve_app.config.cache import MIB
from serve_app.config.quantities import Bytes, Seconds


class LifecycleSection(BaseModel):
    """What becomes of cached KV when the number of replicas changes."""

    prewarm: bool = Field(True, description="a new replica copies its peers' hottest prefixes before it takes requests")
    prewarm_max_bytes: Bytes = Field(4096 * MIB, ge=0, description="KV that a new replica copies at most")
    prewarm_timeout_s: Seconds = Field(10.0, ge=0, le=600, description="seconds that this may add to a replica's start")
    handover: bool = Field(True, description="a leaving replica gives peers what only it holds, saves first")
    graceful_shutdown_timeout_s: Seconds = Field(
        20.0,
        ge=0,
        le=3600,
        description="seconds from the decision to stop a replica to its end, for its streams and its hand-over; "
        "streams that outlast it go on elsewhere",
    )
    shutdown_timeout_s: Seconds = Field(
        30.0,
        ge=0,
        le=3600,
        description="seconds that answers under way have when `warmpath serve` is stopped; then they end with an error",
    )
