"""Settings of the KV cache: the pool, its tiers, pulls between replicas, pins, and joining and leaving replicas."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from router.settings import DEFAULTS
from serve_app.config.quantities import Bytes, InBytes, InSeconds, Seconds

MIB = 1024 * 1024
CPU_POOL_BYTES = 512 * MIB
"""The default size of a replica's KV pool without a GPU."""

CACHE_TIERS = (
    "serve_app.cache.tiers.object:open_object",
    "serve_app.cache.tiers.disk:open_disk",
    "serve_app.cache.tiers.host:open_host",
)
"""The functions that open the tiers below the pool, the slowest first: each returns None where its tier is off."""

TIER_SETTINGS = (
    *("host_cache_bytes", "disk_cache_bytes", "disk_cache_dir", "disk_queue_bytes", "tier_load_ratio"),
    *("object_cache_url", "object_cache_bytes"),
)
"""The settings that an engine without tiers refuses."""


class CacheSection(BaseModel):
    """The KV cache of a replica."""

    block_size: int = Field(DEFAULTS.block_size, ge=1, le=1024, description="tokens in a KV block; vLLM on a CPU: 32")
    num_blocks: int | None = Field(None, ge=2, description="blocks in a replica's pool; default: from kv_cache_bytes")
    kv_cache_bytes: Annotated[int, Field(ge=MIB), InBytes] | None = Field(
        None, description="bytes of a replica's KV pool; default: 512 MiB, on a GPU from gpu_memory_utilization"
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="fraction of a GPU's memory for a replica's weights, step buffers and KV"
    )
    enable_prefix_caching: bool = Field(True, description="reuse the KV of computed prefixes")
    explain_misses: bool = Field(True, description="explain cache misses; an ingress then keeps tenants' last prompts")
    host_cache_bytes: Bytes = Field(0, ge=0, description="host memory of a replica for blocks evicted from its pool")
    kv_offloading_size: float | None = Field(
        None, gt=0, description="with engine vllm on a GPU: GiB of host memory of a replica for its computed blocks"
    )
    disk_cache_bytes: Bytes = Field(0, ge=0, description="disk of a replica for blocks evicted from the tier above")
    disk_cache_dir: Path | None = Field(None, description="directory of the disk tier, with one slot for each replica")
    disk_queue_bytes: Bytes = Field(
        256 * MIB, ge=MIB, description="memory for blocks that wait to be written to disk; as much for the object tier"
    )
    object_cache_url: str | None = Field(
        None,
        description="object store or shared file system for blocks evicted from the tier above, for all replicas: an "
        "fsspec URL such as s3://bucket/prefix (needs s3fs), gs://bucket/prefix (gcsfs) or file:///mnt/kv",
    )
    object_cache_bytes: Bytes = Field(
        65_536 * MIB, ge=MIB, description="most bytes in the object tier, of all replicas; the oldest blocks go first"
    )
    tier_load_ratio: float = Field(1.0, ge=0, description="longest load from a tier, relative to computing the KV")
    kv_pull: bool = Field(True, description="copy a prefix from another replica if that is faster than computing it")
    max_pulls: int = Field(4, ge=1, le=64, description="prefixes that a replica copies at once")
    max_pull_bytes: Bytes = Field(256 * MIB, ge=MIB, description="most KV copied for one request")
    min_pull_tokens: int = Field(
        DEFAULTS.scoring.min_pull_tokens, ge=1, description="shorter missing prefixes are computed, not copied"
    )
    session_wait_s: Seconds = Field(
        3600.0,
        ge=0,
        description="longest wait of a new or cold request for space beside the contexts of sessions that will soon "
        "return, and at most half of request_timeout_s; 0: no wait",
    )
    max_holders: int = Field(
        DEFAULTS.scoring.max_holders,
        ge=1,
        description="most replicas that hold one prefix; load decides how many do",
    )
    pin_budget: float = Field(
        0.25, ge=0, description="KV that explicit saves may keep: below 1 a fraction of the pool, else blocks"
    )
    save_ttl_s: Annotated[float, Field(gt=0), InSeconds] | None = Field(
        None, description="lifetime of a saved prompt after its last use; default: until a reset"
    )

    @model_validator(mode="after")
    def _budgets_fit(self) -> Self:
        if self.disk_cache_bytes and self.disk_cache_dir is None:
            raise ValueError("disk_cache_bytes needs disk_cache_dir")
        if self.object_cache_url is not None and "://" not in self.object_cache_url:
            raise ValueError("object_cache_url must be a URL, such as s3://bucket/prefix or file:///mnt/kv")
        if self.num_blocks is not None and self.pin_budget >= self.num_blocks:
            raise ValueError(f"pin_budget={self.pin_budget:g} leaves nothing of {self.num_blocks} blocks for requests")
        return self


class LifecycleSection(BaseModel):
    """Cached KV when the number of replicas changes."""

    prewarm: bool = Field(True, description="a new replica copies its peers' hottest prefixes before it serves")
    prewarm_max_bytes: Bytes = Field(4096 * MIB, ge=0, description="most KV that a new replica copies")
    prewarm_timeout_s: Seconds = Field(10.0, ge=0, le=600, description="most time that prewarming adds to a start")
    handover: bool = Field(True, description="a leaving replica gives peers the KV that only it holds, saves first")
    graceful_shutdown_timeout_s: Seconds = Field(
        20.0,
        ge=0,
        le=3600,
        description="time for a stopping replica's streams and handover; longer streams continue on other replicas",
    )
    shutdown_timeout_s: Seconds = Field(
        30.0,
        ge=0,
        le=3600,
        description="time for running answers when `warmpath serve` stops; afterwards they end with an error",
    )
