"""Starts that are interrupted or fail, and a stop beside streams, on real Ray Serve (simulated engine).

Nothing is left of any: no process, no port that is taken; and the terminal has words, none of them Ray's.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from serve_app.cli.checks.finding import Case
from serve_app.cli.checks.network import address
from serve_app.cli.local_ray import held_port
from serve_app.cli.processes import descendants
from tests.integration.conftest import PATIENCE_S, START, eventually

STEP_S = 0.1
SIMULATED = [
    "--model",
    "demo",
    "--engine",
    "simulated",
    "--replicas",
    "1",
    "--set",
    f"simulated_decode_step_s={STEP_S}",
]
NO_PROXY = "http://127.0.0.1:9"
"""As in many a company's environment; but nothing listens there, and nothing of an instance may ask it."""
RAYS_WORDS = ("raylet", "GCS", "ray.kill", "Traceback", "rpc_client")


class Serving:
    """``warmpath serve`` in a process of its own, as a terminal sees it."""

    def __init__(self, port: int, *arguments: str) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.output = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "serve_app.cli.entry", "serve", "--port", str(port), *SIMULATED, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "http_proxy": NO_PROXY, "HTTP_PROXY": NO_PROXY},
            start_new_session=True,
        )

    def wait_for(self, word: str) -> None:
        """Read lines until one has a word in it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if word in line:
                return
        raise AssertionError(f"it never said {word!r}:\n{self.output}")

    def end(self) -> str:
        """Return all that it said, once it has ended; nothing of it may be left."""
        family = descendants(self.process.pid)
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        self.process.wait(PATIENCE_S)
        eventually(lambda: not family & descendants(1) and not any(map(_runs, family)))
        assert [finding.state for finding in address(Case(port=self.port))] == ["ok"]
        assert not [word for word in RAYS_WORDS if word in self.output], self.output
        return self.output


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def serving(*arguments: str) -> Iterator[Serving]:
    with held_port() as port:
        made = Serving(port, *arguments)
        try:
            yield made
        finally:
            made.process.kill()
            made.process.wait()


@pytest.mark.parametrize(
    ("word", "number"),
    [("", signal.SIGTERM), ("[1/4]", signal.SIGINT), ("[2/4]", signal.SIGTERM), ("[3/4]", signal.SIGINT)],
)
def test_a_start_ends_at_any_moment(word: str, number: signal.Signals) -> None:
    """Before Ray starts, while it does, while replicas do, before the greeting: with a word, and all that it started.

    A greeting that is sooner than the signal makes that last one the stop of an instance that serves.

    docs/starting.md
    """
    with START, serving() as instance:
        if word:
            instance.wait_for(word)
        else:
            eventually(lambda: bool(descendants(instance.process.pid)))
        instance.process.send_signal(number)
        output = instance.end()
        if word == "[3/4]" and "Stop: Ctrl-C" in output:
            assert output.endswith("stopped\n")
            assert instance.process.returncode == 0
        else:
            assert "stopping: the start is given up\nstopped\n" in output
            assert instance.process.returncode == 128 + number


def test_what_fails_in_a_replica_is_said() -> None:
    """The innermost sentence, where the logs are, and no traceback. (docs/starting.md)"""
    with START, serving("--set", "max_model_len=3") as instance:
        output = instance.end()
        assert instance.process.returncode == 1
        assert "error: Replica does not start: " in output
        assert "max_model_len" in output or "tokens" in output
        assert "logs of Serve: /" in output


def test_a_stop_lets_streams_finish_and_ends_those_that_do_not() -> None:
    """What comes meanwhile is refused; a stream that is short is whole, and a long one ends with an error event.

    docs/starting.md
    """
    with ExitStack() as ending:
        with START:
            instance = ending.enter_context(serving("--set", "shutdown_timeout_s=15"))
            instance.wait_for("Stop: Ctrl-C")
        short, long = Stream(instance.url, max_tokens=20), Stream(instance.url, max_tokens=2000)
        for stream in (short, long):
            stream.first()
        instance.process.send_signal(signal.SIGINT)
        instance.wait_for("stopping: answers under way have 15 s")
        eventually(lambda: httpx.get(f"{instance.url}/health", timeout=PATIENCE_S).json()["status"] == "stopping")
        refused = httpx.post(f"{instance.url}/v1/chat/completions", json=body(1), timeout=PATIENCE_S)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_stopping"
        assert refused.headers["retry-after"]
        assert short.events()[-1] == "[DONE]"
        (*_, error) = long.events()
        assert json.loads(error)["error"]["code"] == "server_stopping"
        output = instance.end()
        assert "1 answers were not whole after 15 s" in output
        assert output.endswith("stopped\n")
        assert instance.process.returncode == 0


def body(max_tokens: int) -> dict[str, Any]:
    """A streamed chat."""
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": "demo", "stream": True, "max_tokens": max_tokens, "ignore_eos": True, "messages": messages}


class Stream:
    """A streamed chat that a thread reads."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self._events: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(url, max_tokens), daemon=True).start()

    def first(self) -> str:
        """Return the next event."""
        event = self._events.get(timeout=PATIENCE_S)
        assert event is not None
        return event

    def events(self) -> list[str]:
        """Return the events to the end."""
        return list(iter(lambda: self._events.get(timeout=PATIENCE_S), None))

    def _read(self, url: str, max_tokens: int) -> None:
        try:
            with httpx.stream(
                "POST", f"{url}/v1/chat/completions", json=body(max_tokens), timeout=PATIENCE_S
            ) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self._events.put(line.removeprefix("data: "))
        finally:
            self._events.put(None)
