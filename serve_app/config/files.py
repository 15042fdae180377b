"""Settings from a file, ``NAME=VALUE`` and flags. Only paths in a file are relative to the file's directory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from serve_app.config.app import AppConfig, is_template
from serve_app.config.live import BadSettings, app_config
from serve_app.errors import unread

PATHS = frozenset(name for name, field in AppConfig.model_fields.items() if field.annotation == Path | None)
_DRAFTERS = {"speculative_config": "model", "engine_args": "spec_model"}
"""Settings -> the field in them that names a model."""


def load_settings(
    config: Path | None, assignments: Sequence[str], engine_args: Sequence[str] = (), **flags: Any
) -> AppConfig:
    """Merge a settings file, ``NAME=VALUE`` assignments and flags. Later values win. Raises ValueError.

    ``engine_args``: assignments to the arguments in the setting of that name.
    """
    merged: dict[str, Any] = {}
    if config is not None:
        try:
            loaded = read_yaml(config.read_text())
        except NotYaml as error:
            raise ValueError(f"{config}:{error.line}: {error}") from error
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read the settings file {config}: {unread(error)}") from error
        if not isinstance(loaded, dict):
            raise ValueError(f"the settings file {config} must hold NAME: VALUE pairs")
        merged.update(rooted(loaded, config.parent))
    arguments: dict[str, Any] = {}
    given = [("--set", merged, one) for one in assignments] + [("--engine-arg", arguments, one) for one in engine_args]
    for flag, values, assignment in given:
        name, separator, value = assignment.partition("=")
        if not separator:
            raise ValueError(f"{flag} takes NAME=VALUE, not {assignment!r}")
        try:
            values[name] = read_yaml(value)
        except NotYaml as error:
            raise ValueError(f"{flag} {name}: the value is not YAML; put it in quotes") from error
    before = merged.get("engine_args") or {}
    if arguments and isinstance(before, Mapping):
        merged["engine_args"] = {**before, **{name.replace("-", "_"): value for name, value in arguments.items()}}
    merged.update({name: value for name, value in flags.items() if value is not None})
    try:
        return app_config(merged)
    except BadSettings as error:
        raise ValueError(f"settings: {error}") from None


class NotYaml(ValueError):
    """A text is not YAML; the message says why. ``line``: from 1."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(f"this is not YAML: {why}")
        self.line = line


class _Loader(yaml.SafeLoader):
    """The safe loader, which also tells the line of a number or date that is none."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:  # as the base class
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from error


def read_yaml(text: str) -> Any:
    """Return the values of a YAML text. Raises NotYaml."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506  # it is a safe loader
    except RecursionError:
        raise NotYaml(1, "it is nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        if "'\\t'" in problem:
            problem = "a tab; indent with spaces"
        raise NotYaml(1 if mark is None else mark.line + 1, problem) from error


def rooted(settings: Mapping[Any, Any], directory: Path) -> dict[Any, Any]:
    """Return settings with relative paths resolved from ``directory``. Invalid values stay unchanged."""
    base = directory.absolute()

    def path(value: Any) -> Any:
        return str(base / Path(value).expanduser()) if isinstance(value, str) and value else value

    def model(value: Any) -> Any:
        if not isinstance(value, str) or not value:
            return value
        # Any other value is a model's name.
        written_as_path = value.startswith(("./", "../", "~")) or value in (".", "..")
        return path(value) if written_as_path or ("/" in value and (base / value).exists()) else value

    rooted_settings: dict[Any, Any] = dict(settings)
    for name, value in settings.items():
        if name in PATHS:
            rooted_settings[name] = path(value)
        elif name == "model":
            rooted_settings[name] = model(value)
        elif name == "chat_template" and not is_template(value):
            rooted_settings[name] = path(value)
        elif (field := _DRAFTERS.get(name)) and isinstance(value, Mapping) and field in value:
            rooted_settings[name] = {**value, field: model(value[field])}
        elif name == "models" and isinstance(value, list):
            rooted_settings[name] = [
                rooted(entry, directory) if isinstance(entry, Mapping) else entry for entry in value
            ]
        elif name == "traffic_log" and isinstance(value, Mapping) and "path" in value:
            rooted_settings[name] = {**value, "path": path(value["path"])}
        elif name == "lora_adapters" and isinstance(value, Mapping):
            rooted_settings[name] = {adapter: path(where) for adapter, where in value.items()}
    return rooted_settings
