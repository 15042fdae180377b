"""The application with replicas that die at a call from a joining or leaving peer.

A file named like the called method, in the directory of the variable ``FAULTS``, arms it. The file holds the number
of calls to answer first. The replica that then removes the file dies at once.
"""

# No `from __future__ import annotations` here: Serve looks for a pydantic class in build_app's own annotation.
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ray.serve import Application

from serve_app import app
from serve_app.config.app import AppConfig
from serve_app.replica.peers import Question
from serve_app.replica.replica import Replica

FAULTS = "WARMPATH_TEST_FAULTS"


class Mortal(Replica):
    """A replica that can be made to die in the middle of a peer's pre-warm or hand-over."""

    async def answer_peer(self, question: Question, *args: Any, target: str) -> Any:
        _called(question)
        return await super().answer_peer(question, *args, target=target)


def _called(method: str) -> None:
    armed = Path(os.environ[FAULTS]) / method
    with suppress(FileNotFoundError):  # it is not armed, or another replica was quicker
        answered = int(armed.read_text())
        if answered:
            armed.write_text(str(answered - 1))
        else:
            armed.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def build_app(args: AppConfig) -> Application:
    """Return the application with mortal replicas."""
    with patch.object(app, "Replica", Mortal):
        return app.build_app(args)
