"""JSON Schemas in the form that llguidance follows: keywords that say nothing are left out, others are put exactly.

What has no such form stays, for llguidance to refuse, or is left out with a note where the caller allows that.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote

Level = Literal["strict", "usual", "free"]
"""What may be left out: nothing that constrains, the exclusion in ``oneOf``, or any keyword without a form."""

FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)  # fmt: skip
"""The formats that llguidance follows. JSON Schema lets others be annotations."""
WITHOUT_FORM = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip
"""Keywords that constrain and that llguidance refuses."""
_OF_ARRAYS = ("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems")
_OF_OBJECTS = ("propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = (
    "items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else",
    "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
_APPLICATORS = {"allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "dependencies", "$dynamicRef", "not"}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_TEXTS = {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"}
_ANNOTATIONS = {*_TEXTS, "$schema", "$id", "id"}
_URI = re.compile(r"[\w.~:/?#\[\]@!$&'()*+,;=%-]*", re.ASCII)
_STANDARD = re.compile(
    r"http://json-schema\.org/draft-0[467]/schema#?|https://json-schema\.org/draft/20(19-09|20-12)/schema#?"
)
_NONE: Mapping[str, Level] = {}
MOST_DECIMALS = 8
"""Of `multipleOf`. With more, llguidance 1.x counts over 32 bits: it takes 680 for a multiple of 7e-9."""
_MAX_ROUNDS = 16
"""Rounds over all references to find those that end; it takes as many as references lead to one another."""
_MAX_PAIRS = 20_000
"""Comparisons of alternatives in one schema, each about 2 us."""


@dataclass(slots=True)
class SchemaKeyword:
    """A keyword in a schema, and its JSON pointer as a URI fragment."""

    keyword: str
    path: str

    def __str__(self) -> str:
        """Return it for messages."""
        return f"`{self.keyword}` at {self.path}"


@dataclass(slots=True)
class Followable:
    """A schema's form. ``left_out``: constraints that it lacks. ``without_form``: keywords that it still has.

    ``leaves``: the parts without their own parts, by path, to find out which one an error is about.
    """

    schema: Any = None
    left_out: list[SchemaKeyword] = field(default_factory=list)
    without_form: list[SchemaKeyword] = field(default_factory=list)
    leaves: dict[str, dict[str, Any]] = field(default_factory=dict)


def followable(schema: dict[str, Any], level: Level = "usual", levels: Mapping[str, Level] = _NONE) -> Followable:
    """Return a schema's form. ``levels``: other levels for parts of it, by path."""
    found = Followable()
    root = {name: part for name, part in schema.items() if name != "x-guidance"}  # options of llguidance
    endless = _Walk(root, found, levels).endless()
    found.schema = False if "#" in endless else _Walk(root, found, levels, endless).part(root, "#", level)
    return found


def without_texts(schema: Any) -> Any:
    """Return a schema without its titles, descriptions, defaults and examples, which constrain nothing."""
    if not isinstance(schema, dict):
        return schema
    return {name: _parts_without(name, part) for name, part in schema.items() if name not in _TEXTS}


def _parts_without(name: str, value: Any) -> Any:
    if name in _MAPS and isinstance(value, dict):
        return {key: without_texts(part) for key, part in value.items()}
    if name in _LISTS and isinstance(value, list):
        return [without_texts(part) for part in value]
    return without_texts(value) if name in _SINGLE else value


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield a value's objects at all depths."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(part)


def _references(value: Any) -> set[str]:
    """Return all references in a value."""
    return {part["$ref"] for part in _objects(value) if isinstance(part.get("$ref"), str)}


class _Walk:
    def __init__(
        self, root: dict[str, Any], found: Followable, levels: Mapping[str, Level], endless: Collection[str] = ()
    ) -> None:
        self._endless = endless
        self._root = root
        self._found = found
        self._levels = levels
        self._references = _references(root)
        self._dynamic = any("$dynamicRef" in part or "$recursiveRef" in part for part in _objects(root))
        self._pairs = _MAX_PAIRS

    def part(self, schema: Any, path: str, level: Level) -> Any:
        """Return the form of a part of the schema."""
        if not isinstance(schema, dict):
            return schema
        if isinstance(reference := schema.get("$ref"), str) and reference in self._endless:
            return False
        level = self._levels.get(path, level)
        schema = self._said(self._named(dict(schema), path), path)
        for name in WITHOUT_FORM:
            if name in schema and level == "free":
                self._found.left_out.append(SchemaKeyword(name, path))
                del schema[name]
            elif name in schema:
                self._found.without_form.append(SchemaKeyword(name, path))
        options = schema.get("oneOf")
        if isinstance(options, list) and not self._exclusive(options):
            (self._found.without_form if level == "strict" else self._found.left_out).append(
                SchemaKeyword("oneOf", path)
            )
        self._found.leaves[path] = {
            name: dict.fromkeys(part, True) if name == "patternProperties" and isinstance(part, dict) else part
            for name, part in schema.items()
            if name not in (*_LISTS, *_SINGLE, *_MAPS, "$ref", "required") or name == "patternProperties"
        }
        for name, value in schema.items():
            place = f"{path}/{_escaped(name)}"
            if name in _MAPS and isinstance(value, dict):
                schema[name] = {key: self.part(one, f"{place}/{_escaped(key)}", level) for key, one in value.items()}
            elif name in _LISTS and isinstance(value, list):
                schema[name] = [self.part(one, f"{place}/{index}", level) for index, one in enumerate(value)]
            elif name in _SINGLE:
                schema[name] = self.part(value, place, level)
        return schema

    def _said(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """Leave out keywords that say nothing, and put others as ones that llguidance has."""
        for name in _COUNTS:  # 2.0 is an integer
            if isinstance(schema.get(name), float) and math.isfinite(schema[name]) and schema[name].is_integer():
                schema[name] = int(schema[name])
        asked = schema.get("format")
        if "format" in schema and not (isinstance(asked, str) and asked in FORMATS):
            del schema["format"]
            if _may_be(schema, "string") and isinstance(asked, str):
                self._found.left_out.append(SchemaKeyword(f"format: {asked[:40]}", path))
        step = schema.get("multipleOf")
        if isinstance(step, float) and math.isfinite(step) and round(step, MOST_DECIMALS) != step:
            del schema["multipleOf"]
            self._found.left_out.append(SchemaKeyword("multipleOf", path))
        standard = schema.get("$schema")
        if isinstance(standard, str) and not _STANDARD.fullmatch(standard):
            del schema["$schema"]
        for name in ("$id", "id"):
            base = schema.get(name)
            if (
                not isinstance(base, str)
                or not base.strip("#")
                or not _URI.fullmatch(base)
                or not self._resolves(path, schema)
            ):
                schema.pop(name, None)
        for name, silent in (
            ("uniqueItems", schema.get("uniqueItems") is False or schema.get("maxItems") in (0, 1)),
            ("not", schema.get("not") is False),
            *((name, schema.get(name) in (True, {})) for name in ("unevaluatedProperties", "unevaluatedItems")),
            *((name, schema.get(name) == {}) for name in ("dependentRequired", "dependentSchemas", "dependencies")),
            *((name, "if" not in schema) for name in ("then", "else")),
            ("if", not {"then", "else"} & schema.keys()),
            *((name, not self._dynamic) for name in ("$dynamicAnchor", "$recursiveAnchor")),
            *((name, not _may_be(schema, "array")) for name in _OF_ARRAYS),
            *((name, not _may_be(schema, "object")) for name in _OF_OBJECTS),
            ("contains", schema.get("minContains") == 0 and "maxContains" not in schema),
            *((name, "contains" not in schema) for name in ("minContains", "maxContains")),
        ):
            if silent:
                schema.pop(name, None)
        schema = {name: part for name, part in schema.items() if name != "minContains" or "contains" in schema}
        for plain, rest in (("Properties", "additionalProperties"), ("Items", "items")):
            if schema.get(f"unevaluated{plain}") is False and not _APPLICATORS & schema.keys():
                del schema[f"unevaluated{plain}"]
                schema.setdefault(rest, False)
        return schema

    def _resolves(self, path: str, schema: dict[str, Any]) -> bool:
        """Return whether the base that a part sets for references changes what one of them means."""
        if not all(reference.startswith("#") for reference in self._references):
            return True
        return path != "#" and bool(_references(schema))

    def _named(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """Put ``propertyNames`` as ``properties`` or ``patternProperties``, or leave it out if it says nothing."""
        if "propertyNames" not in schema:
            return schema
        names = self._resolved(schema["propertyNames"])
        if isinstance(names, dict):
            names = {name: part for name, part in names.items() if name not in _ANNOTATIONS}
            if (kind := names.get("type")) == "string" or (isinstance(kind, list) and "string" in kind):
                del names["type"]  # all names are strings
            if (asked := names.get("format")) is not None and asked not in FORMATS:
                del names["format"]
                self._found.left_out.append(SchemaKeyword(f"format: {str(asked)[:40]}", f"{path}/propertyNames"))
            if names.get("minLength") == 0:
                del names["minLength"]
        without = {name: part for name, part in schema.items() if name != "propertyNames"}
        if names in (True, {}):
            return without
        rest, named = without.get("additionalProperties", True), without.get("properties", {})
        if not isinstance(names, dict) or "patternProperties" in without or not isinstance(named, dict):
            return schema
        if names.keys() <= {"enum", "const"} and len(names) == 1:
            ((_, allowed),) = names.items()
            allowed = allowed if isinstance(allowed, list) else [allowed]
            shown = {name: named.get(name, rest) for name in allowed if isinstance(name, str)}
            return {**without, "properties": shown, "additionalProperties": False}
        if named:
            return schema
        if names.keys() == {"pattern"}:
            return {**without, "patternProperties": {names["pattern"]: rest}, "additionalProperties": False}
        low, high = names.get("minLength", 0), names.get("maxLength", "")
        if names.keys() <= {"minLength", "maxLength"} and isinstance(low, int) and isinstance(high, int | str):
            pattern = f"^[\\s\\S]{{{low},{high}}}$"
            return {**without, "patternProperties": {pattern: rest}, "additionalProperties": False}
        return schema

    def endless(self) -> set[str]:
        """Return the references to parts that no finite value fits, because each value would hold another one."""
        left = {reference for reference in {"#", *self._references} if reference.startswith("#")}
        for _ in range(_MAX_ROUNDS):
            before = len(left)
            for reference in sorted(left, reverse=True):
                if self._ends(self._at(reference), left):
                    left.remove(reference)
            if len(left) == before:
                return left
        return set()

    def _ends(self, schema: Any, left: Collection[str]) -> bool:
        """Return whether a finite value may fit, if none fits the references ``left``."""
        if not isinstance(schema, dict):
            return schema is not False
        if schema.get("$ref") in left:
            return False
        for name, every in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            options = schema.get(name)
            if isinstance(options, list) and options and not every(self._ends(option, left) for option in options):
                return False
        parts: list[Any] = []
        if _kinds(schema) == {"object"}:
            named, required = schema.get("properties", {}), schema.get("required", ())
            rest = True if "patternProperties" in schema else schema.get("additionalProperties", True)
            if isinstance(named, dict) and isinstance(required, list):
                parts = [named.get(name, rest) for name in required if isinstance(name, str)]
        elif _kinds(schema) == {"array"}:
            first, least = schema.get("prefixItems", ()), schema.get("minItems", 0)
            if isinstance(first, list | tuple) and isinstance(least, int | float) and least > 0:
                parts = [*first[: int(least)], *([schema.get("items", True)] if least > len(first) else ())]
        return all(self._ends(part, left) for part in parts)

    def _at(self, reference: str) -> Any:
        """Return the part that a reference of the form ``#/...`` names, None if there is none."""
        if reference != "#" and not reference.startswith("#/"):
            return None
        part: Any = self._root
        for key in reference[1:].split("/")[1:]:
            key = unquote(key).replace("~1", "/").replace("~0", "~")
            if isinstance(part, list) and key.isascii() and key.isdecimal() and int(key) < len(part):
                part = part[int(key)]
            elif isinstance(part, dict) and key in part:
                part = part[key]
            else:
                return None
        return part

    def _resolved(self, schema: Any) -> Any:
        """Follow a reference inside the schema, to a part that is no reference itself; None if that fails."""
        for _ in range(8):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            reference = schema["$ref"]
            if (
                not isinstance(reference, str)
                or not reference.startswith("#")
                or schema.keys() - _ANNOTATIONS - {"$ref"}
            ):
                return None
            schema = self._at(reference)
        return None

    def _exclusive(self, options: list[Any]) -> bool:
        """Return whether it is plain that no value fits two of these options."""
        return all(self._apart(one, other) for index, one in enumerate(options) for other in options[index + 1 :])

    def _apart(self, one: Any, other: Any, depth: int = 8) -> bool:
        """Return whether it is plain that no value fits both."""
        self._pairs -= 1
        if self._pairs < 0 or depth < 0:
            return False
        one, other = self._resolved(one), self._resolved(other)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        if not _kinds(one) & _kinds(other):
            return True
        values, others = _values(one), _values(other)
        if values is not None and others is not None and not values & others:
            return True
        for first, second in ((one, other), (other, one)):
            for name, every in (("anyOf", all), ("oneOf", all), ("allOf", any)):
                options = first.get(name)
                if not isinstance(options, list) or not options:
                    continue
                if every(self._apart(option, second, depth - 1) for option in options):
                    return True
        if _kinds(one) | _kinds(other) != {"object"}:
            return False
        for first, second in ((one, other), (other, one)):
            required, named = first.get("required", ()), second.get("properties", {})
            if not isinstance(required, list) or not isinstance(named, dict):
                continue
            for name in required:
                mine, theirs = first.get("properties", {}), named.get(name, True)
                if name not in named and "patternProperties" not in second:
                    theirs = second.get("additionalProperties", True)
                if isinstance(mine, dict) and self._apart(mine.get(name, True), theirs, depth - 1):
                    return True
        return False


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema allows, as far as it says so itself."""
    kinds = {"null", "boolean", "number", "string", "array", "object"}
    asked = schema.get("type", list(kinds))
    asked = [asked] if isinstance(asked, str) else asked
    if isinstance(asked, list) and all(isinstance(kind, str) for kind in asked):
        kinds &= {"number" if kind == "integer" else kind for kind in asked}
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    return kinds & set(map(type_of, given)) if isinstance(given, list) else kinds


def _may_be(schema: Mapping[str, Any], kind: str) -> bool:
    return kind in _kinds(schema)


def type_of(value: Any) -> str:
    """Return a JSON value's type, "number" for an integer too."""
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", tuple: "array"}
    return "object" if isinstance(value, dict) else names.get(type(value), "null")


def _values(schema: Mapping[str, Any]) -> set[tuple[str, Any]] | None:
    """Return the scalars that a schema lists; None if it lists none, or others."""
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(given, list) or any(isinstance(value, list | dict) for value in given):
        return None
    return {(type_of(value), value) for value in given}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
