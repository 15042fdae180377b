"""`warmpath check`: find mistakes in a Serve config, a RayService or a settings file, with line, place and remedy."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from serve_app.cli.checks.finding import Finding, Look, RunPlace, problem
from serve_app.cli.checks.run import findings
from serve_app.config.app import REPLICAS, AppConfig, deployment_of
from serve_app.config.files import NotYaml, read_yaml, rooted
from serve_app.config.live import BadSettings, Location, app_config, overlaid

INGRESS = "Ingress"
ROUTE_PREFIX = re.compile(r"/([^{}]*[^{}/])?")
IMPORT_PATHS = "serve_app:build_app", "serve_app:app", "serve_app.app:build_app"


def mistakes_in(text: str, directory: Path | None = None, *, place_of_run: RunPlace = "elsewhere") -> list[Finding]:
    """Return the mistakes in a file's text, by line.

    ``directory``: the base of relative paths in a settings file. ``place_of_run``: see ``RunPlace``.
    """
    try:
        found = _mistakes(text, directory, place_of_run)
    except NotYaml as error:
        return [replace(problem("", str(error)), line=error.line)]
    return sorted(found, key=lambda mistake: mistake.line)


def _mistakes(text: str, directory: Path | None, place_of_run: RunPlace) -> list[Finding]:
    document = _Document(text)
    values = document.values
    if not isinstance(values, Mapping):
        return [replace(problem("", "the file holds no NAME: VALUE pairs"), line=1)]
    if values.get("kind") == "RayService":
        return list(_ray_service(document))
    if "applications" in values:
        return list(_serve_config(document, place_of_run))
    return list(_settings(document, (), values if directory is None else rooted(values, directory), place_of_run))


class _Document:
    """A YAML text's values and lines. ``before``: the lines before it. ``as_written``: its lines are the file's."""

    def __init__(self, text: str, before: int = 0, *, as_written: bool = True) -> None:
        try:
            self.values = read_yaml(text)
        except NotYaml as error:
            error.line = before + (error.line if as_written else 0)
            raise
        self.root: Any = yaml.compose(text, yaml.SafeLoader)
        self.before = before
        self.as_written = as_written

    def mistake(self, place: Location, sentence: str) -> Finding:
        """Return a mistake at a place."""
        return self.at(place, problem("", sentence))

    def at(self, place: Location, finding: Finding) -> Finding:
        """Return a finding at a place, with the line of the nearest existing node."""
        line = self.nearest(place)[0] + 1 if self.as_written else 0
        return replace(finding, subject=".".join(map(str, place)), line=self.before + line)

    def nearest(self, place: Location) -> tuple[int, Any]:
        """Return the line and the node at a place, or of the place's nearest existing parent."""
        node, line = self.root, self.root.start_mark.line
        for step in place:
            if isinstance(node, yaml.MappingNode):
                found = next(((key, value) for key, value in node.value if key.value == str(step)), None)
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
                found = node.value[step], node.value[step]
            else:
                found = None
            if found is None:
                break
            line, node = found[0].start_mark.line, found[1]
        return line, node


def _ray_service(document: _Document) -> Iterator[Finding]:
    place: Location = ("spec", "serveConfigV2")
    line, node = document.nearest(place)
    spec = document.values.get("spec")
    text = spec.get("serveConfigV2") if isinstance(spec, Mapping) else None
    inner = _Document(text, line + 1, as_written=node.style == "|") if isinstance(text, str) else None
    if inner is None or not isinstance(inner.values, Mapping):
        yield document.mistake(place, "a RayService needs the Serve config here, as text after `|`")
        return
    yield from _serve_config(inner, "elsewhere")


def _serve_config(document: _Document, place_of_run: RunPlace) -> Iterator[Finding]:
    from ray.serve.schema import ServeDeploySchema  # takes seconds, which a settings file does not need

    try:
        ServeDeploySchema.model_validate(document.values)
    except ValidationError as error:
        for detail in error.errors():
            yield document.mistake(detail["loc"], detail["msg"].removeprefix("Value error, "))
        return
    except (AttributeError, TypeError):  # its validators expect mappings without checking
        sentence = "an entry of applications or deployments holds no NAME: VALUE pairs; see cluster/serve_config.yaml"
        yield document.mistake(("applications",), sentence)
        return
    apps = document.values["applications"]
    if not any(app["import_path"] in IMPORT_PATHS for app in apps):
        yield document.mistake(("applications",), f"no application has the import_path {IMPORT_PATHS[0]}")
    for number, app in enumerate(apps):
        if not ROUTE_PREFIX.fullmatch(app.get("route_prefix") or "/"):
            place = ("applications", number, "route_prefix")
            yield document.mistake(
                place, "must begin with / and not end with one, such as /two; / is for the whole host"
            )
        if app["import_path"] in IMPORT_PATHS:
            yield from _application(document, ("applications", number), app, place_of_run)


def _application(document: _Document, place: Location, app: Any, place_of_run: RunPlace) -> Iterator[Finding]:
    args = list(_settings(document, (*place, "args"), app.get("args") or {}, place_of_run))
    yield from args
    try:
        config = app_config(app.get("args") or {})
    except BadSettings:
        config = AppConfig()
    replicas = [deployment_of(name, config) for name in config.served()]
    user_configs: dict[str, Any] = {}
    places: dict[str, Location] = {}
    for number, deployment in enumerate(app.get("deployments") or ()):
        name, where = deployment["name"], (*place, "deployments", number)
        if name == INGRESS or name in replicas or (args and name.startswith(REPLICAS)):
            user_configs[name], places[name] = deployment.get("user_config") or {}, (*where, "user_config")
        else:
            there = f"there are {INGRESS} and {', '.join(replicas)}"
            yield document.mistake((*where, "name"), f"there is no deployment {name!r}; {there}")
    for name in replicas:
        if user_configs.get(INGRESS, {}) != user_configs.get(name, {}):
            where = places.get(name, places.get(INGRESS, place))
            same = f"{INGRESS} and {name} need the same user_config"
            yield document.mistake(where, f"{same}; write it once with a YAML anchor (&live, *live)")
    if args:
        return
    for name, where in places.items():
        try:
            live = overlaid(config, user_configs[name])
        except BadSettings as error:
            for inner, sentence in error.found:
                yield document.mistake((*where, *inner), sentence)
        else:
            for finding in findings(Look(place_of_run, live), "names"):
                yield document.at((*where, *_steps(finding.subject)), finding)


def _settings(document: _Document, place: Location, values: Any, place_of_run: RunPlace) -> Iterator[Finding]:
    try:
        config = app_config(values)
    except BadSettings as error:
        for where, sentence in error.found:
            yield document.mistake((*place, *where), sentence)
        return
    look = Look(place_of_run, config)
    found = list(findings(look, "names", "settings", "model", *(["files"] if place_of_run == "here" else ())))
    for finding in found:
        yield document.at((*place, *_steps(finding.subject)), finding)
    for note in () if found else findings(look, "template"):
        inside = _steps(note.subject)[:-1]
        yield document.at((*place, *inside, "model"), replace(note, found=f"the chat template: {note.found}"))


def _steps(subject: str) -> Location:
    """Return a finding's place in the settings, of ``models`` with the number of the entry."""
    return tuple(int(step) if step.isdecimal() else step for step in subject.split("."))
