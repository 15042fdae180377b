"""A LoRA adapter on disk, in PEFT's format: its files, its config and its digest.

Unsupported config is refused with an explanation. Imports no torch, so that an ingress can name an adapter.
"""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from serve_app.engine.protocol import AdapterError, AdapterSpec

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,127}")
"""Allowed adapter names: no "@", which separates name and digest in a key."""

_INERT = frozenset(
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r target_modules "
    "exclude_modules lora_alpha lora_dropout bias use_rslora init_lora_weights layers_to_transform layers_pattern "
    "megatron_core qalora_group_size runtime_config eva_config loftq_config".split()
)
"""Fields that are read below, or that do not change how a finished adapter is applied."""

_BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that also change the base model's weights: the adapter fits only that changed model."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """How to apply an adapter: one rank and one scale for all its modules."""

    rank: int
    alpha: float
    use_rslora: bool = False

    @property
    def scale(self) -> float:
        """Factor of the adapter's product. Source: PEFT's ``LoraLayer.update_layer``."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    def check_rank(self, most: int) -> None:
        """Raise AdapterError if the rank exceeds ``most``."""
        if self.rank > most:
            raise AdapterError(f"rank {self.rank} is over max_lora_rank {most}")


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """``weights``: the safetensors bytes; ``tensors``: their names; ``digest``: SHA-256 of config and bytes."""

    config: AdapterConfig
    weights: bytes
    tensors: tuple[str, ...]
    digest: str


def describe_adapter(
    name: str, path: str | Path, *, root: Path | None = None, max_rank: int | None = None
) -> AdapterSpec:
    """Return the spec of the adapter at ``path``: its directory, or its safetensors file with the config beside it.

    With a ``root``, links that lead out of it are refused. Raises AdapterError, also for an invalid name and for a
    rank over ``max_rank``.
    """
    if not NAME.fullmatch(name):
        raise AdapterError(f"{name[:64]!r} is not a valid adapter name: use letters, digits and _.:/- (at most 128)")
    where = Path(path).expanduser().resolve()
    file = _parsed(*_read_files(where, root))
    if max_rank is not None:
        file.config.check_rank(max_rank)
    return AdapterSpec(name, file.digest, str(where))


def read_described(spec: AdapterSpec) -> AdapterFile:
    """Read the adapter of ``spec``. Raises AdapterError if its files changed since they were described."""
    raw_config, weights = _read_files(Path(spec.path))
    # Errors in a changed config are not reported: it could be any file by now.
    with suppress(AdapterError):
        file = _parsed(raw_config, weights)
        if file.digest == spec.digest:
            return file
    raise AdapterError(f"the files of the adapter {spec.name!r} changed after it was loaded; load it again")


def _parsed(raw_config: bytes, weights: bytes) -> AdapterFile:
    config = parse_config(raw_config)
    try:
        header = weights[8 : 8 + int.from_bytes(weights[:8], "little")]
        tensors = msgspec.json.decode(header, type=dict[str, dict[str, Any]])
    except (ValueError, RecursionError) as error:
        raise AdapterError("the adapter's weights are not a complete safetensors file; copy it again") from error
    digest = sha256(msgspec.json.encode(config))
    digest.update(b"\n" + weights)
    return AdapterFile(config, weights, tuple(tensors), digest.hexdigest())


def _read_files(where: Path, root: Path | None = None) -> tuple[bytes, bytes]:
    """Return the bytes of an adapter's config and of its weights. Raises AdapterError."""
    try:
        given = where / WEIGHTS_FILE if where.is_dir() else where
        config_file, file = (_resolved(path, root) for path in (given.parent / CONFIG_FILE, given))
        if given.suffix != ".safetensors" or not file.is_file():
            raise AdapterError(
                f"there is no {WEIGHTS_FILE} at this path; give an adapter's directory, as PEFT saves it"
            )
        if not config_file.is_file():
            raise AdapterError(f"{CONFIG_FILE} is missing beside {given.name}; copy it too")
        return config_file.read_bytes(), file.read_bytes()
    except OSError as error:  # also of a path that is too long to be one
        raise AdapterError(f"the adapter's files cannot be read ({error.strerror})") from error


def _resolved(file: Path, root: Path | None) -> Path:
    """Return the real path, links followed. Raises AdapterError if it is outside ``root``."""
    where = Path(os.path.realpath(file))
    if root is not None and not where.is_relative_to(os.path.realpath(root)):
        raise AdapterError(f"{file.name} is a link that leads out of lora_root; put the file itself there")
    return where


def parse_config(raw: bytes) -> AdapterConfig:
    """Read PEFT's adapter_config.json. Raises AdapterError for fields that change results and are not supported."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE} is not a JSON object") from error
    if str(fields.get("peft_type", "LORA")).upper() != "LORA":
        raise AdapterError(f"peft_type {fields['peft_type']!r} is not supported: only LORA is")
    if fields.get("bias", "none") not in (None, "none"):
        raise AdapterError("adapters with trained biases (bias) are not supported; train with bias='none'")
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_BASE_CHANGING):
        raise AdapterError(f"init_lora_weights {start!r} changes the base model; convert it to plain LoRA when saving")
    for name, value in fields.items():
        # A number or a string only tunes a feature that a switch, a list or an object turns on.
        if name not in _INERT and (value is True or (isinstance(value, dict | list) and value)):
            raise AdapterError(f"{name} is not supported; save the adapter as plain LoRA")
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterError("r must be a whole number of at least 1")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) < float("inf"):
        raise AdapterError("lora_alpha must be a number")
    return AdapterConfig(rank, float(alpha), bool(fields.get("use_rslora")))
