"""Fields that are the same in every API of text, and their bounds."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from serve_app.api.json_body import Must
from serve_app.errors import InvalidRequest

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_ID_CHARS = 1024

ModelName = Annotated[
    str,
    Field(min_length=1, max_length=256, description="the served model, or a LoRA adapter"),
    Must("the name of a model in 1 to 256 characters, see GET /v1/models"),
]
StoreKV = Annotated[
    bool | None,
    Field(description="false: read the cache and leave nothing in it; default: the tenant's setting"),
    Must("true or false"),
]


def stop_strings(value: Any) -> tuple[str, ...]:
    """Return a list of stop strings, each once. Raises ValueError for anything else."""
    if not isinstance(value, list) or len(value) > MAX_STOPS:
        raise ValueError
    if not all(isinstance(stop, str) and 1 <= len(stop) <= MAX_STOP_CHARS for stop in value):
        raise ValueError
    return tuple(dict.fromkeys(value))


def call_id(value: Any, path: str) -> str:
    """Return the id of a call that a result, or the call itself, names. Raises InvalidRequest."""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID_CHARS:
        raise InvalidRequest(f"{path} must be a string of 1 to {MAX_ID_CHARS} characters.", param=path)
    return value
