"""A start of Ray that was too slow is tried again; of a start that failed, the sentence that says why is told.

Processes of an instance are found by descent, ended whole, and named where they hold a port.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import psutil
import pytest

from serve_app.cli import processes
from serve_app.cli.instance import failure, innermost
from serve_app.cli.processes import OWNER, Holder, descendants, end_descendants, port_holder

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")

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


_FAMILY = """
import os, subprocess, sys, time
from serve_app.cli.processes import adopt_orphans, descendants, end_descendants
adopt_orphans()
# A child, its child in a session of its own, and one whose parent is gone.
subprocess.Popen(["sh", "-c", "setsid sleep 600 & sleep 600"])
subprocess.run(["sh", "-c", "setsid sleep 600 </dev/null >/dev/null 2>&1 &"])
while len(descendants(os.getpid())) < 4:
    time.sleep(0.01)
end_descendants(os.getpid())
print(len(descendants(os.getpid())))
"""


@on_linux
def test_everything_that_descends_ends() -> None:
    """Also what has a session of its own, and what its parent left behind."""
    done = subprocess.run([sys.executable, "-c", _FAMILY], capture_output=True, text=True)
    assert done.stdout.strip() == "0", done.stderr


def test_a_stranger_is_no_descendant() -> None:
    """The parent of this process is none, nor is this process itself."""
    assert not {os.getpid(), os.getppid()} & descendants(os.getpid())


@on_linux
@pytest.mark.parametrize("alive", [True, False])
def test_the_supervisor_to_stop_is_named_while_it_lives(alive: bool) -> None:
    """A process that an instance left behind has its mark, and no supervisor above it; others have none."""
    listening = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"
    supervisor = os.getpid() if alive else 2**22 + 1
    child = subprocess.Popen(
        [sys.executable, "-c", f"{listening}; time.sleep(600)"],
        env={**os.environ, OWNER: str(supervisor)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        holder = port_holder(int(child.stdout.readline()))
        assert holder is not None
        assert (holder.pid, holder.ours) == (child.pid, True)
        assert holder.supervisor == (os.getpid() if alive else None)
    finally:
        child.kill()
        child.wait()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port_holder(port) == Holder(os.getpid(), psutil.Process().name(), ours=False, supervisor=None)
    assert port_holder(port) is None


def test_an_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be killed is not waited for without end."""
    monkeypatch.setattr(processes, "descendants", lambda _: {2**22 + 1})
    end_descendants(os.getpid(), within_s=0.1)
