"""Ray's start is tried again where its node was too slow, and nothing else is."""

from __future__ import annotations

import subprocess
import sys

import pytest

_START = """
import io, subprocess, sys
import ray
from rich.console import Console
from serve_app.cli.instance import _start_ray
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
    logs = _start_ray(AppConfig(model="demo"), False, Console(file=said))
finally:
    end_descendants(os.getpid())
assert tries[0] == tries[1]
print(logs, "once more" in said.getvalue())
"""


@pytest.mark.parametrize(
    ("message", "again"),
    [
        ("The current node timed out during startup. This could happen because", True),
        ("no such address", False),
        ("port 6379 is taken", False),
    ],
)
def test_only_a_node_that_was_too_slow_is_started_again(message: str, again: bool) -> None:
    done = subprocess.run([sys.executable, "-c", _START, message], capture_output=True, text=True)
    assert done.stdout.strip() == ("/session/logs/serve True" if again else ""), done.stderr
    assert (message in done.stderr) == (not again)
