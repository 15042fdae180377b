"""Calls of an operator's commands to an instance. Keys are read from the environment: a command line is visible."""

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer

from serve_app.cli.console import fail, harmless

OPERATOR_KEY = "WARMPATH_OPERATOR_KEY"
TENANT_KEY = "WARMPATH_API_KEY"
LOCAL = "http://127.0.0.1:8000"
TIMEOUT_S = 1800.0
"""A long prompt needs time on each replica, one after another."""

URL_HELP = f"the instance's URL; the operator's key is read from ${OPERATOR_KEY} or ${TENANT_KEY}"
Url = Annotated[str, typer.Option(envvar="WARMPATH_URL", help=URL_HELP)]


WORDS = {
    "in the URL: ?model=NAME": "with --model NAME",
    "send cold: true": "add --cold",
    "GET /v1/admin/tenants lists": "`warmpath tenants list` lists",
    "GET /v1/admin/keys lists": "`warmpath keys list` lists",
    "POST /v1/admin/keys makes": "`warmpath keys new` makes",
}
"""What refusals call a part of a request, and what the command line calls it."""


def ask(
    url: str,
    method: str,
    path: str,
    *,
    query: Mapping[str, str | None] | None = None,
    body: dict[str, Any] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Return the JSON of an instance's answer, safe for a terminal; exit with status 2 on errors."""
    import httpx

    key = os.environ.get(OPERATOR_KEY) or os.environ.get(TENANT_KEY)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    given = {name: value for name, value in (query or {}).items() if value is not None}
    url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")  # as clients of the APIs have it
    try:
        answer = httpx.request(method, f"{url}{path}", params=given, json=body, headers=headers, timeout=timeout_s)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = re.sub(r"\[Errno -?\d+\] ", "", str(error))
        fail(f"no server answers at {url}: {why}; name another by --url or $WARMPATH_URL")
    try:
        document: dict[str, Any] = harmless(answer.json())
        refusal = document["error"]["message"] if answer.is_error else ""
    except (ValueError, LookupError, TypeError) as error:
        down, other = f"answers with status {answer.status_code}", f"does not answer as warmpath does: {error!r}"
        fail(f"{url} {down if answer.status_code >= 500 else other}")
    if answer.status_code == 401:
        refusal += f" (a key is taken from ${OPERATOR_KEY} or ${TENANT_KEY})"
    if refusal:
        for there, here in WORDS.items():
            refusal = refusal.replace(there, here)
        fail(refusal)
    return document


def part(name: str) -> str:
    """Return a name as one part of a path."""
    return quote(name, safe="")
