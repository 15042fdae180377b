"""What of the settings cannot be used, as far as that shows before anything is started: one sentence each.

Asks the functions that replicas and ingresses ask when they start, so the sentences are the same wherever they come.
Loads no weights; transformers is loaded in a process of its own, for a checkpoint that is none of the built-in ones.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil

from serve_app.checkpoints.adapter_registry import configured_adapters
from serve_app.checkpoints.checkpoint import CheckpointError, CheckpointInfo
from serve_app.checkpoints.drafter import load_served_model
from serve_app.checkpoints.limits import max_model_len
from serve_app.checkpoints.sources.resolve import BUILT_IN
from serve_app.cli.supervisor import path_flags
from serve_app.config.app import AppConfig, is_hub_id
from serve_app.config.cache import CPU_POOL_BYTES
from serve_app.engine.runner.kv_size import kv_bytes_per_block
from serve_app.generation.tool_calls.formats import check_format
from serve_app.replica.engine_factory import MAKERS
from serve_app.tenants.secret import load_secret

_GIB = 1 << 30
_CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")
_ARCHITECTURE = """
import sys
from pathlib import Path
from serve_app.engine.attention.supported import served_config
try:
    served_config(Path(sys.argv[1]))
except (ValueError, OSError) as error:
    print(error)
"""

Check = Callable[[], object]
"""Raises ValueError or OSError with the sentence."""


@dataclass(frozen=True, slots=True)
class Found:
    """``model``: the checkpoint's directory, None where there is none that can be served."""

    model: Path | None
    sentences: tuple[str, ...]


def problems(settings: AppConfig, *, elsewhere: bool = False) -> Found:
    """Return what cannot be used of settings whose model is on this machine.

    ``elsewhere``: whether the settings may be for other machines. Then what is not on this one is not missed.
    """
    sentences: list[str] = []
    if settings.autoscaling is not None and "replicas" in settings.model_fields_set:
        sentences.append("replicas has no effect beside autoscaling: leave it out, min_replicas and max_replicas count")
    maker = MAKERS[settings.engine]
    sentences += maker.refused_settings(settings, on_cpu=not settings.replica_num_gpus)
    info: CheckpointInfo | None = None
    checks: list[Check] = []
    if not elsewhere or Path(settings.model).expanduser().is_dir():
        try:
            info = load_served_model(settings)
        except (ValueError, OSError) as error:
            sentences.append(str(error))
        else:
            checks += _model_checks(settings, info)
            sentences += maker.refused_model(json.loads((info.path / "config.json").read_text()))
    checks.append(lambda: check_format(settings.tool_parser))
    adapters = {name: path for name, path in settings.lora_adapters.items() if not elsewhere or path.exists()}
    checks.append(lambda: configured_adapters(adapters, settings.max_lora_rank))
    if not elsewhere or (settings.secret_file is not None and settings.secret_file.exists()):
        checks.append(lambda: load_secret(secret_file=settings.secret_file))
    if not elsewhere:
        checks += [lambda: _check_memory(settings, info), lambda: _check_disk(settings)]
        checks.append(lambda: _check_usage_file(settings))
    for check in checks:
        try:
            check()
        except (ValueError, OSError) as error:
            sentences.append(str(error))
    return Found(info.path if info is not None else None, tuple(sentences))


def absent(settings: AppConfig) -> Iterator[tuple[str, str]]:
    """Yield what settings name and this machine lacks: the setting, and a sentence. Nothing is fetched."""
    if missing := settings.engine_traits.missing():
        yield "engine", missing
    model = Path(settings.model).expanduser()
    if settings.model not in BUILT_IN and not is_hub_id(settings.model) and model.is_absolute() and not model.exists():
        yield "model", f"there is no {model}; name a checkpoint's directory, a GGUF file or a hub id"
    files = [("lora_adapters", f"adapter {name}", path) for name, path in settings.lora_adapters.items()]
    if settings.secret_file is not None:
        files.append(("secret_file", "secret", settings.secret_file))
    for setting, what, path in files:
        file = path.expanduser()
        if file.is_absolute() and not file.exists():
            yield setting, f"the file of the {what}, {file}, is not there"


def _model_checks(settings: AppConfig, info: CheckpointInfo) -> list[Check]:
    checks: list[Check] = [lambda: max_model_len(settings, info), lambda: _check_blocks(settings, info.path)]
    if settings.engine_traits.built_in and settings.model not in BUILT_IN:
        checks.append(lambda: _check_architecture(info.path))
    return checks


def _check_architecture(path: Path) -> None:
    asked = subprocess.run(  # noqa: S603  # our own program
        [sys.executable, *path_flags(), "-c", _ARCHITECTURE, str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if asked.stdout.strip():
        raise CheckpointError(asked.stdout.strip())


def _check_blocks(settings: AppConfig, path: Path) -> None:
    """Raise ValueError where a budget cannot hold one KV block, by the least that a block may take."""
    fields = json.loads((path / "config.json").read_text())
    fields = fields.get("text_config", fields)
    dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
    try:
        block_bytes = kv_bytes_per_block(SimpleNamespace(**fields), dtype, settings.block_size)
    except (AttributeError, TypeError):
        return  # what the file leaves to transformers' defaults is seen in the replica
    for name in ("kv_cache_bytes", "host_cache_bytes", "disk_cache_bytes"):
        budget_bytes = getattr(settings, name)
        if budget_bytes and budget_bytes < block_bytes:
            raise ValueError(f"{name}={budget_bytes} cannot hold one KV block of {block_bytes} bytes")


def _check_memory(settings: AppConfig, info: CheckpointInfo | None) -> None:
    """Raise ValueError where what replicas hold in this machine's memory is more than it has."""
    if settings.engine_traits.simulated or settings.replica_num_gpus or info is None:
        return
    weights_bytes = sum(file.stat().st_size for file in info.path.glob("*.safetensors"))
    pool_bytes = 0 if settings.num_blocks else settings.kv_cache_bytes or CPU_POOL_BYTES
    needed_bytes = settings.first_replicas * (weights_bytes + pool_bytes + settings.host_cache_bytes)
    if needed_bytes > memory_bytes():
        raise ValueError(
            f"{settings.first_replicas} replicas need {needed_bytes / _GIB:.1f} GiB for weights "
            f"({weights_bytes / _GIB:.1f} each), kv_cache_bytes ({pool_bytes / _GIB:.1f}) and host_cache_bytes "
            f"({settings.host_cache_bytes / _GIB:.1f}), and this machine has {memory_bytes() / _GIB:.1f} GiB"
        )


def memory_bytes() -> int:
    """Return this machine's memory, or what this container may take of it."""
    machine_bytes = int(psutil.virtual_memory().total)
    try:
        return min(machine_bytes, int(_CGROUP_MEMORY.read_text()))
    except (OSError, ValueError):  # no container, or no limit: "max"
        return machine_bytes


def _check_usage_file(settings: AppConfig) -> None:
    """Raise ValueError where the file of usage could not be made or written; nothing is made here."""
    if settings.usage_file is None:
        return
    file = settings.usage_file.expanduser().absolute()
    place = file if file.exists() else file.parent
    if file.is_dir() or not os.access(place, os.W_OK):
        raise ValueError(f"usage_file={file} is no file that this user may write; name another one")


def _check_disk(settings: AppConfig) -> None:
    """Raise ValueError where the disk tier's directory cannot be made or written, or its disk is too small."""
    directory = settings.disk_cache_dir
    if not settings.disk_cache_bytes or directory is None:
        return
    directory = directory.expanduser().absolute()
    nearest = next(place for place in (directory, *directory.parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"disk_cache_dir={directory}: {nearest} is no directory that this user may write to")
    needed_bytes, disk_bytes = settings.first_replicas * settings.disk_cache_bytes, shutil.disk_usage(nearest).total
    if needed_bytes > disk_bytes:
        raise ValueError(
            f"{settings.first_replicas} replicas with disk_cache_bytes={settings.disk_cache_bytes} need "
            f"{needed_bytes / _GIB:.1f} GiB, and the disk of {nearest} has {disk_bytes / _GIB:.1f} GiB"
        )
