"""Engines as plain OpenAI servers, one process each: what somebody else's router is put in front of."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.peers.processes import server_process
from benchmarks.peers.vllm_serve import vllm_serve
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.cli.local_ray import held_port


@contextmanager
def workers(replicas: int, config: dict[str, Any]) -> Iterator[list[str]]:
    """Run ``replicas`` servers of the engine that these settings of a deployment name; yields their URLs.

    ``engine: vllm`` is `vllm serve`, without warmpath. Raises RuntimeError with the end of its output when one does
    not come up.
    """
    with ExitStack() as stack:
        yield [
            stack.enter_context(_vllm(config) if config["engine"] == "vllm" else _plain(config))
            for _ in range(replicas)
        ]


@contextmanager
def _plain(config: dict[str, Any]) -> Iterator[str]:
    with held_port() as port:
        command = [sys.executable, "-m", "benchmarks.peers.plain_server", "--port", str(port)]
        url = f"http://127.0.0.1:{port}"
        with server_process([*command, "--config", json.dumps(config)], f"{url}/health"):
            yield url


def _vllm(config: dict[str, Any]) -> Any:
    flags: dict[str, object] = {"block-size": config["block_size"], "gpu-memory-utilization": 0.05}
    if "num_blocks" in config:
        flags["num-gpu-blocks-override"] = config["num_blocks"]
    if "kv_cache_bytes" in config:
        flags["kv-cache-memory-bytes"] = config["kv_cache_bytes"]
    if config.get("enforce_eager"):
        flags["enforce-eager"] = True
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    if "num_threads" in config:
        threads["OMP_NUM_THREADS"] = str(config["num_threads"])
    return vllm_serve(resolve_model(config["model"]), config["model"], flags, threads)
