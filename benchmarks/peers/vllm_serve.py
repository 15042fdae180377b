"""Plain `vllm serve`: vLLM's own OpenAI server, one of it, in vLLM's environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.processes import server_process
from serve_app.cli.local_ray import held_port


@contextmanager
def vllm_serve(model: Path, name: str, flags: Mapping[str, object], environment: Mapping[str, str]) -> Iterator[str]:
    """Run it over a checkpoint under this ``name``; yields its URL.

    ``flags``: of `vllm serve`, without their dashes; True: one that takes no value.
    Raises RuntimeError with the end of its output when it does not come up.
    """
    with held_port() as port:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--model", str(model), "--served-model-name", name]
        command += ["--enable-prompt-tokens-details", "--generation-config", "vllm"]
        command += [f"--{flag}" if value is True else f"--{flag}={value}" for flag, value in flags.items()]
        url = f"http://127.0.0.1:{port}"
        with server_process(command, f"{url}/health", {**os.environ, **environment}):
            yield url
