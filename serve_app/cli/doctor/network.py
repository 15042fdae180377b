"""Who is in the way: ports that an instance needs, a Ray that runs or left something behind, variables that mislead."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from serve_app.cli.address import BadAddress, check_address
from serve_app.cli.doctor.finding import Finding, problem, warning
from serve_app.cli.doctor.machine import GIB
from serve_app.cli.local_ray import FIRST_PORT, LAST_PORT, held_window

RAY_DIRECTORY = Path("/tmp/ray")  # noqa: S108  # Ray's own, looked at
_ANSWERS_WITHIN_S = 1.0
_MANY_BYTES = GIB


def ports(host: str, port: int) -> Iterator[Finding]:
    """Look whether an instance could listen: on its port, and on a row of ports for its ingresses."""
    try:
        check_address(host, port)
    except BadAddress as error:
        what, _, advice = str(error).partition(": ")
        yield problem("port", what, advice)
    else:
        yield Finding("port", "ok", f"{host}:{port} is free")
    try:
        with held_window():
            yield Finding("inner ports", "ok", f"enough are free between {FIRST_PORT} and {LAST_PORT}")
    except RuntimeError as error:
        what, _, advice = str(error).partition(": ")
        yield problem("inner ports", what, advice)


def ray_state(directory: Path = RAY_DIRECTORY) -> Iterator[Finding]:
    """Look for a running cluster, for what ended ones left behind, and for variables that point to another one."""
    for name in ("RAY_ADDRESS", "RAY_TMPDIR"):
        if name in os.environ:
            yield warning("ray", f"{name}={os.environ[name]} is set", f"unset {name}, unless it is meant")
    try:
        current = (directory / "ray_current_cluster").read_text().strip()
    except OSError:
        current = ""
    if current and answers(current):
        yield Finding("ray", "ok", f"a cluster runs at {current}; `warmpath serve` starts one of its own beside it")
    elif current:
        yield Finding("ray", "ok", f"no cluster runs (the last one was at {current})")
    else:
        yield Finding("ray", "ok", "no cluster runs")
    sessions = [path for path in directory.glob("session_*") if path.is_dir() and not path.is_symlink()]
    taken = sum(_bytes_of(session) for session in sessions)
    if taken > _MANY_BYTES:
        advice = f"where no Ray runs: rm -r {directory}/session_*"
        yield warning("ray sessions", f"{len(sessions)} in {directory} hold {taken / GIB:.1f} GiB of logs", advice)


def answers(address: str) -> bool:
    """Say whether somebody listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWERS_WITHIN_S):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def _bytes_of(directory: Path) -> int:
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118  # many thousand of them
            except OSError:
                continue
    return total
