"""OpenAI's batch file: one request per input line, one response per output line.

Source: OpenAI's Batch API guide, and its reference of the request input and output objects.
"""

import codecs
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field

from serve_app.api.anthropic.request import parse_messages
from serve_app.api.anthropic.response import MessagesFormat
from serve_app.api.format import AnswerFormat, ErrorAnswer
from serve_app.api.json_body import JsonBody, Must
from serve_app.api.openai.request import parse_chat, parse_completion
from serve_app.api.openai.response import CHAT, COMPLETION
from serve_app.api.openai.responses.request import parse_response_request
from serve_app.api.openai.responses.response import ResponsesFormat
from serve_app.api.request import GenerateRequest
from serve_app.errors import InvalidRequest

APIS: dict[str, tuple[Callable[[bytes], GenerateRequest], Callable[[], AnswerFormat]]] = {
    "/v1/chat/completions": (parse_chat, lambda: CHAT),
    "/v1/completions": (parse_completion, lambda: COMPLETION),
    "/v1/responses": (parse_response_request, ResponsesFormat),
    "/v1/messages": (parse_messages, lambda: MessagesFormat(lambda *_: None)),
}
"""By path: the parser of bodies, and the format of an answer."""


class BatchRequest(JsonBody):
    """One line of the input."""

    bounded: ClassVar[Mapping[str, int]] = {"body": 1_000_000}

    custom_id: Annotated[str, Field(min_length=1), Must("a string that is not empty")]
    method: Annotated[Literal["POST"], Must('"POST"')] = "POST"
    url: Annotated[
        Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"],
        Must(f"one of {', '.join(APIS)}"),
    ]
    body: Annotated[dict[str, Any], Must("the object that is sent to url")]

    def parse_body(self, model: str, seed: int) -> GenerateRequest:
        """Return the body's request; ``model`` and ``seed`` are defaults. Raises InvalidRequest."""
        given = {name: value for name, value in self.body.items() if value is not None}
        request = APIS[self.url][0](msgspec.json.encode({"model": model, **given}))
        return request if request.seed is not None else replace(request, seed=seed)  # messages have no such field

    def response(self, answer: ErrorAnswer, answer_id: str) -> dict[str, Any]:
        """Return the output's line."""
        return {
            "id": f"batch_req_{answer_id}",
            "custom_id": self.custom_id,
            "response": {"status_code": answer.status, "request_id": answer_id, "body": answer.body},
            "error": None,
        }


def parse_line(line: bytes) -> BatchRequest:
    """Parse a line of the input. Raises InvalidRequest."""
    # Editors on Windows begin a file with a byte order mark.
    return BatchRequest.parse(line.removeprefix(codecs.BOM_UTF8))


def read_lines(text: bytes) -> list[BatchRequest]:
    """Parse a file of lines. Raises InvalidRequest, which names the line."""
    requests: list[BatchRequest] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            request = parse_line(line)
        except InvalidRequest as error:
            raise InvalidRequest(f"line {number}: {error.message}", param=error.param) from error
        if request.custom_id in lines:
            raise InvalidRequest(f"lines {lines[request.custom_id]} and {number} have the same custom_id.")
        lines[request.custom_id] = number
        requests.append(request)
    if not requests:
        raise InvalidRequest("It holds no request; it must have one JSON object per line.")
    return requests
