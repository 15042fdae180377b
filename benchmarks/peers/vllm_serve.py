"""Plain `vllm serve` in vLLM's environment, and SGLang's router in front of it.

The router needs a separate environment: `pip install sglang-router==0.3.2`; give its Python to
`python -m benchmarks affinity --engine vllm --peers sglang_router --sglang-python /path/to/env/bin/python`.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.common.server import server_process
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.cli.local_ray import held_port


@contextmanager
def vllm_servers(
    replicas: int, config: dict[str, Any], python: str = sys.executable, env: dict[str, str] | None = None
) -> Iterator[list[str]]:
    """Run servers with a deployment's settings in the environment of ``python``; yield their URLs.

    Raises BenchmarkError if one does not start.
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
        # Plain vLLM does not start unless this fraction of the memory is free.
        command += ["--gpu-memory-utilization", "0.05", "--enforce-eager"]
        command += ["--enable-prompt-tokens-details", "--generation-config", "vllm"]
        environment = {**env, **threads, "OMP_NUM_THREADS": str(config["num_threads"])}
        url = f"http://127.0.0.1:{port}"
        with server_process(command, f"{url}/health", environment):
            yield url


@contextmanager
def sglang_router(python: str, workers: Sequence[str]) -> Iterator[str]:
    """Run SGLang's router over servers and yield its URL. Raises BenchmarkError if it does not start."""
    with held_port() as port, held_port() as metrics_port:
        command = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        command += ["--policy", "cache_aware", "--worker-urls", *workers]
        url = f"http://127.0.0.1:{port}"
        with server_process(command, f"{url}/v1/models"):
            yield url
