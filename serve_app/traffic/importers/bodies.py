"""Bodies of OpenAI's and Anthropic's APIs: logs with times, and batch files of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from serve_app.api.anthropic.request import parse_messages
from serve_app.api.openai.request import parse_chat, parse_completion
from serve_app.api.openai.responses.request import parse_response_request
from serve_app.api.request import GenerateRequest
from serve_app.errors import InvalidRequest
from serve_app.request_files import TraceError, numbered_lines
from serve_app.traffic.importers.source import ImportOptions, SourceRequest, seconds

PARSERS: Mapping[str, Callable[[bytes], GenerateRequest]] = {
    "/v1/chat/completions": parse_chat,
    "/v1/completions": parse_completion,
    "/v1/responses": parse_response_request,
    "/v1/messages": parse_messages,
}
TIMES = ("timestamp", "time", "ts", "@timestamp", "created_at", "start_time")
"""The names of a line's time."""
BODIES = ("body", "params", "request")
"""The names of a body that is a field of its line."""
_ANSWER_TOKENS = ("completion_tokens", "output_tokens")


def body_of(line: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the body in a line, which may be the line; None if there is none."""
    for name in BODIES:
        inner = line.get(name)
        if isinstance(inner, dict):
            return body_of(inner) if isinstance(inner.get("body"), dict) else inner
    return line if any(name in line for name in ("messages", "prompt", "input")) else None


def address_of(line: Mapping[str, Any], body: Mapping[str, Any], api: str) -> str:
    """Return the path of the API that a body is for. ``api``: "openai", "anthropic" or "" for unknown."""
    url = line.get("url") or line.get("path") or line.get("endpoint")
    if isinstance(url, str):
        for path in sorted(PARSERS, key=len, reverse=True):
            if path.removeprefix("/v1") in url.partition("?")[0]:
                return path
    if "messages" not in body:
        return "/v1/responses" if "input" in body else "/v1/completions"
    theirs = "params" in line or "system" in body or "anthropic_version" in body
    if api == "anthropic" or (not api and (theirs or str(body.get("model", "")).startswith("claude"))):
        return "/v1/messages"
    return "/v1/chat/completions"


class BodyLines:
    """Lines of bodies. ``timed``: each has its time; else they arrive by ``rate``, as those of a batch."""

    _lines: ClassVar[msgspec.json.Decoder[dict[str, Any]]] = msgspec.json.Decoder(dict[str, Any])

    def __init__(self, path: Path, options: ImportOptions, *, timed: bool) -> None:
        self._path, self._options, self._timed = path, options, timed
        self._reader = options.text_reader(path)
        self.block_tokens = self._reader.block_tokens
        self._free = count()

    def requests(self) -> Iterator[SourceRequest]:
        """Yield the requests; what this server would refuse is counted. Raises TraceError."""
        refused, first, taken = 0, "", 0
        for number, line in numbered_lines(self._path):
            self._options.on_line(len(line))
            try:
                requests = self._requests(self._lines.decode(line))
            except InvalidRequest as error:
                refused, first = refused + 1, first or f"line {number}: {error.message}"
                continue
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    self._options.notes["the last line is cut off, and left out"] += 1
                    break
                raise TraceError(f"{self._path}, line {number}: {error}; {_expected(self._timed)}") from error
            taken += 1
            yield from requests
        if refused:
            if not taken:
                raise TraceError(f"{self._path}: no line is a request that can be read: {first}")
            self._options.notes[f"lines are left out: they cannot be served as they are, the first: {first}"] += refused

    def _requests(self, line: dict[str, Any]) -> list[SourceRequest]:
        body = body_of(line)
        if body is None:
            raise ValueError("it has no body, messages, prompt or input")
        at_s = self._arrival(line)
        tenant = str(line.get("tenant") or "")
        request = PARSERS[address_of(line, body, self._options.api)](
            msgspec.json.encode({"model": "", **{name: value for name, value in body.items() if value is not None}})
        )
        output = self._output_tokens(line, request)
        prompts = self._reader.prompts(request, tenant)
        return [
            SourceRequest(
                at_s=at_s,
                tokens=tokens,
                output_tokens=max(1, output // len(prompts)),
                hashes=hashes,
                tenant=tenant,
                model=request.model,
                adapter=request.lora_name or "",
                session=request.session or str(line.get("session") or line.get("session_id") or ""),
                choices=request.n,
                duration_s=_number(line.get("duration_ms")) / 1e3,
                ttft_s=_number(line.get("ttft_ms")) / 1e3,
            )
            for tokens, hashes in prompts
        ]

    def _arrival(self, line: Mapping[str, Any]) -> float:
        if not self._timed:
            self._options.notes["requests have no times: --rate spreads them"] += 1
            return next(self._free) / self._options.rate
        for name in TIMES:
            if name in line:
                return seconds(line[name])
        raise ValueError(f"it has no time: none of {', '.join(TIMES)}")

    def _output_tokens(self, line: Mapping[str, Any], request: GenerateRequest) -> int:
        """Return the tokens of all answers: as told, else as bounded, else as assumed."""
        for holder in _objects(line, 3):
            for name in _ANSWER_TOKENS:
                if isinstance(holder.get(name), int):
                    return int(holder[name])
        self._options.notes["requests do not tell the tokens of their answers: max_tokens, or --output-tokens"] += 1
        return (request.max_tokens or self._options.output_tokens) * request.choices


def _objects(value: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
    """Yield a line and what its usage may stand in: itself, `usage`, `response`, its `body`."""
    yield value
    for name in ("usage", "response", "body"):
        inner = value.get(name)
        if depth and isinstance(inner, dict):
            yield from _objects(inner, depth - 1)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _expected(timed: bool) -> str:
    if timed:
        return 'a line is {"timestamp": MOMENT, "body": {...}}, or a body with a timestamp; also "tenant" and "url"'
    return 'a line is {"custom_id": NAME, "url": PATH, "body": {...}} or {"custom_id": NAME, "params": {...}}'
