"""SGLang's router in front of plain servers: the same engines, somebody else's routing.

Needs an environment of its own: `pip install sglang-router==0.3.2`; give its Python to
`python -m benchmarks replay --sglang-python /path/to/env/bin/python`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.server import answers
from serve_app.cli.local_ray import held_port

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0


@contextmanager
def sglang_router(python: str, replicas: int, config: dict[str, Any], policy: str = "cache_aware") -> Iterator[str]:
    """Run ``replicas`` plain servers and the router over them; yields the router's URL.

    Raises RuntimeError with the end of its output when a process does not come up.
    """
    with ExitStack() as stack:
        workers = []
        for _ in range(replicas):
            port = stack.enter_context(held_port())
            command = [sys.executable, "-m", "benchmarks.peers.plain_server", "--port", str(port)]
            stack.enter_context(
                server_process([*command, "--config", json.dumps(config)], f"http://127.0.0.1:{port}/health")
            )
            workers.append(f"http://127.0.0.1:{port}")
        port, metrics_port = stack.enter_context(held_port()), stack.enter_context(held_port())
        command = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        command += ["--policy", policy, "--worker-urls", *workers]
        url = f"http://127.0.0.1:{port}"
        stack.enter_context(server_process(command, f"{url}/v1/models"))
        yield url


@contextmanager
def server_process(command: list[str], ready_url: str, env: dict[str, str] | None = None) -> Iterator[None]:
    """Run a server until the end of the block; enters once it answers. Raises RuntimeError when it does not come up."""
    with tempfile.NamedTemporaryFile("w+", prefix="warmpath-peer-", suffix=".log") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=env)
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not answers(ready_url):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    end = Path(log.name).read_text()[-3000:]
                    raise RuntimeError(f"{command[2]} did not come up (status {process.poll()}):\n{end}")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
