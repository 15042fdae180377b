"""Settings of the routers that the ingresses hold."""

from __future__ import annotations

from pydantic import BaseModel, Field

from router.settings import DEFAULT_POLICY, PolicyName
from serve_app.config.quantities import Seconds


class RoutingSection(BaseModel):
    """How a request finds its replica, and how long it waits for one."""

    policy: PolicyName = Field(DEFAULT_POLICY, description="how a replica is chosen (docs/routing.md)")
    no_replica_wait_s: Seconds = Field(
        5.0, ge=0, le=600, description="requests wait this long after the last replica has gone, then get 503"
    )
    directory_max_blocks: int = Field(2_000_000, ge=1000, le=100_000_000, description="block hashes a router remembers")
    max_queued_requests: int = Field(
        512, ge=1, description="requests that wait in an ingress; a tenant with more than its share of them gets 429"
    )
    load_report_interval_s: Seconds = Field(
        0.05, gt=0, le=10, description="seconds between a replica's load reports to the routers"
    )
