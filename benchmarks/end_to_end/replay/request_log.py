"""Logs of requests to OpenAI's API: JSON lines of bodies with their times.

A line is a batch line, `{"custom_id", "method", "url", "body"}`, or a bare body. In addition it has `timestamp`
(seconds from any start, milliseconds since 1970 from 1e11 on, or ISO 8601) and optionally `tenant`.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_MILLISECONDS_FROM = 1e11


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request of a log. ``at_s``: seconds from any common start."""

    at_s: float
    path: str
    body: dict[str, Any]
    tenant: str = ""


def is_log(path: Path) -> bool:
    """Return whether a file is a log rather than a trace. Raises ValueError for an empty file."""
    for _, row in _rows(path):
        return "hash_ids" not in row
    raise ValueError(f"{path} holds no requests")


def read_log(path: Path) -> list[LoggedRequest]:
    """Read a log, gzipped or plain, and sort it by time. Raises ValueError at a malformed line."""
    found = []
    for number, row in _rows(path):
        try:
            found.append(_request(row))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}") from error
    return sorted(found, key=lambda request: request.at_s)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: not an object")
            yield number, row


def _request(row: dict[str, Any]) -> LoggedRequest:
    rest = dict(row)
    at_s = _seconds(rest.pop("timestamp"))
    tenant = str(rest.pop("tenant", ""))
    body = rest.get("body", rest)
    if not isinstance(body, dict):
        raise ValueError("the body is not an object")
    path = CHAT if "messages" in body else COMPLETIONS
    if "prompt" not in body and path == COMPLETIONS:
        raise ValueError("a body needs messages or a prompt")
    if body is not rest and (rest.get("method", "POST") != "POST" or rest.get("url", path) != path):
        raise ValueError(f"only POST {CHAT} and {COMPLETIONS} can be replayed, each with its own body")
    return LoggedRequest(at_s, path, body, tenant)


def _seconds(timestamp: float | str) -> float:
    if isinstance(timestamp, str):
        moment = datetime.fromisoformat(timestamp)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    return timestamp / 1000.0 if timestamp >= _MILLISECONDS_FROM else float(timestamp)
