"""SGLang's router in front of plain servers: the same engines, somebody else's routing.

Needs an environment of its own: `pip install sglang-router==0.3.2`; give its Python to
`python -m benchmarks affinity --engine vllm --peers sglang_router --sglang-python /path/to/env/bin/python`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.common.server import server_process
from serve_app.cli.local_ray import held_port


@contextmanager
def sglang_router(python: str, workers: Sequence[str], policy: str = "cache_aware") -> Iterator[str]:
    """Run the router over servers at these URLs; yields its own.

    Raises BenchmarkError with the end of its output when it does not come up.
    """
    with held_port() as port, held_port() as metrics_port:
        command = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        command += ["--policy", policy, "--worker-urls", *workers]
        url = f"http://127.0.0.1:{port}"
        with server_process(command, f"{url}/v1/models"):
            yield url
