"""JSON Schemas in the form that llguidance follows: keywords that say nothing are left out, others are put exactly.

What has no such form stays, for llguidance to refuse, or is left out with a note where the caller allows that.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal
from urllib.parse import unquote

from serve_app.fairness.work import StepBudget
from serve_app.structured.grammar import MAX_GRAMMAR_BYTES

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
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", *_COUNTS, "multipleOf", "const", "enum")
_TEXTS = {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"}
_ANNOTATIONS = {*_TEXTS, "$schema", "$id", "id"}
_URI = re.compile(r"[\w.~:/?#\[\]@!$&'()*+,;=%-]*", re.ASCII)
_STANDARD = re.compile(
    r"http://json-schema\.org/draft-0[467]/schema#?|https://json-schema\.org/draft/20(19-09|20-12)/schema#?"
)
_NONE: Mapping[str, Level] = {}
MOST_DECIMALS = 8
"""Of `multipleOf`. With more, llguidance 1.x counts over 32 bits: it takes 680 for a multiple of 7e-9."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTED, _SMALLEST = 2**53, 1e-60
"""llguidance 1.x has numbers as 64-bit floats, by their digits. It makes other integers of those beyond the first, and
ends the process at some; it makes no range that ends nearer to 0 than the second."""
_MOST_COUNTED = 2**31
"""Of letters, items and properties; no answer has as many."""
_MOST_DIVISOR = 2**32 // 10
"""Of `multipleOf`: with a larger one, a remainder and one more digit are more than the 32 bits that llguidance has."""
_MOST_REMAINDERS = 16_384
"""Of all divisors in a schema together: `multipleOf` has a state for each remainder of its digits."""
_MAX_ROUNDS = 16
"""Rounds over all references to find those that end; it takes more than two where they lead to one another in rings."""
_MAX_LEVELS = 200
"""Levels of parts, and of references that lead into one another, in one look for those that end."""
_MAX_PAIRS = 20_000
"""Comparisons of alternatives in one schema, each about 2 us."""
_MAX_NAMES = MAX_GRAMMAR_BYTES // 4
"""Names that all ``propertyNames`` may list together: as many as one schema holds, so that references add none."""
_PATH_CHARS = 64
"""Characters of a part's path that count as much as the part."""
MAX_STEPS = 1 << 20
"""Parts of one schema that all walks over it may visit: about a second. The largest schemas of tools need a fifth."""


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


def followable(
    schema: dict[str, Any], level: Level = "usual", levels: Mapping[str, Level] = _NONE, steps: StepBudget | None = None
) -> Followable:
    """Return a schema's form. ``levels``: other levels for parts of it, by path. Raises TooMuchWorkError."""
    result = Followable()
    root = {name: part for name, part in schema.items() if name != "x-guidance"}  # options of llguidance
    walk = _Walk(root, result, levels, steps or StepBudget(MAX_STEPS))
    result.schema = False if walk.find_endless() else walk.part(root, "#", level)
    return result


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


class _Walk:
    """A walk over one schema. References are resolved once; those with one target get one spelling."""

    def __init__(
        self, root: dict[str, Any], result: Followable, levels: Mapping[str, Level], steps: StepBudget
    ) -> None:
        self._root = root
        self._result = result
        self._levels = levels
        self._steps = steps
        self._targets: dict[str, tuple[str, Any]] = {}
        """By reference: its first spelling, and the part that it names, None if there is none."""
        spellings: dict[tuple[str, ...], str] = {}
        self._dynamic, self._local = False, True
        for part in _objects(root):
            steps.take()
            self._dynamic |= "$dynamicRef" in part or "$recursiveRef" in part
            if isinstance(reference := part.get("$ref"), str) and reference not in self._targets:
                steps.take(1 + len(reference) // _PATH_CHARS)
                self._local &= reference.startswith("#")
                keys, target = self._look_up(reference)
                self._targets[reference] = spellings.setdefault(keys, reference), target
        self._endless: set[str] = set()
        self._ending: set[int] = set()
        """The parts, by identity, that some finite value fits."""
        self._open: set[int] = set()
        """Those that none fits as far as this round has seen."""
        self._listed: dict[int, frozenset[tuple[str, Any]] | None] = {}
        """The scalars that a part lists, by its identity."""
        self._pairs = _MAX_PAIRS
        self._names = _MAX_NAMES
        self._divisors: set[int] = set()
        self._remainders = _MOST_REMAINDERS

    def part(self, schema: Any, path: str, level: Level) -> Any:
        """Return the form of a part of the schema."""
        if not isinstance(schema, dict):
            return schema
        self._steps.take(1 + len(path) // _PATH_CHARS)
        schema = dict(schema)
        if isinstance(reference := schema.get("$ref"), str):
            schema["$ref"] = reference = self._targets[reference][0]
            if reference in self._endless:
                return False
        level = self._levels.get(path, level)
        schema = self._said(self._named(schema, path), path)
        for name in WITHOUT_FORM:
            if name in schema and level == "free":
                self._result.left_out.append(SchemaKeyword(name, path))
                del schema[name]
            elif name in schema:
                self._result.without_form.append(SchemaKeyword(name, path))
        options = schema.get("oneOf")
        if isinstance(options, list) and not self._exclusive(options):
            (self._result.without_form if level == "strict" else self._result.left_out).append(
                SchemaKeyword("oneOf", path)
            )
        self._result.leaves[path] = {
            name: dict.fromkeys(part, True) if name == "patternProperties" and isinstance(part, dict) else part
            for name, part in schema.items()
            if name not in (*_LISTS, *_SINGLE, *_MAPS, "$ref", "required") or name == "patternProperties"
        }
        for name, value in schema.items():
            pointer = f"{path}/{_escaped(name)}"
            if name in _MAPS and isinstance(value, dict):
                schema[name] = {key: self.part(one, f"{pointer}/{_escaped(key)}", level) for key, one in value.items()}
            elif name in _LISTS and isinstance(value, list):
                schema[name] = [self.part(one, f"{pointer}/{index}", level) for index, one in enumerate(value)]
            elif name in _SINGLE:
                schema[name] = self.part(value, pointer, level)
        return schema

    def _said(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """Leave out keywords that say nothing, and put others as ones that llguidance has."""
        for name in _COUNTS:  # 2.0 is an integer
            if isinstance(schema.get(name), float) and math.isfinite(schema[name]) and schema[name].is_integer():
                schema[name] = int(schema[name])
        asked = schema.get("format")
        if "format" in schema and not (isinstance(asked, str) and asked in FORMATS):
            del schema["format"]
            if "string" in _kinds(schema) and isinstance(asked, str):
                self._result.left_out.append(SchemaKeyword(f"format: {asked[:40]}", path))
        for name in (one for one in _NUMBERS if one in schema):
            if not self._counts(name, schema[name]):
                if name in ("const", "enum"):
                    values = schema[name] if isinstance(schema[name], list) and name == "enum" else [schema[name]]
                    kinds = {"integer" if type(value) is int else type_of(value) for value in values}
                    schema.setdefault("type", sorted(kinds))
                elif name.startswith("max") and name in _COUNTS:
                    del schema[name]  # it says nothing
                    continue
                del schema[name]
                self._result.left_out.append(SchemaKeyword(name, path))
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
        kinds = _kinds(schema)
        for name, silent in (
            ("uniqueItems", schema.get("uniqueItems") is False or schema.get("maxItems") in (0, 1)),
            ("not", schema.get("not") is False),
            *((name, schema.get(name) in (True, {})) for name in ("unevaluatedProperties", "unevaluatedItems")),
            *((name, schema.get(name) == {}) for name in ("dependentRequired", "dependentSchemas", "dependencies")),
            *((name, "if" not in schema) for name in ("then", "else")),
            ("if", not {"then", "else"} & schema.keys()),
            *((name, not self._dynamic) for name in ("$dynamicAnchor", "$recursiveAnchor")),
            *((name, "array" not in kinds) for name in _OF_ARRAYS),
            *((name, "object" not in kinds) for name in _OF_OBJECTS),
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

    def _counts(self, name: str, value: Any) -> bool:
        """Return whether llguidance can count a keyword's numbers; what is no number is its own to refuse."""
        if name in ("const", "enum"):
            return not _holds_inexact(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        if name in _BOUNDS:
            return not value or _SMALLEST <= abs(value) <= _COUNTED
        if name in _COUNTS:
            return value <= _MOST_COUNTED
        if not abs(value) <= _MOST_DIVISOR or value != round(value, MOST_DECIMALS):
            return False
        divisor = abs(round(value * 10**MOST_DECIMALS))
        while divisor and not divisor % 10:
            divisor //= 10
        if divisor not in self._divisors:
            self._divisors.add(divisor)
            self._remainders -= divisor
        return self._remainders >= 0

    def _resolves(self, path: str, schema: dict[str, Any]) -> bool:
        """Return whether the base that a part sets for references changes what one of them means."""
        if not self._local:
            return True
        return path != "#" and any(self._has_reference(part) for part in _objects(schema))

    def _has_reference(self, part: dict[str, Any]) -> bool:
        self._steps.take()
        return isinstance(part.get("$ref"), str)

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
                self._result.left_out.append(SchemaKeyword(f"format: {str(asked)[:40]}", f"{path}/propertyNames"))
            for name in ("minLength", "maxLength"):
                if name in names and not self._counts(name, names[name]):
                    del names[name]
                    if name == "minLength":
                        self._result.left_out.append(SchemaKeyword(name, f"{path}/propertyNames"))
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
            self._names -= len(allowed)
            if self._names < 0:
                return schema
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

    def find_endless(self) -> bool:
        """Find the references to parts that no finite value fits, because each value would hold another one.

        Return whether the whole schema is such a part.
        """
        left = {"#"}.union(one for one, target in self._targets.values() if target is not None)
        for _ in range(_MAX_ROUNDS):
            before = len(left)
            self._open.clear()
            for reference in sorted(left):
                if self._ends(self._target(reference), left):
                    left.discard(reference)
            if len(left) == before:
                self._endless = left
                break
        return "#" in self._endless

    def _target(self, reference: str) -> Any:
        return self._root if reference == "#" else self._targets[reference][1]

    def _ends(self, schema: Any, left: set[str], depth: int = _MAX_LEVELS) -> bool:
        """Return whether a finite value may fit, if none fits the references ``left``."""
        if not isinstance(schema, dict):
            return schema is not False
        if id(schema) in self._ending:
            return True
        if not depth or id(schema) in self._open:
            return False
        self._open.add(id(schema))  # while it is asked for itself, nothing fits it
        found = self._finds(schema, left, depth - 1)
        if found:
            self._ending.add(id(schema))
        return found

    def _finds(self, schema: dict[str, Any], left: set[str], depth: int) -> bool:
        self._steps.take()
        reference = schema.get("$ref")
        if isinstance(reference, str) and (one := self._targets[reference][0]) in left:
            if not self._ends(self._target(one), left, depth):
                return False
            left.discard(one)
        for name, every in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            options = schema.get(name)
            if (
                isinstance(options, list)
                and options
                and not every(self._ends(option, left, depth) for option in options)
            ):
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
        return all(self._ends(part, left, depth) for part in parts)

    def _look_up(self, reference: str) -> tuple[tuple[str, ...], Any]:
        """Return the keys of a reference of the form ``#/...``, and the part that it names, None if there is none."""
        if reference != "#" and not reference.startswith("#/"):
            return (reference,), None
        part: Any = self._root
        keys = [unquote(key).replace("~1", "/").replace("~0", "~") for key in reference[1:].split("/")[1:]]
        for key in keys:
            if isinstance(part, list) and key.isascii() and key.isdecimal() and len(key) < 8 and int(key) < len(part):
                part = part[int(key)]
            elif isinstance(part, dict) and key in part:
                part = part[key]
            else:
                return (reference,), None
        return ("#", *keys), part

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
            schema = self._targets[reference][1] if reference in self._targets else None
        return None

    def _exclusive(self, options: list[Any]) -> bool:
        """Return whether it is plain that no value fits two of these options."""
        pairs = ((one, other) for index, one in enumerate(options) for other in islice(options, index + 1, None))
        return all(self._apart(one, other) for one, other in pairs)

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
        values, others = self._values(one), self._values(other)
        if values is not None and others is not None:
            self._pairs -= min(len(values), len(others)) // 16
            if values.isdisjoint(others):
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
                self._pairs -= 1
                if self._pairs < 0:
                    return False
                mine, theirs = first.get("properties", {}), named.get(name, True)
                if name not in named and "patternProperties" not in second:
                    theirs = second.get("additionalProperties", True)
                if isinstance(mine, dict) and self._apart(mine.get(name, True), theirs, depth - 1):
                    return True
        return False

    def _values(self, schema: Mapping[str, Any]) -> frozenset[tuple[str, Any]] | None:
        """Return the scalars that a part of the schema lists; None if it lists none, or others."""
        if id(schema) not in self._listed:
            given = [schema["const"]] if "const" in schema else schema.get("enum")
            listed: list[Any] | None = given if isinstance(given, list) else None
            if listed is None or any(isinstance(value, list | dict) for value in listed):
                self._listed[id(schema)] = None
            else:
                self._listed[id(schema)] = frozenset((type_of(value), value) for value in listed)
        return self._listed[id(schema)]


def _holds_inexact(value: Any) -> bool:
    """Return whether a value is or holds an integer that llguidance would make another one of."""
    if isinstance(value, dict | list):
        return any(map(_holds_inexact, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) > _COUNTED


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema allows, as far as it says so itself."""
    kinds = {"null", "boolean", "number", "string", "array", "object"}
    asked = schema.get("type", list(kinds))
    asked = [asked] if isinstance(asked, str) else asked
    if isinstance(asked, list) and all(isinstance(kind, str) for kind in asked):
        kinds &= {"number" if kind == "integer" else kind for kind in asked}
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    return kinds & set(map(type_of, given)) if isinstance(given, list) else kinds


def type_of(value: Any) -> str:
    """Return a JSON value's type, "number" for an integer too."""
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", tuple: "array"}
    return "object" if isinstance(value, dict) else names.get(type(value), "null")


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
