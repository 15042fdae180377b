"""Plain `vllm serve` in vLLM's environment."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common.server import server_process
from serve_app.cli.local_ray import held_port

CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@contextmanager
def vllm_server(
    model: Path, name: str, flags: Sequence[str], env: Mapping[str, str], python: str, ready_within_s: float = 300.0
) -> Iterator[str]:
    """Run a server of the checkpoint ``model`` in the environment of ``python``; yield its URL.

    Raises BenchmarkError if it does not start. Its KV has the size that ``--kv-cache-memory-bytes`` in ``flags`` says:
    without that flag vLLM wants a part of the machine's memory to be free.
    """
    with held_port() as port:
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--model", str(model), "--served-model-name", name, "--enable-prompt-tokens-details"]
        command += ["--generation-config", "vllm", "--disable-uvicorn-access-log", *flags]
        url = f"http://127.0.0.1:{port}"
        with server_process(command, f"{url}/health", {**env, "HF_HUB_OFFLINE": "1"}, ready_within_s):
            yield url
