"""What the machine has: a GPU, memory, shared memory, room on disks.

torch is asked in a process of its own, which takes some seconds and may fail in its own way.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from serve_app.cli.doctor.finding import Finding, problem, warning
from serve_app.cli.preflight import memory_bytes
from serve_app.cli.supervisor import path_flags

GIB = 1 << 30
_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""
_TORCH_WITHIN_S = 180
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # looked at, not written
_MIN_SHARED_BYTES = 512 << 20
_MIN_FREE_BYTES = 2 * GIB
_MIN_FREE_SHARE = 0.05
"""Ray takes a node whose disk is fuller for a broken one."""
_MIN_FILES = 4096


def device() -> Finding:
    """Ask torch what it can compute on."""
    asked = [sys.executable, *path_flags(), "-c", _TORCH]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_TORCH_WITHIN_S, check=False)  # noqa: S603
        said = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 and done.stdout else None
    except (subprocess.TimeoutExpired, ValueError) as error:
        return problem("torch", f"does not answer: {type(error).__name__}", "pip install --force-reinstall torch")
    if said is None:
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        return problem("torch", f"cannot be imported: {last}", "pip install --force-reinstall torch")
    if said["gpus"]:
        return Finding("torch", "ok", f"{said['version']} on {', '.join(said['gpus'])}")
    found = f"{said['version']} on the CPU"
    if said["cuda"] and shutil.which("nvidia-smi"):
        return warning("torch", f"{found}, though there is a GPU", "nvidia-smi says which driver; see pytorch.org")
    return Finding("torch", "ok", found)


def room(places: dict[str, Path]) -> Iterator[Finding]:
    """Look at memory, shared memory, open files and the disks of ``places`` (name -> directory)."""
    yield _memory()
    if _SHARED_MEMORY.exists():
        shared = shutil.disk_usage(_SHARED_MEMORY)
        found = f"{_SHARED_MEMORY}: {shared.free / GIB:.1f} of {shared.total / GIB:.1f} GiB free"
        if shared.free < _MIN_SHARED_BYTES:
            yield problem("shared memory", found, "Ray's objects lie there: docker run --shm-size 2g, or free some")
        else:
            yield Finding("shared memory", "ok", found)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < _MIN_FILES:
        yield warning("open files", f"at most {files} a process", f"ulimit -n {_MIN_FILES} before the start")
    for name, directory in {"temporary files": Path(tempfile.gettempdir()), **places}.items():
        yield disk(name, directory)


def disk(name: str, directory: Path) -> Finding:
    """Look at one directory: may it be written, and is there room on its disk?"""
    nearest = next(place for place in (directory, *directory.parents) if place.exists())
    usage = shutil.disk_usage(nearest)
    found = f"{directory}: {usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return problem(name, f"{nearest} is no directory that this user may write to", "name another, or chown it")
    if usage.free < _MIN_FREE_SHARE * usage.total:
        return problem(name, found, "free some: Ray takes a disk that is over 95 % full for a broken node")
    return Finding(name, "ok", found)


def _memory() -> Finding:
    total = memory_bytes()
    free = min(psutil.virtual_memory().available, total)
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < _MIN_FREE_BYTES:
        return problem("memory", found, "two replicas of the default model need 2 GiB: stop something")
    return Finding("memory", "ok", found)
