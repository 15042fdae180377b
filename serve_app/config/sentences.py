"""Converts pydantic's errors to sentences with a remedy. No sentence repeats a value, because it may be a key."""

import re
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from serve_app.config.quantities import quantity_text

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "decimal": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list: [A, B]",
    "dict": "pairs of NAME: VALUE",
    "model": "pairs of NAME: VALUE",
    "path": "a path",
    "finite": "a number",
    "datetime": "a moment with its time zone, such as 2027-01-31T00:00:00Z",
    "timezone": "a moment with its time zone, such as 2027-01-31T00:00:00Z",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "below"),
}
OPTIONS = frozenset(
    {"config", "haproxy", "host", "keep_alive_timeout_s", "max_connections_per_address", "port", "verbose"}
)
"""Of `warmpath serve`, in the form of settings, which they are not: they are of one machine, or one start."""
NO_SETTING = "there is no such setting"
MOST_LISTED = 8
"""So many settings are named to who asks for one that is not there."""
_CHOICE = re.compile(r"'([^']*)'")
_HASHES = ("key_sha256", "operator_key_sha256")
_KEYS = frozenset({"key", "keys", "api_key", "api_keys", "operator_key", "operator_keys"})


def unknown_setting(name: str, names: Collection[str]) -> str:
    """Return a sentence on a name that is not in ``names``."""
    if name in _KEYS:
        return "only SHA-256 sums of keys are written here, as `key_sha256`; `warmpath keys new NAME` makes both"
    if name.replace("-", "_") in OPTIONS:
        http = "; a Serve config file has it under http_options" if name in ("host", "port") else ""
        return f"{NO_SETTING}; it is an option of `warmpath serve`, --{name.replace('_', '-')}{http}"
    if name.startswith("data_parallel"):
        return f"{NO_SETTING}; set data_parallel_size, and warmpath sets the rest"
    plain = name.replace("-", "_").lower()
    short = [full for full in names if "_" in full and "".join(word[0] for word in full.split("_")) == plain]
    near = short or get_close_matches(plain, names, n=1)
    few = f"there are {', '.join(names)}" if len(names) <= MOST_LISTED else "leave it out"
    return f"{NO_SETTING}; {f'did you mean {near[0]}?' if near else few}"


def sentence(error: ErrorDetails, settings: type[BaseModel]) -> str:
    """Return a sentence on one of pydantic's errors in ``settings``."""
    where, kind = error["loc"], error["type"]
    if kind == "extra_forbidden":
        return unknown_setting(str(where[-1]), _model_of(where, settings).model_fields)
    if any(name in where for name in _HASHES) and kind.startswith("string"):
        return "a key is given as its SHA-256, 64 hex digits; make both with `warmpath keys`"
    name = next((str(step) for step in reversed(where) if isinstance(step, str)), "")
    if kind in _BOUNDS:
        limit, word = _BOUNDS[kind]
        return f"must be {word} {quantity_text(error['ctx'][limit], name)}"
    match kind:
        case "missing":
            return "is missing"
        case "literal_error":
            return _one_of(_CHOICE.findall(error["ctx"]["expected"]), error["input"])
        case "string_pattern_mismatch":
            return "must be 1 to 64 letters, digits and _ . - and begin with a letter or digit"
        case "too_short" | "string_too_short":
            return "must not be empty"
    expected = _TYPES.get(kind.partition("_")[0])
    if expected is not None:
        near = get_close_matches(str(error["input"]).lower(), ("true", "false"), n=1) if kind.startswith("bool") else []
        # A map's own description has an example of it.
        owner = settings if len(where) == 1 else _model_of(where, settings) if kind == "model_type" else None
        field = owner.model_fields.get(str(where[-1])) if owner is not None else None
        about = f" ({field.description})" if field is not None and field.description else ""
        return f"must be {expected}{about}" + (f"; did you mean {near[0]}?" if near else "")
    return error["msg"].removeprefix("Value error, ")


def ended(text: str) -> str:
    """Return a sentence with a full stop, unless it ends with a question."""
    return text if text.endswith("?") else f"{text}."


def _one_of(choices: list[str], given: Any) -> str:
    near = get_close_matches(given.lower(), choices, n=1) if isinstance(given, str) else []
    return f"must be one of {', '.join(choices)}" + (f"; did you mean {near[0]}?" if near else "")


def _model_of(where: tuple[int | str, ...], settings: type[BaseModel]) -> type[BaseModel]:
    """Return the settings model that contains the last name of a location."""
    model = settings
    for step in where[:-1]:
        if isinstance(step, str) and step in model.model_fields:
            model = next(_models(model.model_fields[step].annotation), model)
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
