"""Sizes and durations with units: ``64MiB``, ``5m``."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)\s*")
_BYTES = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for base, suffixes in ((1000, ("", "b")), (1024, ("i", "ib")))
    for suffix in suffixes
}
"""Units in lower case: k, kb: 1000; ki, kib: 1024; and so on."""
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
MAX_CHARS = 32


def _bytes(value: Any) -> Any:
    if not isinstance(value, str) or value.strip().isdecimal():
        return value
    size = _SIZE.fullmatch(value.strip().lower())
    if size is None or len(value) > MAX_CHARS or size[2] not in _BYTES:
        raise PydanticCustomError("size", "must be a number of bytes, or a size such as 64MiB, 1.5GiB or 200MB")
    # No float, so that a size such as 1.1 units is only rounded once, down to a whole byte.
    whole, _, part = size[1].partition(".")
    return int(whole + part) * _BYTES[size[2]] // 10 ** len(part)


def _seconds(value: Any) -> Any:
    if not isinstance(value, str) or _is_number(value):
        return value
    text = value.strip().lower()
    if len(text) > MAX_CHARS or not re.fullmatch(f"(?:{_DURATION.pattern})+", text):
        raise PydanticCustomError(
            "duration", "must be a number of seconds, or a duration such as 500ms, 90s, 5m or 1h30m"
        )
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


InBytes = BeforeValidator(_bytes)
InSeconds = BeforeValidator(_seconds)
Bytes = Annotated[int, InBytes]
Seconds = Annotated[float, InSeconds]


def size_text(value: int) -> str:
    """Return a size as a whole number of the largest possible unit of 1024: ``8MiB``."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value and value % 1024**power == 0:
            return f"{value // 1024**power}{unit}"
    return str(value)


def duration_text(value: float) -> str:
    """Return a duration as a whole number of the largest possible unit: ``10m``, ``50ms``."""
    for unit in ("d", "h", "m", "s"):
        if value and value % _SECONDS[unit] == 0:
            return f"{int(value / _SECONDS[unit])}{unit}"
    return f"{value * 1000:g}ms" if 0 < value < 1 else f"{value:g}s" if value else "0"


def is_duration(name: str) -> bool:
    """Return whether a setting is a number of seconds, by its name."""
    return name.endswith("_s") and not name.endswith("_per_s")


def quantity_text(value: Any, name: str) -> str:
    """Return a setting's value or bound in the form of a settings file."""
    if isinstance(value, bool):
        return str(value).lower()
    if name.endswith("_bytes"):
        return size_text(value)
    return duration_text(value) if is_duration(name) else f"{value:g}" if isinstance(value, float) else str(value)
