"""Ray's start is tried again where its node was too slow, and nothing else is."""

from __future__ import annotations

import subprocess
import sys

import pytest

_START = """
import io, subprocess, sys
import ray
from serve_app.cli.instance import Reporter, _start_ray
from serve_app.cli.processes import descendants, end_descendants
from serve_app.config.app import AppConfig
import os

tries = []

def init(**options):
    if tries:
        assert not descendants(os.getpid()), "the first try's processes run on"
    tries.append(options)
    if len(tries) == 1:
        subprocess.Popen(["sleep", "600"])
        raise Exception(sys.argv[1])
    return type("Context", (), {"address_info": {"session_dir": "/session"}})

ray.init = init
ray.cluster_resources = dict
said = io.StringIO()
try:
    logs = _start_ray(AppConfig(model="demo"), False, Reporter(said))
finally:
    end_descendants(os.getpid())
assert tries[0] == tries[1]
print(logs, "once more" in said.getvalue())
"""


def start(message: str) -> subprocess.CompletedProcess[str]:
    """Start Ray where its first try fails with a message."""
    return subprocess.run([sys.executable, "-c", _START, message], capture_output=True, text=True, timeout=120)


def test_a_node_that_was_too_slow_is_started_again() -> None:
    done = start("The current node timed out during startup. This could happen because")
    assert done.stdout.strip() == "/session/logs/serve True", done.stderr


@pytest.mark.parametrize("message", ["no such address", "port 6379 is taken"])
def test_other_failures_are_told_at_once(message: str) -> None:
    done = start(message)
    assert done.returncode == 1
    assert message in done.stderr
    assert "once more" not in done.stdout
