"""`warmpath check`: what is wrong with a Serve config file, a RayService or a settings file before it is deployed.

Every mistake has its line, its place and a remedy. Nothing is started, and no cluster is asked;
checkpoints, adapters and secrets are looked into where they are on this machine, and missed where they are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from serve_app.cli.checks.settings import Place, before_model, with_model
from serve_app.config.files import rooted
from serve_app.config.live import BadSettings, Location, app_config, overlaid

IMPORT_PATH = "serve_app.app:build_app"
DEPLOYMENTS = ("Ingress", "Replica")


@dataclass(frozen=True, slots=True)
class Mistake:
    """``line``: from 1; ``place``: a path of names and numbers, "" for the whole file."""

    line: int
    place: str
    what: str


def mistakes_in(text: str, directory: Path | None = None, *, place_of_run: Place = "elsewhere") -> list[Mistake]:
    """Return what is wrong with a file's text. Raises ValueError where it is not YAML at all.

    ``directory``: where the file lies, and the relative paths of a settings file start. ``place_of_run``: whether what
    it names is to be on this machine; pods have their own.
    """
    document = _Document(text)
    values = document.values
    if not isinstance(values, Mapping):
        return [Mistake(1, "", "the file holds no NAME: VALUE pairs")]
    if values.get("kind") == "RayService":
        return list(_ray_service(document))
    if "applications" in values:
        return list(_serve_config(document, place_of_run))
    return list(_settings(document, (), place_of_run, directory))


class _Document:
    """Values of a YAML text, and the line of each.

    ``before``: lines of a file in front of the text. ``as_written``: whether its lines are lines of that file.
    """

    def __init__(self, text: str, before: int = 0, *, as_written: bool = True) -> None:
        try:
            self.values = yaml.safe_load(text)
            self.root: Any = yaml.compose(text, yaml.SafeLoader)
        except yaml.YAMLError as error:
            raise ValueError(f"this is not YAML: {error}") from None
        self.before = before
        self.as_written = as_written

    def at(self, place: Location) -> Any:
        """Return the value at a place, None where there is none."""
        value = self.values
        try:
            for step in place:
                value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
        return value

    def mistake(self, place: Location, what: str) -> Mistake:
        """Return a mistake at a place, with the line of the nearest thing that is there."""
        line = self._nearest(place)[0] + 1 if self.as_written else 0
        return Mistake(self.before + line, ".".join(map(str, place)), what)

    def inner(self, place: Location) -> _Document:
        """Return the YAML that is the text at a place."""
        line, node = self._nearest(place)
        return _Document(self.at(place), line + 1, as_written=node.style == "|")

    def _nearest(self, place: Location) -> tuple[int, Any]:
        node, line = self.root, self.root.start_mark.line
        for step in place:
            child = _child(node, step)
            if child is None:
                break
            line, node = child
        return line, node


def _child(node: Any, step: int | str) -> tuple[int, Any] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(step):
                return key.start_mark.line, value
    elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step].start_mark.line, node.value[step]
    return None


def _ray_service(document: _Document) -> Iterator[Mistake]:
    place: Location = ("spec", "serveConfigV2")
    inner = document.inner(place) if isinstance(document.at(place), str) else None
    if inner is None or not isinstance(inner.values, Mapping):
        yield document.mistake(place, "a RayService needs the Serve config here, as text after `|`")
        return
    yield from _serve_config(inner, "elsewhere")


def _serve_config(document: _Document, place_of_run: Place) -> Iterator[Mistake]:
    from ray.serve.schema import ServeDeploySchema  # seconds, which a settings file need not wait for

    try:
        ServeDeploySchema.model_validate(document.values)
    except ValidationError as error:
        for detail in error.errors():
            yield document.mistake(detail["loc"], detail["msg"].removeprefix("Value error, "))
        return
    except (AttributeError, TypeError):  # its validators look into what may be anything
        what = "an entry of applications or deployments holds no NAME: VALUE pairs; see cluster/serve_config.yaml"
        yield document.mistake(("applications",), what)
        return
    ours = [n for n, app in enumerate(document.at(("applications",))) if app["import_path"] == IMPORT_PATH]
    for number in ours:
        yield from _application(document, ("applications", number), place_of_run)
    if not ours:
        yield document.mistake(("applications",), f"no application has the import_path {IMPORT_PATH}")


def _application(document: _Document, place: Location, place_of_run: Place) -> Iterator[Mistake]:
    args = list(_settings(document, (*place, "args"), place_of_run))
    yield from args
    user_configs: dict[str, Any] = {}
    places: dict[str, Location] = {}
    for number, deployment in enumerate(document.at((*place, "deployments")) or ()):
        name, where = deployment["name"], (*place, "deployments", number)
        if name not in DEPLOYMENTS:
            yield document.mistake((*where, "name"), f"there is no deployment {name!r}; there are Ingress and Replica")
            continue
        user_configs[name], places[name] = deployment.get("user_config") or {}, (*where, "user_config")
    if user_configs.get("Ingress", {}) != user_configs.get("Replica", {}):
        where = places.get("Replica", places.get("Ingress", place))
        what = "Ingress and Replica need the same user_config; write it once with a YAML anchor (&live, *live)"
        yield document.mistake(where, what)
    if args:
        return
    config = app_config(document.at((*place, "args")) or {})
    for name, where in places.items():
        try:
            overlaid(config, user_configs[name])
        except BadSettings as error:
            for inner, what in error.found:
                yield document.mistake((*where, *inner), what)


def _settings(
    document: _Document, place: Location, place_of_run: Place, directory: Path | None = None
) -> Iterator[Mistake]:
    values = document.at(place) or {}
    if directory is not None and isinstance(values, Mapping):
        values = rooted(values, directory)
    try:
        config = app_config(values)
    except BadSettings as error:
        for where, sentence in error.found:
            yield document.mistake((*place, *where), sentence)
        return
    for setting, sentence in (*before_model(config, place_of_run), *with_model(config, place_of_run)):
        yield document.mistake((*place, setting), sentence)
