"""Plain `vllm serve`: vLLM's own OpenAI servers, in vLLM's environment. What other routers are put in front of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.common.server import server_process
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.cli.local_ray import held_port


@contextmanager
def vllm_servers(
    replicas: int, config: dict[str, Any], python: str = sys.executable, env: dict[str, str] | None = None
) -> Iterator[list[str]]:
    """Run ``replicas`` servers with these settings of a deployment; yields their URLs.

    ``python``: of the environment that has vLLM; ``env``: further variables of theirs. Raises BenchmarkError when one
    does not come up.
    """
    with ExitStack() as stack:
        yield [stack.enter_context(_server(config, python, env or {})) for _ in range(replicas)]


@contextmanager
def _server(config: dict[str, Any], python: str, env: dict[str, str]) -> Iterator[str]:
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    with held_port() as port:
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--model", str(resolve_model(config["model"]))]
        command += ["--served-model-name", config["model"], "--dtype", config["dtype"]]
        command += ["--block-size", str(config["block_size"]), "--num-gpu-blocks-override", str(config["num_blocks"])]
        # Plain vLLM keeps this part of a CPU's memory for itself, and does not start where it is not there.
        command += ["--gpu-memory-utilization", "0.05", "--enforce-eager"]
        command += ["--enable-prompt-tokens-details", "--generation-config", "vllm"]
        environment = {**env, **threads, "OMP_NUM_THREADS": str(config["num_threads"])}
        url = f"http://127.0.0.1:{port}"
        with server_process(command, f"{url}/health", environment):
            yield url
