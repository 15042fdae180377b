"""`warmpath top`: what an instance does now, in a terminal, from `/v1/cache/events`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import httpx
import typer
from rich.console import Console
from rich.live import Live

from serve_app.cli.commands.prompt_cutover import KEY as OPERATOR_KEY
from serve_app.cli.commands.top_display import State, frame
from serve_app.cli.console import fail

TENANT_KEY = "WARMPATH_API_KEY"
TIMEOUT_S = 15.0
"""Longer than three heartbeats."""

AGAIN_S = 2.0
FRAME_S = 0.25


def top(
    url: Annotated[
        str, typer.Option(help=f"of the instance; an operator's key is taken from ${OPERATOR_KEY}, else ${TENANT_KEY}")
    ] = "http://127.0.0.1:8000",
    once: Annotated[bool, typer.Option("--once", help="print one frame and leave")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the snapshot as JSON and leave")] = False,
) -> None:
    """Show replicas, prefixes and decisions as they are; a tenant's key shows its own part. Ctrl-C ends it."""
    key = os.environ.get(OPERATOR_KEY) or os.environ.get(TENANT_KEY)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    address = f"{url.rstrip('/')}/v1/cache/events"
    console = Console(highlight=False)
    if not (once or as_json) and console.is_terminal:
        _follow(console, url, address, headers)
        return
    try:
        answer = httpx.get(address, params={"once": "true"}, headers=headers, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        _nobody(url, error)
    snapshot = _document(url, answer)
    if as_json:
        print(json.dumps(snapshot))
        return
    state = State()
    with _understood(url):
        state.take(snapshot)
        shown = frame(state)
    console.print(shown)


def _follow(console: Console, url: str, address: str, headers: dict[str, str]) -> None:
    state, drawn_s = State(), 0.0
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                with _stream(url, address, headers) as lines:
                    for line in lines:
                        with _understood(url):
                            if line.startswith("data: "):
                                state.take(json.loads(line.removeprefix("data: ")))
                            now_s = time.monotonic()
                            if state.about and now_s - drawn_s >= FRAME_S:
                                drawn_s = now_s
                                live.update(frame(state), refresh=True)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                if not state.about:
                    _nobody(url, error)
            live.update(frame(state, f"{url} does not answer; trying again"), refresh=True)
            time.sleep(AGAIN_S)


@contextmanager
def _stream(url: str, address: str, headers: dict[str, str]) -> Iterator[Iterator[str]]:
    with httpx.stream("GET", address, headers=headers, timeout=TIMEOUT_S) as answer:
        if answer.is_error and answer.status_code < 500:
            answer.read()
            _document(url, answer)
        answer.raise_for_status()
        yield answer.iter_lines()


def _document(url: str, answer: httpx.Response) -> dict[str, Any]:
    """Return an answer's JSON. Leaves with status 2 where it is an error, with its sentence."""
    try:
        found: dict[str, Any] = answer.json()
        refused = found["error"]["message"] if answer.is_error else ""
    except (ValueError, LookupError, TypeError) as error:
        _stranger(url, error)
    if refused:
        which = f" (a key is taken from ${OPERATOR_KEY} or ${TENANT_KEY})" if answer.status_code == 401 else ""
        fail(refused + which)
    return found


@contextmanager
def _understood(url: str) -> Iterator[None]:
    """Leave with a sentence where what a server tells is not what warmpath does."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        _stranger(url, error)


def _stranger(url: str, error: Exception) -> NoReturn:
    fail(f"{url} does not answer as warmpath does: {error!r}")


def _nobody(url: str, error: Exception) -> NoReturn:
    fail(f"nobody answers at {url}: {error}; start an instance with warmpath serve, or name another with --url")
