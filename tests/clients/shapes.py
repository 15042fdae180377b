"""What a client sends in a loop, as a small file without its texts: `python -m tests.clients.shapes RECORD VERSION`.

A text keeps its lines' lengths, and equal lines stay equal, so that prompts begin alike as the client's own do. Words
are made up; names of tools, fields and tags stay. Texts are an eighth as long, for the speed of tests.
"""

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHORTER = 8
_TAGS = re.compile(r"\s*(</?[a-z_-]{1,40}>\s*)+|x-anthropic-billing-header:.*|```\w*\n?", re.S)
_OPENINGS = re.compile(r"Git snapshot at conversation start\.|git:")
"""The beginnings of lines that a rule looks for."""
_KEPT = frozenset(
    {
        "type", "role", "name", "id", "call_id", "tool_use_id", "tool_call_id", "tool_name", "namespace", "model",
        "ttl", "status", "summary", "encrypted_content", "effort", "tool_choice", "display", "keep", "clear_at",
        "signature", "include", "user_id", "phase", "prompt_cache_key",
    }
)  # fmt: skip
"""Fields whose values are no words of the client's."""
_HEADERS = ("user-agent", "anthropic-beta", "anthropic-version", "originator", "session-id", "x-session-affinity")
_WHOLE = ("input_schema", "parameters")
"""Schemas of tools: only their length is kept."""


class Shapes:
    """Collects the parts of requests: ``lines``, as lengths, and ``values``, as JSON with numbers for texts.

    A line may also be a tag, or what it begins with and its length.
    """

    def __init__(self) -> None:
        self.lines: list[int | str | list[Any]] = []
        self.values: list[Any] = []
        self._known: dict[str, int] = {}

    def request(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a body in which items of lists are numbers of ``values``."""
        lists = ("messages", "input", "tools", "system")
        return {
            name: [self._number(self._shape(one), self.values) for one in value]
            if name in lists and isinstance(value, list)
            else self._shape({name: value})[name]
            for name, value in body.items()
            if name != "client_metadata"
        }

    def _shape(self, value: Any, name: str = "") -> Any:
        if name in _WHOLE:
            return {"type": "object", "description": self._text(json.dumps(value))}
        if isinstance(value, dict):
            return {key: self._shape(one, key) for key, one in value.items()}
        if isinstance(value, list):
            return [self._shape(one, name) for one in value]
        if not isinstance(value, str) or name in _KEPT:
            return value
        if name == "arguments":
            return {"json": self._shape(json.loads(value or "{}"))}
        return self._text(value)

    def _text(self, text: str) -> dict[str, list[int]]:
        return {"lines": [self._line(line) for line in text.splitlines(keepends=True)]}

    def _line(self, line: str) -> int:
        opening = _OPENINGS.match(line)
        shape = line if _TAGS.fullmatch(line) else [opening[0], len(line)] if opening else len(line)
        return self._number(shape, self.lines, repr(line))

    def _number(self, value: Any, table: list[Any], key: str = "") -> int:
        key = f"{id(table)}{key or json.dumps(value)}"
        if key not in self._known:
            self._known[key] = len(table)
            table.append(value)
        return self._known[key]


def requests_of(file: Path) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Yield the headers and bodies of a file of shapes, with made-up words."""
    shapes = json.loads(file.read_text())

    def line(number: int) -> str:
        size = shapes["lines"][number]
        if isinstance(size, str):
            return size
        opening, size = size if isinstance(size, list) else ("", size)
        made = random.Random(number)
        letters = (made.choice("etaoinshrdlu    ") for _ in range(max(1, size // SHORTER)))
        return f"{opening}{number} {''.join(letters)}\n"

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [whole(one) for one in value]
        if not isinstance(value, dict):
            return value
        if value.keys() == {"lines"}:
            return "".join(map(line, value["lines"]))
        if value.keys() == {"json"}:
            return json.dumps(whole(value["json"]))
        return {name: whole(one) for name, one in value.items()}

    for headers, body in shapes["requests"]:
        numbered = ("messages", "input", "tools", "system")
        items = {name: body[name] for name in numbered if isinstance(body.get(name), list)}
        full = {name: [shapes["values"][number] for number in numbers] for name, numbers in items.items()}
        yield headers, whole({**body, **full})


def main() -> None:
    """Print the shapes of a record of ``Recorder``."""
    record, version = sys.argv[1:]
    shapes, requests = Shapes(), []
    for text in Path(record).read_text().splitlines():
        row = json.loads(text)
        if row["method"] == "POST" and row["path"].endswith(("/messages", "/responses", "/chat/completions")):
            headers = {name: value for name, value in row["headers"].items() if name in _HEADERS}
            requests.append([headers, shapes.request(row["body"])])
    parts = {"version": version, "lines": shapes.lines, "values": shapes.values, "requests": requests}
    print("{" + ",\n".join(f"{json.dumps(name)}: {json.dumps(part)}" for name, part in parts.items()) + "}")


if __name__ == "__main__":
    main()
