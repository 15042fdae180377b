"""Settings of the routers that the ingresses hold."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

Policy = Literal["estimated_ttft", "lmetric", "bounded_hash", "sglang", "power_of_two", "round_robin"]


class RoutingSection(BaseModel):
    """How a request finds its replica, and how long it waits for one."""

    policy: Policy = Field(
        "estimated_ttft",
        description="how a replica is chosen: estimated_ttft, lmetric, bounded_hash, sglang, power_of_two, round_robin",
    )
    shadow_policy: Policy | None = Field(
        None, description="decides about every request beside `policy` without acting; counted apart"
    )
    no_replica_wait_s: float = Field(
        5.0, ge=0, le=600, description="requests wait this long after the last replica has gone, then get 503"
    )
    directory_max_blocks: int = Field(2_000_000, ge=1000, le=100_000_000, description="block hashes a router remembers")
    max_queued_requests: int = Field(512, ge=1, description="requests an ingress holds while every replica is full")
    load_report_interval_s: float = Field(
        0.05, gt=0, le=10, description="seconds between a replica's load reports to the routers"
    )
