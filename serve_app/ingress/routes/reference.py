"""Print all routes and the fields of the four generation APIs as Markdown, for `make docs`."""

import inspect
import sys
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from fastapi.routing import APIRoute
from pydantic import BaseModel

from serve_app.api.anthropic.request import MessagesBody
from serve_app.api.json_body import KINDS, JsonBody
from serve_app.api.openai.request import ChatBody, CompletionBody
from serve_app.api.openai.responses.request import ResponsesBody
from serve_app.ingress.routes.application import ROUTERS

BODIES: dict[str, type[JsonBody]] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "responses": ResponsesBody,
    "messages": MessagesBody,
}

LARGE = 1 << 30
"""Larger bounds are technical limits, which the page omits."""

_INTRODUCTION = """\
# API

Made from the code by `make docs`.

Send keys in `Authorization: Bearer KEY` or `x-api-key`. Errors have the shape of the called API. A server without
tenants needs no key. [How the APIs behave](../explanation/api.md) explains single fields.

The error of a refusal by a limit has a `reason`: `place` (port, ingress, router, session, engine), `limit` (its
setting), `used` and `most` (the tenant's own numbers; null: not counted by tenant), `retry_after_s`.
"""

_FIELDS = """\
## Fields of generation requests

- **yes**: the field is read. **no effect**: it is accepted and changes nothing.
- **refused**: a 400, unless its value is harmless to ignore. The error names a replacement, if there is one.
- Any other field has no effect, and the header `x-warmpath-warning` lists it. With `strict: true` it is a 400.

| field | chat | completions | responses | messages | type | meaning |
|---|---|---|---|---|---|---|
"""


_INSIDE = """\
Inside others, these fields change nothing: {fields}. So do ids and `status` in conversations, and there `phase`,
`signature`, `caller`, `logprobs` and `index`.
"""


_KINDS = """\
## Types of parts, blocks, items and tools

- **as text**: shown to the model as lines of text. A type of a conversation in no list is, too, with a warning.
- **left out**: with a warning in `x-warmpath-warning`. **refused**: a 400 that names the place.
- Names stand for all their dated versions (`web_search_20250305`).

| place | read | as text | left out | refused |
|---|---|---|---|---|
"""


def api_page() -> str:
    """Return the page."""
    inside = _INSIDE.format(
        fields=", ".join(dict.fromkeys(f"`{path}`" for body in BODIES.values() for path in _idle(body)))
    )
    fields = _FIELDS + "\n".join(_rows())
    return "\n".join([_INTRODUCTION, *_routes(), fields, "", inside, _KINDS + "\n".join(_kinds()), ""])


def _routes() -> Iterator[str]:
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    for tag in dict.fromkeys(str(tag) for route in routes if route.include_in_schema for tag in route.tags):
        yield f"## {tag.capitalize()}\n"
        for route in routes:
            if tag in route.tags:
                yield f"### `{' '.join(sorted(route.methods or ()))} {route.path.replace(':path', '')}`\n"
                yield inspect.cleandoc(route.endpoint.__doc__ or "") + "\n"


def _rows() -> Iterator[str]:
    names = dict.fromkeys(
        name for body in BODIES.values() for name in (*body.model_fields, *sorted(body.without_effect), *body.refused)
    )
    for name in sorted(names):
        fields = [body.model_fields[name] for body in BODIES.values() if name in body.model_fields]
        kind = next((_kind(body, name) for body in BODIES.values() if name in body.model_fields), "")
        instead = next((body.instead[name] for body in BODIES.values() if name in body.instead), "")
        meaning = next((field.description for field in fields if field.description), "")
        meaning = meaning or (f"use `{instead}`" if instead else "")
        states = " | ".join(_state(body, name) for body in BODIES.values())
        yield f"| `{name}` | {states} | {kind} | {meaning} |"


def _idle(kind: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the fields without effect of the objects inside a body, or a type at a path."""
    if isinstance(kind, type) and issubclass(kind, JsonBody):
        yield from (f"{path}{name}" for name in sorted(kind.without_effect) if path)
        for name, field in kind.model_fields.items():
            yield from _idle(field.annotation, f"{path}{name}.")
    for part in get_args(kind):
        yield from _idle(part, path.removesuffix(".") + "[]." if get_origin(kind) is list else path)


def _kinds() -> Iterator[str]:
    for place, kinds in KINDS.items():
        yield f"| {place} | " + " | ".join(", ".join(f"`{name}`" for name in names) or "-" for names in kinds) + " |"


def _state(body: type[JsonBody], name: str) -> str:
    if name in body.refused:
        return "refused"
    if name in body.without_effect:
        return "no effect"
    return "yes" if name in body.model_fields else "-"


def _kind(body: type[BaseModel], name: str) -> str:
    schema: dict[str, Any] = body.model_json_schema()
    shown = schema["properties"][name]
    options = [option for option in shown.get("anyOf", [shown]) if option.get("type") != "null"]
    return " or ".join(dict.fromkeys(_type(option) for option in options))


def _type(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = str(schema.get("type", "object"))
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None or high is None or low < -LARGE:
        return kind
    return f"{kind}, {low} to {high}" if high < LARGE else f"{kind}, at least {low}"


if __name__ == "__main__":
    sys.stdout.write(api_page())
