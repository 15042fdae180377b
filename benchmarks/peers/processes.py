"""A peer's server in a process of its own."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serve_app.cli.local_ray import answers

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0


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
