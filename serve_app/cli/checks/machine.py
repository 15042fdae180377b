"""Checks of the machine: the port, memory, disk space, a GPU."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from serve_app.checkpoints.model_cache import default_cache_dir
from serve_app.cli.console import console
from serve_app.cli.processes import port_holder
from serve_app.cli.supervisor import path_flags

GIB = 1 << 30
_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""
_TORCH_WITHIN_S = 180
_REINSTALL = "pip install --force-reinstall torch"
_CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # looked at, not written
_OTHER = "or choose another with --port"


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding about a subject, with advice. ``minor``: an instance would still work."""

    subject: str
    found: str
    advice: str = ""
    minor: bool = False

    @property
    def state(self) -> str:
        """The severity; with a problem, an instance would not start or not work."""
        return "ok" if not self.advice else "warning" if self.minor else "problem"


def address(host: str, port: int, *, start: bool = True) -> Finding:
    """Check that an instance could listen; a running instance is a problem only for a ``start``."""
    if not 1 <= port <= 65535:
        return Finding("port", f"there is no port {port}", "ports are 1 to 65535")
    try:
        families = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        found = f"there is no address {host!r} ({getattr(error, 'strerror', error)})"
        return Finding("host", found, "give one of this machine with --host")
    # For a name with both kinds of addresses, servers use the IPv4 one.
    family, kind, protocol, _, where = min(families, key=lambda entry: entry[0] != socket.AF_INET)
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return _taken(host, port, start)
            if error.errno == errno.EACCES:
                return Finding("port", f"port {port} is for root alone", "choose one above 1023 with --port")
            if error.errno != errno.EADDRNOTAVAIL:
                return Finding("port", f"cannot listen on {host}:{port} ({error.strerror})", "give another --host")
            found = f"no interface of this machine has the address {host}"
            return Finding("host", found, "use 127.0.0.1, or 0.0.0.0 for all of them")
    return Finding("port", f"{host}:{port} is free")


def _taken(host: str, port: int, start: bool) -> Finding:
    holder, taken = port_holder(port), f"port {port} is taken by"
    if holder is None:
        return Finding("port", f"{taken} a process of another user", f"stop that, {_OTHER}")
    if holder.supervisor is not None:
        if start:
            return Finding("port", f"{taken} another warmpath (pid {holder.supervisor})", f"stop that, {_OTHER}")
        return Finding("port", f"warmpath (pid {holder.supervisor}) serves at {host}:{port}")
    found = f"{taken} {holder.name} (pid {holder.pid})"
    if holder.ours:
        return Finding("port", f"{found} that a killed warmpath left behind", f"run kill -9 {holder.pid}, {_OTHER}")
    return Finding("port", found, f"stop that, {_OTHER}")


def memory_bytes() -> int:
    """Return this machine's memory, or this container's limit."""
    machine_bytes = int(psutil.virtual_memory().total)
    try:
        return min(machine_bytes, int(_CGROUP_MEMORY.read_text()))
    except (OSError, ValueError):  # no container, or no limit: "max"
        return machine_bytes


def writable_place(directory: Path) -> Path:
    """Return the directory or its nearest existing parent. Raises OSError if this user may not write there."""
    place = next(path for path in (directory, *directory.parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise OSError(f"{place} is no directory that this user may write to")
    return place


def room() -> Iterator[Finding]:
    """Check the free memory, and the disk space for Ray's objects, temporary files and models."""
    total = memory_bytes()
    free = min(psutil.virtual_memory().available, total)
    advice = "two replicas of the default model need 2 GiB: stop something" if free < 2 * GIB else ""
    yield Finding("memory", f"{_free(free, total)} free", advice)
    if _SHARED_MEMORY.exists():
        shared = shutil.disk_usage(_SHARED_MEMORY)
        advice = "Ray keeps its objects there: docker run --shm-size 2g, or free some space"
        found = f"{_SHARED_MEMORY}: {_free(shared.free, shared.total)} free"
        yield Finding("shared memory", found, advice if shared.free < 512 << 20 else "")
    temporary = ("temporary files", Path(tempfile.gettempdir()), "TMPDIR")
    for name, directory, variable in (temporary, ("model cache", default_cache_dir(), "XDG_CACHE_HOME")):
        try:
            usage = shutil.disk_usage(writable_place(directory))
        except OSError as error:
            yield Finding(name, str(error), f"chown it, or name another in {variable}")
            continue
        advice = "free some space (/tmp/ray holds old logs of Ray): Ray treats a node with a disk over 95 % as broken"
        found = f"{directory}: {_free(usage.free, usage.total)} free"
        yield Finding(name, found, advice if usage.free < 0.05 * usage.total else "")


def _free(free: int, total: int) -> str:
    return f"{free / GIB:.1f} of {total / GIB:.1f} GiB"


def torch() -> Finding:
    """Find torch's device, in a separate process: the import takes some seconds, and may crash."""
    command = [sys.executable, *path_flags(), "-c", _TORCH]
    try:
        with console.status("asking torch for its device"):
            done = subprocess.run(  # noqa: S603  # our own program
                command, capture_output=True, text=True, timeout=_TORCH_WITHIN_S, check=False
            )
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Finding("torch", f"does not answer within {_TORCH_WITHIN_S} s", _REINSTALL)
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["it ended without a message"])[-1]
        return Finding("torch", f"cannot be imported: {last}", _REINSTALL)
    found = f"{answer['version']} on {', '.join(answer['gpus']) or 'the CPU'}"
    if not answer["gpus"] and answer["cuda"] and shutil.which("nvidia-smi"):
        advice = "compare the driver in nvidia-smi with pytorch.org"
        return Finding("torch", f"{found}, though there is a GPU", advice, minor=True)
    return Finding("torch", found)
