"""What the machine has: memory, room on disks, models, a GPU. Fetches nothing.

torch is asked in a process of its own, which takes some seconds and may fail in its own way.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
from huggingface_hub import constants

from serve_app.checkpoints.model_cache import default_cache_dir
from serve_app.checkpoints.sources.smollm2 import SMOLLM2
from serve_app.cli.checks.finding import GIB, Case, Finding, judged, problem, warning
from serve_app.cli.console import console
from serve_app.cli.supervisor import path_flags

_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""
_TORCH_WITHIN_S = 180
_REINSTALL = "pip install --force-reinstall torch"
_CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # looked at, not written
_MIN_SHARED_BYTES = 512 << 20
_MIN_FREE_BYTES = 2 * GIB
_MIN_FREE_SHARE = 0.05
"""Ray takes a node whose disk is fuller for a broken one."""


def memory_bytes() -> int:
    """Return this machine's memory, or what this container may take of it."""
    machine_bytes = int(psutil.virtual_memory().total)
    try:
        return min(machine_bytes, int(_CGROUP_MEMORY.read_text()))
    except (OSError, ValueError):  # no container, or no limit: "max"
        return machine_bytes


def writable_place(directory: Path) -> Path:
    """Return the directory, or the nearest above it that exists. Raises OSError where this user may not write there."""
    place = next(path for path in (directory, *directory.parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise OSError(f"{place} is no directory that this user may write to")
    return place


def memory(case: Case) -> Iterator[Finding]:
    """Whether memory is free."""
    total = memory_bytes()
    free = min(psutil.virtual_memory().available, total)
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    advice = "two replicas of the default model need 2 GiB: stop something" if free < _MIN_FREE_BYTES else ""
    yield judged("memory", found, advice)


def shared_memory(case: Case) -> Iterator[Finding]:
    """Whether Ray's object store has room."""
    if not _SHARED_MEMORY.exists():
        return
    shared = shutil.disk_usage(_SHARED_MEMORY)
    found = f"{_SHARED_MEMORY}: {shared.free / GIB:.1f} of {shared.total / GIB:.1f} GiB free"
    advice = "Ray's objects lie there: docker run --shm-size 2g, or free some"
    yield judged("shared memory", found, advice if shared.free < _MIN_SHARED_BYTES else "")


def disks(case: Case) -> Iterator[Finding]:
    """Whether temporary files and models can be written, and their disks have room."""
    temporary = ("temporary files", Path(tempfile.gettempdir()), "TMPDIR")
    for name, directory, variable in (temporary, ("model cache", default_cache_dir(), "XDG_CACHE_HOME")):
        try:
            usage = shutil.disk_usage(writable_place(directory))
        except OSError as error:
            yield problem(name, str(error), f"chown it, or name another in {variable}")
            continue
        found = f"{directory}: {usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
        advice = "free some (logs of ended Rays lie in /tmp/ray): one over 95 % full is a broken node to Ray"
        yield judged(name, found, advice if usage.free < _MIN_FREE_SHARE * usage.total else "")


def models(case: Case) -> Iterator[Finding]:
    """Which models are here already, and whether others could be fetched."""
    made, fetched = default_cache_dir(), Path(constants.HF_HUB_CACHE)
    has_default, hub_models = any(made.glob(f"{SMOLLM2}*")), len(list(fetched.glob("models--*")))
    offline = constants.HF_HUB_OFFLINE
    found = (
        f"the default model is {'' if has_default else 'not '}in {made}; {hub_models} of the hub's in {fetched}"
        f"{'; HF_HUB_OFFLINE is set' if offline else ''}"
    )
    if offline and not has_default and not hub_models:
        advice = "unset HF_HUB_OFFLINE once, or serve a directory (--model), or the built-in demo"
        yield warning("models", found, advice)
    else:
        yield Finding("models", "ok", found)


def torch(case: Case) -> Iterator[Finding]:
    """What torch computes on."""
    command = [sys.executable, *path_flags(), "-c", _TORCH]
    try:
        with console.status("asking torch what it computes on"):
            done = subprocess.run(  # noqa: S603  # our own program
                command, capture_output=True, text=True, timeout=_TORCH_WITHIN_S, check=False
            )
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        yield problem("torch", f"does not answer within {_TORCH_WITHIN_S} s", _REINSTALL)
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        yield problem("torch", f"cannot be imported: {last}", _REINSTALL)
    else:
        device = ", ".join(answer["gpus"]) or "the CPU"
        found = f"{answer['version']} on {device}"
        if not answer["gpus"] and answer["cuda"] and shutil.which("nvidia-smi"):
            advice = "nvidia-smi says which driver; see pytorch.org"
            yield warning("torch", f"{found}, though there is a GPU", advice)
        else:
            yield Finding("torch", "ok", found)
