"""Every door of the application, and every field of its bodies, found in the routes, the bodies and the clients' types.

A new route, body, field or header is found without a change here.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.routing import Route

from serve_app.api.json_body import JsonBody
from serve_app.ingress.routes.application import ROUTES
from serve_app.ingress.routes.handler import BODIES
from tests.serve_app.api.test_sdk_types import PLACES
from tests.serve_app.tool_templates.families import WEATHER

Body = dict[str, Any]
Path = tuple[str | int, ...]

SCHEMA: Body = {
    "type": "object",
    "description": "d",
    "properties": {
        "a": {"type": "string", "pattern": "^a+$", "enum": ["a", "aa"], "minLength": 1, "maxLength": 8},
        "b": {"$ref": "#/$defs/c"},
        "d": {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1},
        "e": {"anyOf": [{"type": "number", "maximum": 5}, {"const": "x"}]},
    },
    "patternProperties": {"^x": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"c": {"type": "object", "properties": {"f": {"type": "boolean"}}}},
}
_USER: Body = {"role": "user", "content": "Hi"}
_TOOL: Body = {"type": "function", "function": {**WEATHER["function"], "parameters": SCHEMA}}
_CHAT: Body = {"model": "demo", "max_tokens": 4, "messages": [_USER]}
_MESSAGE_TOOL: Body = {"name": "get_weather", "description": "d", "input_schema": SCHEMA}
_RESPONSE: Body = {"model": "demo", "max_output_tokens": 16, "input": "Hi"}
_LINE: Body = {"custom_id": "c", "params": {**_CHAT}}

LEAST: dict[str, list[Body]] = {
    "ChatBody": [
        {**_CHAT, "tools": [_TOOL], "metadata": {"session_id": "s"}, "user": "u", "stop": ["x"]},
        {**_CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        *({**_CHAT, "structured_outputs": {kind: value}} for kind, value in (
            ("json", SCHEMA), ("json", json.dumps(SCHEMA)), ("regex", "a+"), ("choice", ["a", "b"]),
            ("grammar", 'start: "a"'), ("grammar", 'root ::= "a"'),
        )),
        {**_CHAT, "truncate_prompt_tokens": 2, "return_token_ids": True, "cache_diagnostics": True},
        {**_CHAT, "logit_bias": {"5": 1}, "chat_template_kwargs": {"a": 1}, "stream": True, "n": 2},
        {**_CHAT, "nvext": {"agent_context": {"session_id": "s"}, "agent_hints": {"osl": 1, "priority": 1}}},
        {**_CHAT, "messages": [_USER, {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
        ]}, {"role": "tool", "tool_call_id": "c", "content": "rain"}], "tools": [_TOOL]},
        {**_CHAT, "messages": [{"role": "system", "content": "s"}, _USER, {"role": "assistant", "content": "a"}],
         "continue_final_message": True, "add_generation_prompt": False},
    ],
    "CompletionBody": [
        {"model": "demo", "prompt": "Hi", "max_tokens": 4, "echo": True},
        {"model": "demo", "prompt": ["Hi", "You"], "max_tokens": 4, "stop": "x"},
        {"model": "demo", "prompt": [[1, 2], [3]], "max_tokens": 4},
        {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 4, "truncate_prompt_tokens": 2},
        {"model": "demo", "prompt": "Hi", "max_tokens": 4, "truncate_prompt_tokens": 2, "echo": True},
    ],
    "ResponsesBody": [
        {**_RESPONSE, "instructions": "i", "metadata": {"a": "b"}, "tools": [
            {"type": "function", "name": "get_weather", "description": "d", "parameters": SCHEMA, "strict": False}
        ]},
        {**_RESPONSE, "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, "stream": True},
        {**_RESPONSE, "input": [_USER, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                                {"type": "function_call_output", "call_id": "c", "output": "o"}]},
        {**_RESPONSE, "input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                                {"type": "function_call_output", "output": "o"}]},
        {**_RESPONSE, "input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                                {"role": "assistant", "content": "a"}]},
    ],
    "MessagesBody": [
        {**_CHAT, "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
         "tools": [_MESSAGE_TOOL], "metadata": {"user_id": '{"session_id": "s"}'}, "stop_sequences": ["x"]},
        {**_CHAT, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "stream": True},
        {**_CHAT, "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Git snapshot at conversation start.\ngit"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "o"}]},
        ], "tools": [{**_MESSAGE_TOOL, "defer_loading": True}]},
    ],
    "TokenizeBody": [{"prompt": "Hi"}, {"prompt": "Hi", "return_token_strs": True}],
    "TokenizeChatBody": [{"messages": [_USER]}],
    "DetokenizeBody": [{"tokens": [1, 2, 3]}],
    "BatchBody": [{
        "input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h",
        "metadata": {"a": "b"}, "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    }],
    "MessageBatchBody": [{"requests": [_LINE]}],
    "ExplainBody": [{**_CHAT, "tenant": "acme", "policy": "lmetric"}, {"model": "demo", "prompt": "Hi"},
                    {"model": "demo", "input": "Hi"}],
    "LoadAdapterBody": [{"lora_name": "a", "lora_path": "/nowhere"}],
    "UnloadAdapterBody": [{"lora_name": "a"}],
    "PromptBody": [{"prompt_ref": "a@1"}],
    "CutoverBody": [{"prompt_ref": "a@1", "percent": 5}],
    "TenantBody": [{"name": "globex", "models": ["demo"], "budget": {"tokens": 5, "period": "day"}}],
    "KeyBody": [{"tenant": "acme", "label": "l", "expires": "2030-01-01T00:00:00Z"}],
    "KeyChange": [{"disabled": True, "label": "l"}],
    "RotateBody": [{"overlap_s": 5, "label": "l"}],
}  # fmt: skip
"""Valid bodies by the name of their class, for the fields that a schema does not describe; others are made of it."""
LEAST["CountTokensBody"] = [
    {name: value for name, value in body.items() if name not in ("max_tokens", "stream", "stop_sequences", "metadata")}
    for body in LEAST["MessagesBody"]
]
LEAST["InputTokensBody"] = [
    {name: value for name, value in body.items() if name not in ("max_output_tokens", "stream", "metadata")}
    for body in LEAST["ResponsesBody"]
]

_OF_PARSERS = {"parse_chat": "ChatBody", "parse_response_request": "ResponsesBody", "parse_messages": "MessagesBody"}


class Door(NamedTuple):
    """A route and a method; the names of the ``bodies`` that it takes."""

    method: str
    path: str
    bodies: tuple[str, ...]

    @property
    def parameters(self) -> list[str]:
        """The parts of the path that a client chooses."""
        return re.findall(r"{(\w+)", self.path)

    def target(self, **parts: str) -> bytes:
        """Return a path with these parts, as sent."""
        return re.sub(r"{(\w+)[^}]*}", lambda found: parts.get(found[1], "x"), self.path).encode("ascii")

    @property
    def of_operators(self) -> bool:
        """Whether an operator's key is to open it."""
        return bool(
            re.match(r"/v1/(admin|prompts|cache/(state|explain))|/v1/(un)?load_lora|/reset|/metrics", self.path)
        )


def doors_of(application: Starlette) -> list[Door]:
    """Return every door; a form of files is the body ``form``."""
    contents = {
        (method, route.path): ((route.openapi_extra or {}).get("requestBody") or {}).get("content", {})
        for route in ROUTES
        for method in route.methods or ()
    }
    found = []
    for route in application.routes:
        if isinstance(route, Route):
            for method in sorted(route.methods or ()):
                content = contents.get((method, route.path), {})
                bodies = tuple(re.findall(r"/schemas/(\w+)", json.dumps(content)))
                found.append(Door(method, route.path, ("form",) if "multipart/form-data" in content else bodies))
    return found


@dataclass(frozen=True, slots=True)
class Field:
    """A place in a valid body of a door. ``ours``: in a body of ours, not of the clients' packages alone."""

    door: Door
    body: Body
    path: Path
    ours: bool = True

    @property
    def name(self) -> str:
        """The place, with the types of the objects around it."""
        value: Any = self.body
        shown = ""
        for step in self.path:
            kind = value.get("type") if isinstance(value, dict) and step != "type" else None
            shown += f"({kind})" * isinstance(kind, str) + ("[]" if isinstance(step, int) else f".{step}")
            value = value[step] if not isinstance(value, dict) else value.get(step)
        items = value if isinstance(value, list) else ()
        kinds = ", ".join(str(one.get("type", "")) if isinstance(one, dict) else type(one).__name__ for one in items)
        return f"{self.door.method} {self.door.path} {shown}{f' of {kinds}' if items else ''}"

    @property
    def value(self) -> Any:
        """The value there, None for none."""
        value: Any = self.body
        for step in self.path:
            value = value.get(step) if isinstance(value, dict) else value[step]
        return value

    def holding(self, value: bytes) -> bytes:
        """Return the body with other JSON at the place."""
        marked = _with(self.body, self.path, "\0here")
        return json.dumps(marked).encode().replace(b'"\\u0000here"', value, 1)

    def inside_itself(self, size: int, *, listed: bool) -> bytes:
        """Return the body in which the object around the place holds itself there, and so on."""
        around: Any = self.body
        for step in self.path[:-1]:
            around = around[step]
        marked = json.dumps(_with(around, self.path[-1:], "\0here")).encode()
        begin, _, end = marked.partition(b'"\\u0000here"')
        begin, end = (begin + b"[", b"]" + end) if listed else (begin, end)
        depth = max(1, size // len(begin + end))
        return self.holding(begin * depth + b"null" + end * depth)


def _with(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    if isinstance(value, dict):
        return {**value, path[0]: _with(value.get(path[0]), path[1:], new)}
    return [_with(one, path[1:], new) if at == path[0] else one for at, one in enumerate(value)]


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of all values inside a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in pairs:
        yield (*path, step)
        yield from places(inner, (*path, step))


@cache
def bodies_by_name() -> dict[str, type[BaseModel]]:
    """Return the classes of all bodies."""
    return {body.__name__: body for body in BODIES}


@cache
def samples() -> dict[str, list[Body]]:
    """Return valid bodies of every class, those of the clients' own types included."""
    found = {name: [*LEAST.get(name, ())] for name in bodies_by_name()}
    for name, body in bodies_by_name().items():
        if not found[name]:
            found[name] = [_least(body)]
    from_packages: list[tuple[Callable[..., Any], Body]] = []
    for place in PLACES.values():
        from tests.serve_app.api.sdk_types import examples

        from_packages += [(place.parse, place.body(example)) for example in examples(place.types)]
    for parse, body_ in from_packages:
        found[_OF_PARSERS[parse.__name__]].append(body_ | {"model": "demo"})
    return found


def _least(body: type[BaseModel]) -> Body:
    schema = body.model_json_schema()
    values = {"string": "x", "integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}
    fields = schema.get("properties", {})
    return {name: values.get(fields[name].get("type"), "x") for name in schema.get("required", ())}


def fields_of(door: Door) -> list[Field]:
    """Return every field of a door's bodies, once."""
    found: dict[str, Field] = {}
    for name in door.bodies:
        if name == "form":
            continue
        known = samples()[name]
        for number, body in enumerate(known):
            for path in places(body):
                field = Field(door, body, path, number <= len(LEAST.get(name, ())))
                found.setdefault(field.name, field)
        for one in (*bodies_by_name()[name].model_fields, "unknown"):
            field = Field(door, known[0], (one,))
            found.setdefault(field.name, field)
    return list(found.values())


def query_names() -> set[str]:
    """Return the names of all queries that a class describes."""

    def below(kind: type[JsonBody]) -> Iterator[type[JsonBody]]:
        for one in kind.__subclasses__():
            yield one
            yield from below(one)

    return {name for kind in below(JsonBody) if kind.__name__.endswith("Query") for name in kind.model_fields}


@contextmanager
def reading() -> Iterator[tuple[set[str], set[str]]]:
    """Collect the names of the headers and of the query that the application looks for."""
    headers: set[str] = set()
    query: set[str] = set()

    def noted(kind: type, method: str, names: set[str]) -> Any:
        read = getattr(kind, method)

        def note(self: Any, name: Any, *more: Any) -> Any:
            names.add(str(name).lower() if names is headers else str(name))
            return read(self, name, *more)

        return patch.object(kind, method, note)

    with (
        noted(Headers, "__getitem__", headers), noted(Headers, "__contains__", headers),
        noted(Headers, "get", headers),
        noted(QueryParams, "get", query), noted(QueryParams, "getlist", query),
        noted(QueryParams, "__contains__", query), noted(QueryParams, "__getitem__", query),
    ):  # fmt: skip
        yield headers, query
