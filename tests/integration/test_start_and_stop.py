"""Interrupted and failing starts, and a stop beside streams, on real Ray Serve (simulated engine).

None of them leaves a process or a taken port behind, and the terminal shows our words, none of Ray's.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serve_app.cli.local_ray import held_port
from serve_app.cli.processes import descendants
from tests.integration.conftest import HTTP, PATIENCE_S, START, cache_state, eventually, metric

pytestmark = [pytest.mark.integration, pytest.mark.long]

CHAT = "/v1/chat/completions"
SIMULATED = "--model demo --engine simulated --replicas 1 --set simulated_decode_step_s=0.1".split()
SECRET = {"WARMPATH_SECRET": "a secret of the test's own"}
NO_PROXY = "http://127.0.0.1:9"
"""Many companies set one; nothing listens here, and no part of an instance may use it."""
RAYS_WORDS = ("raylet", "GCS", "ray.kill", "Traceback", "rpc_client")


class Serving:
    """``warmpath serve`` in its own process, as a terminal sees it."""

    def __init__(self, port: int, *arguments: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.output = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "serve_app.cli.entry", "serve", "--port", str(port), *SIMULATED, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "http_proxy": NO_PROXY, "HTTP_PROXY": NO_PROXY, **SECRET},
            start_new_session=True,
        )

    def wait_for(self, word: str) -> None:
        """Read lines until one contains a word."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if word in line:
                return
        raise AssertionError(f"it never said {word!r}:\n{self.output}")

    def end(self) -> str:
        """Return the whole output, once the process has ended; it may leave nothing behind."""
        family = descendants(self.process.pid)
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        self.process.wait(PATIENCE_S)
        eventually(lambda: not family & descendants(1) and not any(map(psutil.pid_exists, family)))
        with pytest.raises(httpx.ConnectError):
            HTTP.get(self.url)
        assert not [word for word in RAYS_WORDS if word in self.output], self.output
        return self.output


@contextmanager
def serving(*arguments: str) -> Iterator[Serving]:
    with held_port() as port:
        made = Serving(port, *arguments)
        try:
            yield made
        finally:
            made.process.kill()
            made.process.wait()


@contextmanager
def serving_once_started(*arguments: str) -> Iterator[Serving]:
    with ExitStack() as ending:
        with START:
            instance = ending.enter_context(serving(*arguments))
            instance.wait_for("Stop: Ctrl-C")
        yield instance


@pytest.mark.parametrize(
    ("word", "number"),
    [("", signal.SIGTERM), ("[1/4]", signal.SIGINT), ("[2/4]", signal.SIGTERM), ("[3/4]", signal.SIGINT)],
)
def test_a_start_ends_at_any_moment(word: str, number: signal.Signals) -> None:
    """A signal before Ray starts, during its start, during the replicas' or before the greeting ends all processes.

    If the instance serves before it handles the last of these signals, that is an ordinary stop.

    docs: failures
    """
    with START, serving() as instance:
        if word:
            instance.wait_for(word)
        else:
            eventually(lambda: bool(descendants(instance.process.pid)))
        instance.process.send_signal(number)
        output = instance.end()
        assert output.endswith("stopped\n")
        given_up = "stopping: the start is given up\n" in output
        assert given_up or word == "[3/4]"
        assert instance.process.returncode == (128 + number if given_up else 0)


def test_a_failure_in_a_replica_is_reported() -> None:
    """The output has the innermost message and the logs' folder, but no traceback. (docs: failures)"""
    with START, serving("--set", "max_model_len=3") as instance:
        output = instance.end()
        assert instance.process.returncode == 1
        assert "error: Replica does not start: " in output
        assert "max_model_len" in output or "tokens" in output
        assert "logs of Serve: /" in output


def test_a_stop_lets_streams_finish_and_the_next_life_has_the_disk_tier(tmp_path: Path) -> None:
    """New requests are refused meanwhile; a short stream is whole, and a long one ends with an error event.

    The pool is too small for two prompts: evicted blocks are on disk, and with the same secret they are found again.

    docs: failures, caching
    """
    settings = {"shutdown_timeout_s": 15, "num_blocks": 96, "tier_load_ratio": 1000, "disk_cache_bytes": 100000000}
    flags = [f"--set={name}={value}" for name, value in settings.items()] + [f"--set=disk_cache_dir={tmp_path}"]

    def prompts(url: str) -> dict[str, tuple[int, str]]:
        """Return the number of cached tokens and the answer for each of three prompts."""
        answers = {}
        for words in ("Some words. ", "Other words! ", "Third words? "):
            answer = HTTP.post(url + CHAT, json={**body(4, words * 120), "stream": False}).raise_for_status().json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            answers[words] = cached, answer["choices"][0]["message"]["content"]
        return answers

    with ExitStack() as ending:
        instance = ending.enter_context(serving_once_started(*flags))
        first = prompts(instance.url)
        assert {cached for cached, _ in first.values()} == {0}
        short, long = (events(ending, instance.url, max_tokens) for max_tokens in (20, 1000))
        assert next(short) and next(long)
        instance.process.send_signal(signal.SIGINT)
        instance.wait_for("stopping: answers under way have 15 s")
        eventually(lambda: HTTP.get(f"{instance.url}/health").json()["status"] == "stopping")
        refused = HTTP.post(instance.url + CHAT, json=body(1))
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_stopping"
        assert refused.headers["retry-after"]
        assert [*short][-1] == "[DONE]"
        (*_, error) = long
        assert json.loads(error)["error"]["code"] == "server_stopping"
        output = instance.end()
        assert "1 answers were not whole after 15 s" in output
        assert output.endswith("stopped\n")
        assert instance.process.returncode == 0
    assert list(tmp_path.glob("slot-0/*.kv"))
    with serving_once_started(*flags) as instance:
        for words, (cached, text) in prompts(instance.url).items():
            assert cached > 100, words
            assert text == first[words][1]
        eventually(lambda: metric(instance.url, "warmpath_kv_tier_hits_total") > 0)
        # The router knows the blocks found on disk and those stored and evicted since.
        checks = metric(instance.url, "warmpath_directory_checks_total")
        eventually(lambda: metric(instance.url, "warmpath_directory_checks_total") > checks)
        (replica,) = cache_state(instance.url)["replicas"]
        assert replica["blocks"]["disk"] > 0 and replica["drift"] == {}
        assert metric(instance.url, "warmpath_feed_mirror_drift_total") == 0
        instance.process.send_signal(signal.SIGTERM)
        assert instance.end().endswith("stopped\n")


def body(max_tokens: int, text: str = "Hello") -> dict[str, Any]:
    """Return a streamed chat's body."""
    messages = [{"role": "user", "content": text}]
    fields = {"model": "demo", "stream": True, "ignore_eos": True, "seed": 1}
    return {**fields, "max_tokens": max_tokens, "messages": messages}


def events(ending: ExitStack, url: str, max_tokens: int) -> Iterator[str]:
    """Return the events of a streamed chat, which nobody reads meanwhile."""
    answer = ending.enter_context(HTTP.stream("POST", url + CHAT, json=body(max_tokens)))
    return (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
