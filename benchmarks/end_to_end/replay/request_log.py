"""Logs of requests to OpenAI's API: JSON lines of bodies with their times.

A line is a batch line, `{"custom_id", "method", "url", "body"}`, or a bare body. In addition it has `timestamp`
(seconds from any start, milliseconds since 1970, or ISO 8601) and optionally `tenant`.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from serve_app.request_files import numbered_lines

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request of a log. ``at_s``: seconds from any common start."""

    at_s: float
    path: str
    body: dict[str, Any]
    tenant: str = ""


class _Line(BaseModel, extra="allow"):
    timestamp: datetime
    tenant: str = ""
    method: Literal["POST"] = "POST"
    url: str = ""
    body: dict[str, Any] | None = None


_EXPECTED = 'a line of a log is {"timestamp": MOMENT, ...}, with a request\'s fields or its "body"'


def is_log(path: Path) -> bool:
    """Return whether a file is a log rather than a trace. Raises ValueError for an empty file."""
    for _, line in numbered_lines(path):
        return b'"hash_ids"' not in line
    raise ValueError(f"{path} holds no requests")


def read_log(path: Path) -> list[LoggedRequest]:
    """Read a log, gzipped or plain, and sort it by time. Raises ValueError at a malformed line."""
    requests = []
    for number, line in numbered_lines(path):
        try:
            requests.append(_request(_Line.model_validate_json(line)))
        except ValidationError as error:
            why = error.errors()[0]
            place = ".".join(map(str, why["loc"])) or "the line"
            raise ValueError(f"{path}, line {number}: {place}: {why['msg']}; {_EXPECTED}") from error
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return sorted(requests, key=lambda request: request.at_s)


def _request(line: _Line) -> LoggedRequest:
    moment = line.timestamp if line.timestamp.tzinfo is not None else line.timestamp.replace(tzinfo=UTC)
    body = line.body or line.model_extra or {}
    path = CHAT if "messages" in body else COMPLETIONS
    if "prompt" not in body and path == COMPLETIONS:
        raise ValueError("a body needs messages or a prompt")
    if line.url not in ("", path):
        raise ValueError(f"only {CHAT} and {COMPLETIONS} can be replayed, each with its own body")
    return LoggedRequest(moment.timestamp(), path, body, line.tenant)
