"""The measured systems: warmpath with one or two replicas on the card, and `vllm serve` beside it."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.common.report import BenchmarkError
from benchmarks.common.server import MARK, new_tenants
from benchmarks.gpu.shapes import Shape
from cluster.local import LocalCluster, application
from router.settings import DEFAULTS
from serve_app.config.engine import ENGINES, VLLM_CPU_BLOCK_SIZE, EngineName

MODEL = "model"
TENANTS = ("tenant-0", "tenant-1", "tenant-2")
FLOODER, OPERATOR = "flooder", "operator"
SEQUENCES = 256
_GPU_PART = 0.45
"""Of the card, for each of two engines: what Ray reserves, and what vLLM wants to find free."""
RESERVED_BYTES = 5 << 30
"""Beside weights and KV, of each engine: activations, CUDA graphs, the context."""
_CPU_KV_BYTES = 64 << 20
_MANY = 4096
_GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}
"""The sizes that are measured: capturing vLLM's fifty takes longer than measuring them."""


class Target(NamedTuple):
    """A system that is asked. ``mark``: of its processes; ``operator``: headers to read its metrics."""

    url: str
    headers: Mapping[str, str]
    mark: str
    operator: Mapping[str, str] = {}

    def metrics(self) -> str:
        """Return all metrics. Raises httpx.HTTPError."""
        response = httpx.get(f"{self.url}/metrics", headers=dict(self.operator), timeout=60, verify=False)  # noqa: S501
        return response.raise_for_status().text


class Card(NamedTuple):
    """A GPU, by nvidia-smi. Without one: no name, no bytes."""

    name: str = ""
    total_bytes: int = 0

    @property
    def block_size(self) -> int:
        """The tokens of a KV block."""
        return DEFAULTS.block_size if self.name else VLLM_CPU_BLOCK_SIZE

    def kv_bytes(self, shape: Shape) -> int:
        """Return the KV of each of two engines that share the card. Raises BenchmarkError if the model is too large."""
        if not self.name:
            return _CPU_KV_BYTES
        sizes = shape.config
        heads = 2 * sizes["head_dim"] * (sizes["num_attention_heads"] + sizes["num_key_value_heads"])
        layers = sizes["num_hidden_layers"] * sizes["hidden_size"] * (heads + 3 * sizes["intermediate_size"])
        weights_bytes = int(2 * (layers + 2 * sizes["vocab_size"] * sizes["hidden_size"]))
        kv = int(0.95 * self.total_bytes) // 2 - weights_bytes - RESERVED_BYTES
        if kv < shape.kv_token_bytes * shape.max_model_len:
            raise BenchmarkError(f"two of this model do not fit on {self.name}; use a smaller --shape")
        return kv


def find_card() -> Card:
    """Return the first GPU that nvidia-smi names, if there is one."""
    if shutil.which("nvidia-smi") is None:
        return Card()
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    named = re.match(r"(.+), (\d+)", subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    return Card(named[1], int(named[2]) << 20) if named else Card()


def vllm_flags(
    shape: Shape, card: Card, *, eager: bool = False, drafting: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the flags of `vllm serve`: the same sizes as ours; all else is its default."""
    values = {
        "dtype": shape.dtype, "max-model-len": shape.max_model_len, "max-num-seqs": SEQUENCES, "load-format": "dummy",
        "max-num-batched-tokens": shape.batched_tokens, "kv-cache-memory-bytes": card.kv_bytes(shape),
        "block-size": card.block_size, "gpu-memory-utilization": _GPU_PART if card.name else 0.05,
    }  # fmt: skip
    more = ["--compilation-config", json.dumps(_GRAPHS)] if card.name and not eager else ["--enforce-eager"]
    more += ["--speculative-config", json.dumps(drafting)] if drafting else []
    return [part for name, value in values.items() for part in (f"--{name}", str(value))] + more


class Warmpath(LocalCluster):
    """warmpath on a Ray cluster of its own. ``keys``: each tenant's, and the operator's. Raises ClusterError.

    The replicas begin to start. Two compute eagerly, which starts sooner, in steps of our default's size, so that no
    tenant waits for a long one; and they copy each other's KV. ``drafting``: vLLM's ``speculative_config``.
    """

    def __init__(
        self, shape: Shape, card: Card, mark: str, checkpoint: Path, engine: EngineName, replicas: int, *,
        eager: bool = False, drafting: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(1, env={MARK: mark}, gpus=int(bool(card.name)))
        self.keys, (*tenants, operator) = new_tenants([*TENANTS, FLOODER, OPERATOR])
        graphs = {"compilation_config": _GRAPHS} if card.name and replicas == 1 and not eager else {}
        vllm = {"engine_args": {"load_format": "dummy", **graphs}, "enforce_eager": not graphs}
        vllm |= {"speculative_config": drafting} if drafting else {}
        both = {"kv_pull": True, "prewarm": True, "max_pull_bytes": 8 << 30}
        gpu = {"device": "cuda", "replica_num_gpus": _GPU_PART, "gpu_memory_utilization": _GPU_PART}
        self._settings: dict[str, Any] = {
            "model": str(checkpoint), "engine": engine, "replicas": replicas, "served_model_name": MODEL,
            "dtype": shape.dtype, "max_model_len": shape.max_model_len, "block_size": card.block_size,
            "max_num_seqs": SEQUENCES,
            "max_num_batched_tokens": min(2048 if replicas > 1 else 8192, shape.batched_tokens),
            "kv_cache_bytes": card.kv_bytes(shape), "max_waiting_requests": _MANY, "max_queued_requests": _MANY,
            "tenants": tenants, "operator_key_sha256": operator["key_sha256"],
            **(gpu if card.name else {"num_threads": 1}), **(both if replicas > 1 else {}),
            **(vllm if "ranks" in ENGINES[engine].can else {}),
        }  # fmt: skip
        self._mark = mark
        headers = self.target(OPERATOR).headers
        self._http = httpx.Client(base_url=self.url, timeout=60, headers=headers, verify=False)  # noqa: S501
        self.set_policy("estimated_ttft")

    def target(self, name: str) -> Target:
        """Return this system as a tenant, or the operator, asks it."""
        one, operator = ({"authorization": f"Bearer {self.keys[who]}"} for who in (name, OPERATOR))
        return Target(self.url, one, self._mark, operator)

    def set_policy(self, policy: str) -> None:
        """Change the policy of the running instance. Raises ClusterError."""
        live = {name: {"user_config": {"policy": policy}} for name in ("Ingress", "Replica")}
        self.deploy(application(self._settings, live), wait_s=0)
        self._policy = policy

    def wait(self, within_s: float = 60.0) -> None:
        """Wait until all replicas serve, and under the newest policy. Raises BenchmarkError with the cause."""
        deadline_s = time.monotonic() + within_s
        while True:
            with suppress(httpx.HTTPError, KeyError):
                seen = self.snapshot()
                serving = sum(one["state"] == "serving" for one in seen["replicas"])
                if (serving, seen["policy"]) == (self._settings["replicas"], self._policy):
                    return
            status = self.status()
            if status["status"] == "DEPLOY_FAILED" or time.monotonic() > deadline_s:
                raise BenchmarkError(f"warmpath does not serve: {status['message']} {status['deployments']}"[:3000])
            time.sleep(0.2)

    def snapshot(self) -> dict[str, Any]:
        """Return what an operator's watcher sees. Raises httpx.HTTPError."""
        return dict(self._http.get("/v1/cache/events", params={"once": "true"}).raise_for_status().json())

    def metrics(self) -> str:
        """Return all metrics. Raises httpx.HTTPError."""
        return self.target(OPERATOR).metrics()

    def predicted_tokens(self, body: Mapping[str, Any], tenant: str) -> int:
        """Return the cached tokens that the router expects for a tenant's request now. Raises httpx.HTTPError."""
        explained = self._http.post("/v1/cache/explain", json={**body, "tenant": tenant}).raise_for_status().json()
        (prompt,) = explained["prompts"]
        chosen = prompt["winners"][explained["policy"]]["replica_id"]
        row = next(one for one in prompt["replicas"] if one["replica_id"] == chosen)
        return max(int(row["cached_tokens"]), int(row["pull_tokens"]))

    def reset(self) -> None:
        """Drop all cached blocks. Raises BenchmarkError if some stay in use."""
        for _ in range(100):
            if self._http.post("/reset_prefix_cache").raise_for_status().json()["complete"]:
                return
            time.sleep(0.1)
        raise BenchmarkError("the caches cannot be reset: blocks stay in use")
