"""smg, the router of SGLang's authors, before servers that already run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common.server import server_process
from serve_app.cli.local_ray import held_port


@contextmanager
def smg_server(command: Path, urls: Sequence[str]) -> Iterator[str]:
    """Run smg's cache-aware routing before servers; yield its URL. Raises BenchmarkError if it does not start."""
    with held_port() as port, held_port() as metrics:
        flags = ["--host", "127.0.0.1", "--port", str(port), "--backend", "vllm", "--policy", "cache_aware"]
        flags += ["--log-level", "warn", "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
        url = f"http://127.0.0.1:{port}"
        # Its /health answers before it knows its servers.
        with server_process([str(command), "launch", *flags, "--worker-urls", *urls], f"{url}/readiness"):
            yield url
