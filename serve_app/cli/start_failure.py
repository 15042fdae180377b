"""Why an application does not start: the innermost sentence of what Serve tells, and where its logs are."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_EXCEPTION = re.compile(r"^(?P<kind>(?:\w+\.)*[A-Z]\w*): (?P<text>.+)$")
_OURS = ("serve_app.", "router.")
_TRACEBACK = "Traceback (most recent call last)"


class StartFailed(Exception):
    """The instance cannot start; ``sentences`` say why. ``status``: what its process leaves with."""

    status = 1

    def __init__(self, *sentences: str) -> None:
        super().__init__(*sentences)
        self.sentences = sentences


class Refused(StartFailed):
    """Its settings cannot be used, and nothing was started."""

    status = 2


def innermost(message: str) -> str:
    """Return the sentence of the exception at the end of a traceback's text; the text itself where there is none.

    The kind of exception is left out where the sentence is one of warmpath's own.
    """
    for line in reversed(message.strip().splitlines()):
        if match := _EXCEPTION.match(line):
            ours = match["kind"] == "ValueError" or match["kind"].startswith(_OURS)
            return match["text"] if ours else line
    return message.strip()


def wait_until_running(app_name: str, logs: Path) -> None:
    """Return when an application runs. Raises StartFailed as soon as a constructor has failed.

    Serve would try again, up to twenty times; on one machine the same settings fail the same way.
    """
    from ray import serve

    while True:
        status = serve.status().applications[app_name]
        if status.status == "RUNNING":
            return
        messages = {name: deployment.message for name, deployment in status.deployments.items()}
        if why := failure(status.status, messages, status.message):
            raise StartFailed(f"{why}\nlogs of Serve: {logs}")
        time.sleep(0.2)


def failure(status: str, deployments: Mapping[str, Any], message: str) -> str | None:
    """Return why a start has failed, or is about to; None while it may succeed."""
    for name, text in deployments.items():
        if _TRACEBACK in text:
            return f"{name} does not start: {innermost(text)}"
    if status == "DEPLOY_FAILED":
        return innermost(next(filter(None, deployments.values()), message))
    return None
