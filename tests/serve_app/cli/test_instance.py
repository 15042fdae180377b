"""A start of Ray that was too slow is tried again; of a start that failed, the sentence that says why is told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from serve_app.cli.instance import failure, innermost

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


REPLICA = """A replica failed to start with exception. Retrying 5 more time(s). Error:
RuntimeError: Traceback (most recent call last):
  File "/ray/serve/_private/replica.py", line 1900, in initialize
OSError: [Errno 2] no such thing

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/serve_app/replica/replica.py", line 80, in __init__
serve_app.engine.protocol.AdapterError: the adapter 'a': layer 1 has rank 8, over max_lora_rank 4
"""


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (REPLICA, "the adapter 'a': layer 1 has rank 8, over max_lora_rank 4"),
        ("Traceback ...\nValueError: disk_cache_bytes needs disk_cache_dir\n", "disk_cache_bytes needs disk_cache_dir"),
        ("Traceback ...\ntorch.OutOfMemoryError: 2 GiB\n", "torch.OutOfMemoryError: 2 GiB"),
        ("MemoryError: all: gone\nsome more\n", "MemoryError: all: gone"),
        ("  nothing that looks like one  ", "nothing that looks like one"),
    ],
)
def test_the_innermost_sentence(message: str, sentence: str) -> None:
    """Warmpath's own stand alone; others keep their kind."""
    assert innermost(message) == sentence


def test_the_first_failure_of_a_constructor_is_enough() -> None:
    """Serve would try again; and an application that gave up says so whatever its deployments do."""
    assert failure("DEPLOYING", {"Ingress": "", "Replica": ""}, "") is None
    assert failure("DEPLOYING", {"Ingress": "waits for resources"}, "") is None
    why = failure("DEPLOYING", {"Ingress": "", "Replica": REPLICA}, "")
    assert why == "Replica does not start: the adapter 'a': layer 1 has rank 8, over max_lora_rank 4"
    assert failure("DEPLOY_FAILED", {"Replica": "the actor died"}, "failed") == "the actor died"
    assert failure("DEPLOY_FAILED", {"Replica": ""}, "failed") == "failed"
