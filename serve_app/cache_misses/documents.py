"""Files before a deploy -> the prompts in them: texts, request JSON of OpenAI and Anthropic, lines of requests, logs.

A prompt's parts stand in the order in which models read them, tools first. Each knows its line in the file.
"""

import codecs
import json
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_app.errors import InvalidRequest

MAX_FILE_BYTES = 512 << 20
MAX_DEPTH = 6
"""How deep in a line of a log a request's body may stand."""
MAX_STARTS = 8
"""The number of places in a line of a log where JSON may begin."""
_TEMPLATES = frozenset({".md", ".j2", ".jinja", ".jinja2", ".prompt", ".tmpl", ".erb"})
_REQUESTS = frozenset({".json", ".jsonl", ".ndjson", ".log"})
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_NESTED = re.compile(r"\s*[{\[]")
_SYSTEM = ("system", "developer")


class Located(str):
    """A string of a JSON file. ``line``: its line there, from 1."""

    line: int

    @classmethod
    def of(cls, text: str, line: int) -> "Located":
        """Return a text with its line."""
        located = cls(text)
        located.line = line
        return located


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """A part of a prompt, such as ``system`` or ``messages[2]``. ``start``: its first character in the prompt."""

    place: str
    line: int
    start: int


@dataclass
class DocumentPrompt:
    """One prompt of a file. ``system_chars``: of its tools and system prompt; ``template``: its values are still open.

    ``user``: the client's word for whom it is. ``salt``, ``adapter`` and ``model`` divide the cache.
    """

    path: Path
    line: int
    template: bool = False
    text: str = ""
    system_chars: int = 0
    user: str = ""
    salt: str = ""
    adapter: str = ""
    model: str = ""
    parts: list[DocumentPart] = field(default_factory=list)

    def add(self, place: str, text: str, role: str = "") -> None:
        """Append a part."""
        opening = f"<{role}>\n" if role else ""
        line = text.line if isinstance(text, Located) else self.line
        self.parts.append(DocumentPart(place, line, len(self.text) + len(opening)))
        self.text += f"{opening}{text}" + ("" if self.template else "\n")

    def part_at(self, char: int) -> DocumentPart:
        """Return the part with a character of the prompt."""
        return self.parts[max(0, bisect_right([part.start for part in self.parts], char) - 1)]


def prompts_of(path: Path) -> Iterator[DocumentPrompt]:
    """Yield the prompts of a file; those of a folder are its texts. ``-``: standard input. Raises InvalidRequest."""
    if path.is_dir():
        for file in sorted(path.rglob("*.txt")):
            if not any(part.startswith(".") for part in file.relative_to(path).parts):
                yield from prompts_of(file)
        return
    text = _read(path)
    if path.suffix.lower() in _TEMPLATES:
        yield _text_prompt(path, text)
        return
    found = False
    for prompt in _requests(path, text):
        found = True
        yield prompt
    if not found:
        if path.suffix.lower() in _REQUESTS:
            raise InvalidRequest(
                f"{path} holds no request: none with messages, or with a model and an input or prompt, as one JSON "
                "document or one on each line."
            )
        yield _text_prompt(path, text)


def _read(path: Path) -> str:
    try:
        raw = sys.stdin.buffer.read(MAX_FILE_BYTES + 1) if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}.") from error
    if len(raw) > MAX_FILE_BYTES:
        raise InvalidRequest(f"{path} has over {MAX_FILE_BYTES >> 20} MiB; split it.")
    try:
        # A log may have been cut or hold other bytes; a prompt has to be text.
        return raw.removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace" if path.suffix == ".log" else "strict")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not UTF-8 at byte {error.start}.") from None


def _text_prompt(path: Path, text: str) -> DocumentPrompt:
    prompt = DocumentPrompt(path, 1, template=True)
    prompt.add("", text)
    prompt.system_chars = len(text)
    return prompt


def _requests(path: Path, text: str) -> Iterator[DocumentPrompt]:
    if _NESTED.match(text):
        try:
            document = located(text)
        except (ValueError, RecursionError):
            pass
        else:
            for line, body in _bodies(document, 1):
                yield from _request_prompts(path, line, body)
            return
    for number, row in enumerate(text.split("\n"), 1):
        for value in _json_in(row):
            bodies = [*_bodies(value, number)]
            for _, body in bodies:
                yield from _request_prompts(path, number, body)
            if bodies:
                break


def located(text: str) -> Any:
    """Return JSON with a ``Located`` for each string of it. Raises ValueError."""
    pairs = json.loads(text, object_pairs_hook=_Pairs)
    literals = _LITERAL.finditer(text)
    seen, line = 0, 1

    def next_string(value: str) -> Located:
        # Literals stand in the text in the order in which this walks, and never contain a line end.
        nonlocal seen, line
        start = next(literals).start()
        line += text.count("\n", seen, start)
        seen = start
        return Located.of(value, line)

    def walk(value: Any) -> Any:
        if isinstance(value, _Pairs):
            return {next_string(name): walk(inner) for name, inner in value}
        if isinstance(value, list):
            return [walk(inner) for inner in value]
        return next_string(value) if isinstance(value, str) else value

    return walk(pairs)


class _Pairs(list[tuple[str, Any]]):
    """The fields of an object in their order, also of names that are there twice."""


def _json_in(line: str) -> Iterator[Any]:
    """Yield the JSON objects that begin in a line of a log, the outermost first."""
    decoder, start = json.JSONDecoder(), -1
    for _ in range(MAX_STARTS):
        start = line.find("{", start + 1)
        if start < 0:
            return
        try:
            yield decoder.raw_decode(line, start)[0]
        except (ValueError, RecursionError):
            continue


def _bodies(value: Any, line: int, depth: int = 0) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the outermost bodies of requests in a value, each with its line."""
    if depth > MAX_DEPTH:
        return
    if isinstance(value, str) and depth and _NESTED.match(value):  # a body as text, in a field of a log
        line = value.line if isinstance(value, Located) else line
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return
    if isinstance(value, list):
        for inner in value:
            yield from _bodies(inner, line, depth + 1)
    elif isinstance(value, dict):
        first = next(iter(value), None)
        line = first.line if isinstance(first, Located) else line
        if _is_request(value):
            yield line, value
            return
        for inner in value.values():
            yield from _bodies(inner, line, depth + 1)


def _is_request(value: Mapping[str, Any]) -> bool:
    messages, prompt, given = value.get("messages"), value.get("prompt"), value.get("input")
    if isinstance(messages, list):
        return all(isinstance(message, dict) and "role" in message for message in messages) and bool(messages)
    named = "model" in value
    return named and (isinstance(prompt, str | list) or isinstance(given, str | list))


def _request_prompts(path: Path, line: int, body: Mapping[str, Any]) -> Iterator[DocumentPrompt]:
    texts = body.get("prompt")
    if "messages" not in body and texts is not None:  # a completion has a prompt, or several
        for text in texts if isinstance(texts, list) else [texts]:
            if isinstance(text, str):
                prompt = _prompt_of(path, line, body)
                prompt.add("prompt", text)
                yield prompt
        return
    prompt = _prompt_of(path, line, body)
    for number, tool in enumerate(_list(body.get("tools"))):
        prompt.add(f"tools[{number}]", Located.of(json.dumps(tool, ensure_ascii=False), _line_of(tool, line)))
    for name in ("system", "instructions"):
        if body.get(name):
            prompt.add(name, _text_of(body[name], line), "system")
    name = "messages" if "messages" in body else "input"
    messages = body.get(name)
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    opening = True
    for number, message in enumerate(_list(messages)):
        if not isinstance(message, dict):
            continue
        role = str(message.get("role") or message.get("type"))
        if opening and role not in _SYSTEM:
            opening, prompt.system_chars = False, len(prompt.text)
        prompt.add(f"{name}[{number}]", _said(message, _line_of(message, line)), role)
    if opening:
        prompt.system_chars = len(prompt.text)
    if prompt.parts:
        yield prompt


def _prompt_of(path: Path, line: int, body: Mapping[str, Any]) -> DocumentPrompt:
    metadata = body.get("metadata")
    user = body.get("user") or body.get("safety_identifier") or (
        metadata.get("user_id") if isinstance(metadata, dict) else None
    )  # fmt: skip
    names = (body.get(name) for name in ("cache_salt", "lora_name", "model"))
    salt, adapter, model = (str(value) if value else "" for value in names)
    return DocumentPrompt(path, line, user=str(user or ""), salt=salt, adapter=adapter, model=model)


def _said(message: Mapping[str, Any], line: int) -> Located:
    """Return the text of a message: its content, and its calls and results as JSON."""
    rest = {name: value for name, value in message.items() if name not in ("role", "content", "type", "cache_control")}
    content = _text_of(message.get("content"), line)
    calls = json.dumps(rest, ensure_ascii=False) if rest else ""
    return Located.of(f"{content}{calls}", content.line if content else line)


def _text_of(content: Any, line: int) -> Located:
    """Return the text of a string or of blocks."""
    if isinstance(content, str):
        return content if isinstance(content, Located) else Located.of(content, line)
    texts = []
    for block in _list(content):
        text = block.get("text") if isinstance(block, dict) else block
        if not isinstance(text, str):
            kept = {name: value for name, value in block.items() if name != "cache_control"} if block else block
            text = Located.of(json.dumps(kept, ensure_ascii=False), _line_of(block, line))
        texts.append(text)
    first = next((text.line for text in texts if isinstance(text, Located)), line)
    return Located.of("\n".join(texts), first)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _line_of(value: Any, line: int) -> int:
    first = next(iter(value), None) if isinstance(value, dict) else None
    return first.line if isinstance(first, Located) else line
