"""The measured systems: warmpath with one or two replicas on the card, and `vllm serve` beside it."""

import json
import re
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from benchmarks.common.report import BenchmarkError
from benchmarks.common.server import MARK
from benchmarks.gpu.shapes import Shape
from cluster.local import ClusterError, LocalCluster, application
from serve_app.config.engine import VLLM_CPU_BLOCK_SIZE
from serve_app.tenants.tenants import make_api_key

MODEL = "model"
TENANTS = ("tenant-0", "tenant-1", "tenant-2")
FLOODER = "flooder"
OPERATOR = "operator"
SEQUENCES = 256
_GPU_PART = 0.45
"""Of the card, for each of two engines: what Ray reserves, and what vLLM wants to find free."""
_RESERVED_BYTES = 5 << 30
"""Beside weights and KV, of each engine: activations, CUDA graphs, the context."""
_CPU_KV_BYTES = 64 << 20
_MANY = 4096


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, by nvidia-smi; without one this machine's processor. ``total_bytes``: 0 without one."""

    name: str = ""
    total_bytes: int = 0

    def kv_bytes(self, shape: Shape) -> int:
        """Return the KV of each of two engines that share the card. Raises BenchmarkError if the model is too large."""
        if not self.total_bytes:
            return _CPU_KV_BYTES
        kv = (int(0.95 * self.total_bytes) - 2 * (shape.weights_bytes + _RESERVED_BYTES)) // 2
        if kv < shape.kv_token_bytes * shape.max_model_len:
            raise BenchmarkError(f"two of this model do not fit on {self.name}; use a smaller --shape")
        return kv


def find_card() -> Card:
    """Return the first GPU that nvidia-smi names, if there is one."""
    if shutil.which("nvidia-smi") is None:
        return Card()
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.match(r"(.+), (\d+)", told)
    return Card(found[1], int(found[2]) << 20) if found else Card()


def vllm_flags(shape: Shape, card: Card) -> list[str]:
    """Return the flags of `vllm serve`, the same sizes as ours; all others are its defaults."""
    speed = ["--enforce-eager"]
    if card.total_bytes:
        speed = ["--compilation-config", json.dumps(_compilation(card)["compilation_config"])]
    return [
        "--dtype", shape.dtype, "--max-model-len", str(shape.max_model_len), "--max-num-seqs", str(SEQUENCES),
        "--max-num-batched-tokens", str(shape.batched_tokens), "--kv-cache-memory-bytes", str(card.kv_bytes(shape)),
        "--gpu-memory-utilization", str(_GPU_PART if card.total_bytes else 0.05), "--load-format", "dummy",
        "--block-size", str(_block_size(card)), *speed,
    ]  # fmt: skip


def _compilation(card: Card) -> dict[str, Any]:
    # The sizes that are measured: capturing vLLM's fifty takes longer than measuring them.
    return {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}} if card.name else {}


def _block_size(card: Card) -> int:
    return 16 if card.total_bytes else VLLM_CPU_BLOCK_SIZE


@dataclass
class Warmpath:
    """warmpath on a local Ray cluster, from ``__enter__`` on. ``url``: its own; ``replicas``: those that serve.

    ``live``: settings that were changed without a restart. ``keys``: each tenant's, and the operator's.
    """

    shape: Shape
    card: Card
    mark: str
    live: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        made = {name: make_api_key() for name in (*TENANTS, FLOODER, OPERATOR)}
        self.keys = {name: key for name, (key, _) in made.items()}
        self._digests = {name: digest for name, (_, digest) in made.items()}
        self.http = httpx.Client(timeout=60, headers=self.bearer(OPERATOR), trust_env=False, verify=False)  # noqa: S501

    def __enter__(self) -> Self:
        """Start Ray and Serve. Raises BenchmarkError."""
        try:
            self.cluster = LocalCluster(1, env={MARK: self.mark}, gpus=int(self.card.total_bytes > 0))
        except ClusterError as error:
            raise BenchmarkError(str(error)) from error
        self.url = self.cluster.url
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.http.close()
        self.cluster.stop()

    def bearer(self, name: str) -> dict[str, str]:
        """Return the header with a tenant's key, or the operator's."""
        return {"authorization": f"Bearer {self.keys[name]}"}

    def start(self, checkpoint: Path, engine: str) -> None:
        """Begin to start one replica of an engine; a former one ends first. Raises BenchmarkError."""
        scaling = {"min_replicas": 1, "max_replicas": 1}
        on_gpu = {"device": "cuda", "replica_num_gpus": _GPU_PART, "gpu_memory_utilization": _GPU_PART}
        vllm = {"engine_args": {"load_format": "dummy", **_compilation(self.card)}, "kv_pull": True, "prewarm": True}
        self.settings = {
            "model": str(checkpoint), "served_model_name": MODEL, "engine": engine, "dtype": self.shape.dtype,
            "max_model_len": self.shape.max_model_len, "max_num_seqs": SEQUENCES, "block_size": _block_size(self.card),
            "max_num_batched_tokens": self.shape.batched_tokens, "kv_cache_bytes": self.card.kv_bytes(self.shape),
            "max_waiting_requests": _MANY, "max_queued_requests": _MANY, "autoscaling": scaling,
            "enforce_eager": not self.card.total_bytes and engine == "vllm", "max_pull_bytes": 8 << 30,
            "tenants": [{"name": name, "key_sha256": [self._digests[name]]} for name in (*TENANTS, FLOODER)],
            "operator_key_sha256": [self._digests[OPERATOR]],
            **(on_gpu if self.card.total_bytes else {"num_threads": 1}), **(vllm if engine == "vllm" else {}),
        }  # fmt: skip
        self.live = {"policy": "estimated_ttft", "autoscaling": scaling}
        self._deploy()

    def change(self, within_s: float = 60.0, **live: Any) -> None:
        """Change settings of the running instance, and wait until they are in force. Raises BenchmarkError."""
        self.live |= live
        self._deploy()
        self.wait(self.live["autoscaling"]["min_replicas"], within_s)

    def wait(self, replicas: int, within_s: float) -> None:
        """Wait until so many replicas serve under the settings in force. Raises BenchmarkError with the cause."""
        deadline_s = time.monotonic() + within_s
        while True:
            told = self.cluster.status()
            with suppress(httpx.HTTPError, KeyError):
                snapshot = self.snapshot()
                serving = [one for one in snapshot["replicas"] if one["state"] == "serving"]
                if len(serving) == replicas and snapshot["policy"] == self.live["policy"]:
                    return
            if told["status"] == "DEPLOY_FAILED" or time.monotonic() > deadline_s:
                raise BenchmarkError(f"not {replicas} replicas: {told['message']} {told['deployments']}"[:3000])
            time.sleep(0.2)

    def snapshot(self) -> dict[str, Any]:
        """Return what an operator's watcher sees. Raises httpx.HTTPError."""
        found = self.http.get(f"{self.url}/v1/cache/events", params={"once": "true"}).raise_for_status().json()
        return dict(found)

    def reset(self) -> None:
        """Drop all cached blocks. Raises BenchmarkError if some stay in use."""
        for _ in range(100):
            if self.http.post(f"{self.url}/reset_prefix_cache").raise_for_status().json()["complete"]:
                return
            time.sleep(0.1)
        raise BenchmarkError("the caches cannot be reset: blocks stay in use")

    def _deploy(self) -> None:
        user_config = {name: {"user_config": self.live} for name in ("Ingress", "Replica")}
        try:
            self.cluster.deploy(application(self.settings, user_config), wait_s=0)
        except ClusterError as error:
            raise BenchmarkError(str(error)) from error
