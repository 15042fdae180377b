"""A server in separate processes during a benchmark: a warmpath instance, or a peer."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.harness import ROOT, note
from benchmarks.common.report import BenchmarkError
from serve_app.cli.local_ray import answers, held_port
from serve_app.tenants import make_api_key

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 180.0


MARK = "WARMPATH_BENCHMARK"
"""An environment variable; its value identifies an instance's processes."""


def marked_processes(mark: str, name: str = MARK) -> Iterator[tuple[psutil.Process, str]]:
    """Yield the processes with this mark, the variable ``name``, their descendants, and the command lines of both.

    A process that renames itself, as vLLM's do, may have overwritten its environment.
    """
    marked: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(name) == mark:
                marked |= {one.pid: one for one in (process, *process.children(recursive=True))}
    for process in marked.values():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            yield process, " ".join(process.cmdline())


def set_flags(settings: Mapping[str, Any]) -> list[str]:
    """Return the flags of `warmpath serve` for these settings."""
    return [f"--set={key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in settings.items()]


def new_tenants(names: Iterable[str]) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return a new key for each tenant, and the entries of these tenants in the setting `tenants`."""
    made = {name: make_api_key() for name in names}
    entries: list[dict[str, Any]] = [{"name": name, "key_sha256": [digest]} for name, (_, digest) in made.items()]
    return {name: key for name, (key, _) in made.items()}, entries


@contextmanager
def instance(*arguments: str, env: dict[str, str] | None = None) -> Iterator[str]:
    """Run ``warmpath serve`` on a free loopback port and yield its base URL. Raises like ``server_process``."""
    with held_port() as port:
        command = [sys.executable, "-m", "serve_app.cli.entry"]
        note("starting warmpath serve")
        url = f"http://127.0.0.1:{port}"
        with server_process([*command, "serve", "--port", str(port), *arguments], f"{url}/health", env):
            yield url


@contextmanager
def server_process(
    command: Sequence[str], ready_url: str, env: dict[str, str] | None = None, ready_within_s: float = START_TIMEOUT_S
) -> Iterator[None]:
    """Run a server for the block. Raises BenchmarkError with the end of its output if it does not start.

    At SIGTERM the block ends, with SystemExit, and so does the server.
    """
    with leaving_on_sigterm(), tempfile.NamedTemporaryFile("w+", prefix="warmpath-benchmark-", suffix=".log") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
            env={**os.environ, **(env or {})},
        )  # fmt: skip
        try:
            _wait(ready_url, command, process, log.name, ready_within_s)
            yield
        finally:
            if process.poll() is not None:
                note(f"the server had ended with status {process.returncode}: {_end_of(log.name)}")
            _stop(process)


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """Raise SystemExit at SIGTERM, which would end the benchmark at once and leave its servers running."""
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


def answers_in_time(url: str, process: subprocess.Popen[Any], timeout_s: float = START_TIMEOUT_S) -> bool:
    """Wait until a URL answers with 200; return False if the process ends or the time runs out first."""
    deadline_s = time.monotonic() + timeout_s
    while not answers(url):
        if process.poll() is not None or time.monotonic() > deadline_s:
            return False
        time.sleep(0.2)
    return True


def _wait(url: str, command: Sequence[str], process: subprocess.Popen[bytes], log: str, within_s: float) -> None:
    if not answers_in_time(url, process, within_s):
        said = f"it ended with status {process.returncode}" if process.poll() is not None else "not in time"
        raise BenchmarkError(f"{shlex.join(command)} did not come up ({said}):\n{_end_of(log)}")


def _end_of(log: str) -> str:
    return Path(log).read_text()[-3000:]


def _stop(process: subprocess.Popen[bytes]) -> None:
    try:
        if process.poll() is None:
            # Not SIGINT: background jobs of a shell ignore it.
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # a server that died, or that is waited for no longer, may have left others of its session
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
