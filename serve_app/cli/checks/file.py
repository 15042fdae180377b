"""`warmpath check`: find mistakes in a Serve config, a RayService or a settings file, with line, place and remedy."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from serve_app.cli.checks.finding import Finding, Look, RunPlace, problem
from serve_app.cli.checks.run import findings
from serve_app.config.app import REPLICAS, AppConfig, deployment_of
from serve_app.config.files import NotYaml, read_yaml, rooted
from serve_app.config.live import BadSettings, Location, app_config, overlaid
from serve_app.config.sentences import NO_SETTING

INGRESS = "Ingress"
ROUTE_PREFIX = re.compile(r"/([^{}]*[^{}/])?")
_WORD = re.compile(r"\w+")
_MEANT = re.compile(r"did you mean (\w+)\?")
IMPORT_PATHS = "serve_app:build_app", "serve_app:app", "serve_app.app:build_app"


def mistakes_in(text: str, directory: Path | None = None, *, place_of_run: RunPlace = "elsewhere") -> list[Finding]:
    """Return the mistakes in a file's text, by line.

    ``directory``: the base of relative paths in a settings file. ``place_of_run``: see ``RunPlace``.
    """
    try:
        found = _mistakes(text, directory, place_of_run)
    except NotYaml as error:
        return [replace(problem("", str(error)), line=error.line)]
    # What is written once with an anchor is read by each deployment, and is told once.
    once = {(one.line, one.subject.rpartition(".")[2], one.sentence): one for one in reversed(found)}
    return sorted(once.values(), key=lambda mistake: mistake.line)


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

    wrong: set[Location] = set()
    try:
        ServeDeploySchema.model_validate(document.values)
    except ValidationError as error:
        for detail in error.errors():
            wrong.add(detail["loc"])
            yield document.mistake(detail["loc"], detail["msg"].removeprefix("Value error, "))
    except (AttributeError, TypeError):  # its validators expect mappings without checking
        sentence = "an entry of applications or deployments holds no NAME: VALUE pairs; see cluster/serve_config.yaml"
        yield document.mistake(("applications",), sentence)
        return
    apps = document.values.get("applications")
    if not wrong and not any(app["import_path"] in IMPORT_PATHS for app in apps):
        yield document.mistake(("applications",), f"no application has the import_path {IMPORT_PATHS[0]}")
    for number, app in enumerate(apps if isinstance(apps, list) else ()):
        if any(where[:2] == ("applications", number) and where[2:3] != ("import_path",) for where in wrong):
            continue
        if ("applications", number, "import_path") in wrong:
            app = {**app, "import_path": IMPORT_PATHS[0]}
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
    known = _Reading(app_config, app.get("args") or {})
    config = known.config or AppConfig()
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
    for name, where in places.items():
        reading = _Reading(partial(overlaid, config), user_configs[name], known.wrong)
        for inner, sentence in reading.found:
            yield document.mistake((*where, *inner), sentence)
        for finding in reading.new(findings(Look(place_of_run, reading.config), "names") if reading.config else ()):
            if finding.sentence not in {one.sentence for one in args}:
                yield document.at((*where, *_steps(finding.subject)), finding)


def _settings(document: _Document, place: Location, values: Any, place_of_run: RunPlace) -> Iterator[Finding]:
    reading = _Reading(app_config, values)
    for where, sentence in reading.found:
        yield document.mistake((*place, *where), sentence)
    if reading.config is None:
        return
    look = Look(place_of_run, reading.config)
    needs = ("names", "settings", "model", *(["files"] if place_of_run == "here" else ()))
    found = list(reading.new(findings(look, *needs)))
    for finding in found:
        yield document.at((*place, *_steps(finding.subject)), finding)
    for note in () if found or reading.found else findings(look, "template"):
        inside = _steps(note.subject)[:-1]
        yield document.at((*place, *inside, "model"), replace(note, found=f"the chat template: {note.found}"))


class _Reading:
    """Settings, and all their mistakes in one round: what is wrong is left out, and the rest is read again.

    ``config``: of the rest, None if nothing can be left out. A mistake found later that speaks of a setting in
    ``wrong`` may be a consequence, and waits for the next round.
    """

    def __init__(self, read: Callable[[Any], AppConfig], values: Any, wrong: Iterable[str] = ()) -> None:
        self.found: list[tuple[Location, str]] = []
        self.wrong = set(wrong)
        self.config: AppConfig | None = None
        while True:
            try:
                self.config = read(values)
                return
            except BadSettings as error:
                bad = error.found
            found = [
                (where, sentence)
                for where, sentence in bad
                if NO_SETTING in sentence or self._is_new((*where, sentence))
            ]
            self.found += found
            for where, sentence in found:
                names = where[2:3] if where[:1] == ("models",) and len(where) > 2 else where[:1]
                self.wrong |= {*map(str, names), *_MEANT.findall(sentence)}
            rest = _without(values, [where for where, _ in bad])
            if rest == values:
                return
            values = rest

    def new(self, later: Iterable[Finding]) -> Iterator[Finding]:
        """Yield those of later findings that are no consequences."""
        return (one for one in later if self._is_new((one.subject, one.found, one.advice)))

    def _is_new(self, told: Iterable[object]) -> bool:
        return not self.wrong & set(_WORD.findall(" ".join(map(str, told))))


def _without(values: Any, places: Iterable[Location]) -> Any:
    """Return settings without the ones at some places: whole ones, but in ``models`` those of an entry."""
    rest = dict(values) if isinstance(values, Mapping) else {}
    for first, *more in filter(None, places):
        entries, at = rest.get("models"), more[0] if len(more) > 1 else None
        if first == "models" and isinstance(at, int) and isinstance(entries, list) and isinstance(entries[at], Mapping):
            left = {name: value for name, value in entries[at].items() if name != more[1]}
            rest["models"] = [*entries[:at], left, *entries[at + 1 :]]
        else:
            rest.pop(first, None)
    return rest if isinstance(values, Mapping) else values


def _steps(subject: str) -> Location:
    """Return a finding's place in the settings, of ``models`` with the number of the entry."""
    return tuple(int(step) if step.isdecimal() else step for step in subject.split("."))
