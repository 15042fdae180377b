"""Asks a running instance over HTTP, with the key that the environment holds: on a command line others would see it."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import httpx
import typer

from serve_app.cli.console import fail, harmless

OPERATOR_KEY = "WARMPATH_OPERATOR_KEY"
TENANT_KEY = "WARMPATH_API_KEY"
LOCAL = "http://127.0.0.1:8000"
Url = Annotated[
    str, typer.Option(help=f"of the instance; an operator's key is taken from ${OPERATOR_KEY}, else ${TENANT_KEY}")
]


def answers(url: str) -> bool:
    """Return whether somebody answers there with status 200; no proxy leads to this machine."""
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    return False


class NotAnswered(Exception):
    """Nobody answers, or not just now; the message says where."""


def ask(url: str, method: str, path: str, *, body: dict[str, Any] | None = None, timeout_s: float) -> dict[str, Any]:
    """Return the JSON of an answer, with nothing in it that a terminal obeys. Raises NotAnswered.

    Leaves with status 2 where it is refused, or is not what warmpath answers.
    """
    key = os.environ.get(OPERATOR_KEY) or os.environ.get(TENANT_KEY)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.request(method, f"{url.rstrip('/')}{path}", json=body, headers=headers, timeout=timeout_s)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NotAnswered(f"nobody answers at {url}: {error}") from error
    try:
        document: dict[str, Any] = harmless(answer.json())
        refusal = document["error"]["message"] if answer.is_error else ""
    except (ValueError, LookupError, TypeError) as error:
        if answer.status_code < 500:
            not_ours(url, error)
        refusal = f"{url} answers with status {answer.status_code}"
    if answer.status_code >= 500:
        raise NotAnswered(refusal)
    if answer.status_code == 401:
        refusal += f" (a key is taken from ${OPERATOR_KEY} or ${TENANT_KEY})"
    if refusal:
        fail(refusal)
    return document


def not_ours(url: str, error: Exception) -> NoReturn:
    """Leave with a sentence where what a server answers is not what warmpath does."""
    fail(f"{url} does not answer as warmpath does: {error!r}")
