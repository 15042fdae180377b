"""A warmpath instance in processes of its own, for the time of a benchmark.

Owns start, health and end of that instance; ends it by process id, whatever happens.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common.report import BenchmarkError
from serve_app.cli.local_ray import answers, held_port

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 180.0


@contextmanager
def instance(*arguments: str, env: dict[str, str] | None = None) -> Iterator[str]:
    """Run ``warmpath serve`` with ``arguments`` on a free loopback port; yields its base URL.

    Raises BenchmarkError with the end of its output when it does not come up.
    """
    with held_port() as port, tempfile.NamedTemporaryFile("w+", prefix="warmpath-serve-", suffix=".log") as log:
        command = [sys.executable, "-c", "from serve_app.cli.main import main; main()"]
        process = subprocess.Popen(  # our own command
            [*command, "serve", "--port", str(port), *arguments],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **(env or {})},
        )  # fmt: skip
        with _leaving_on_sigterm():
            print("starting warmpath serve", file=sys.stderr, flush=True)
            try:
                _wait(f"http://127.0.0.1:{port}/health", process, Path(log.name))
                yield f"http://127.0.0.1:{port}"
            finally:
                _stop(process)


@contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
    """A benchmark that is told to end stops its instance first: by default it would die at once and leave it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise BenchmarkError(f"warmpath serve ended with status {process.returncode}:\n{log.read_text()[-3000:]}")
        if answers(url):
            return
        time.sleep(0.3)
    raise BenchmarkError(f"warmpath serve did not come up in {START_TIMEOUT_S:.0f} s:\n{log.read_text()[-3000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        # Not SIGINT: a shell has its background jobs ignore that.
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
