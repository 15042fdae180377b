"""`python -m cluster.local`: what it says is true, and after Ctrl-C nothing of it runs."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.conftest import PATIENCE_S, START, eventually

pytestmark = pytest.mark.integration


def running(mark: str) -> set[int]:
    """The processes that have inherited a mark in their environment."""
    found = set()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environment.read_bytes():
                found.add(int(environment.parent.name))
        except OSError:  # it has ended
            continue
    return found


@pytest.fixture
def turn_to_start() -> Iterator[None]:
    """Nobody else starts an instance meanwhile."""
    with START:
        yield


@pytest.mark.usefixtures("turn_to_start")
def test_it_prints_where_it_answers_and_ctrl_c_leaves_no_process() -> None:
    mark = f"warmpath-{secrets.token_hex(16)}"
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.local", "--nodes", "2", "--replicas", "2"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "WARMPATH_TEST_MARK": mark},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("curl "):
                break
        url = said.split()[0]
        body = {"model": "demo", "prompt": "Hello", "max_tokens": 16}
        assert f"curl {url}/v1/completions" in said
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        shown = re.findall(r"node (\d+)  pid (\d+) +(\w+)", said)
        kinds = [kind for _, _, kind in shown]
        assert (kinds.count("raylet"), kinds.count("Replica"), kinds.count("Ingress")) == (2, 2, 1), said
        assert {node for node, _, kind in shown if kind == "Replica"} == {"0", "1"}
        # Every reload starts a new HAProxy, and the one before it ends when its last connection does.
        lasting = {int(pid) for _, pid, kind in shown if kind != "haproxy"}
        eventually(lambda: lasting <= running(mark))
        replica = next(pid for _, pid, kind in shown if kind == "Replica")
        assert "libtorch" not in Path(f"/proc/{replica}/maps").read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
        eventually(lambda: not running(mark))
    finally:
        process.kill()
        process.wait()
