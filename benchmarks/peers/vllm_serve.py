"""Plain `vllm serve` in vLLM's environment."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.common.server import server_process
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.cli.local_ray import held_port


@contextmanager
def vllm_server(config: dict[str, Any], python: str, env: dict[str, str]) -> Iterator[str]:
    """Run a server with a deployment's settings in the environment of ``python``; yield its URL.

    Raises BenchmarkError if it does not start.
    """
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
