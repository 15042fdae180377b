"""``/docs``: the routes and the fields of their bodies, for people, in plain HTML without a script from elsewhere."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_HEAD = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>API: warmpath</title>
<link rel="icon" href="page/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="page/css/base.css">
<link rel="stylesheet" href="page/css/help.css">
<script src="page/theme.js"></script>
</head>
<body>
<main class="help">
<h1>API</h1>
<p>For programs: <a href="openapi.json">openapi.json</a>. Keys are sent in <code>Authorization: Bearer KEY</code> or
<code>x-api-key</code>.</p>
"""


def api_page(document: Mapping[str, Any]) -> str:
    """Return the page about an OpenAPI document."""
    return _HEAD + "\n".join(_parts(document)) + "\n</main>\n</body>\n</html>\n"


def _parts(document: Mapping[str, Any]) -> Iterator[str]:
    routes = [(path, method, route) for path, methods in document["paths"].items() for method, route in methods.items()]
    schemas = document.get("components", {}).get("schemas", {})
    for tag in dict.fromkeys(tag for _, _, route in routes for tag in route.get("tags", ())):
        yield f"<h2>{escape(str(tag).capitalize())}</h2>"
        for path, method, route in routes:
            if tag in route.get("tags", ()):
                yield f"<h3><code>{method.upper()} {escape(path)}</code></h3>"
                for part in str(route.get("description") or route.get("summary", "")).split("\n\n"):
                    yield f"<p>{escape(part)}</p>"
                body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
                yield from _fields(_of(body, schemas), schemas)


def _of(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema, or the one that it names."""
    named: Mapping[str, Any] = schemas.get(str(schema.get("$ref", "")).rpartition("/")[2], schema)
    return named


def _fields(body: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    """Yield a body's fields; of a choice of bodies, those of each."""
    for choice in body.get("anyOf", ()):
        yield from _fields(_of(choice, schemas), schemas)
    if body.get("properties"):
        yield f"<details><summary>{len(body['properties'])} fields</summary>\n<dl>"
        for name, field in body["properties"].items():
            needed = "needed" if name in body.get("required", ()) else ""
            told = "; ".join(filter(None, (_kind(field), needed, str(field.get("description", "")))))
            yield f"<dt><code>{escape(name)}</code></dt><dd>{escape(told)}</dd>"
        yield "</dl>\n</details>"


def _kind(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return " or ".join(map(str, field["enum"]))
    if "$ref" in field:
        return "object"
    kinds = [_kind(one) for one in field.get("anyOf", ()) if one.get("type") != "null"]
    return " or ".join(dict.fromkeys(filter(None, kinds))) or str(field.get("type", ""))
