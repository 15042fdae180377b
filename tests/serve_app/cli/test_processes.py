"""Processes of an instance are found by descent, ended together, and named if they hold a port."""

import os
import socket
import subprocess
import sys

import psutil
import pytest

from serve_app.cli import processes
from serve_app.cli.processes import OWNER, Holder, descendants, end_descendants, port_holder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")


def test_a_stranger_is_no_descendant() -> None:
    assert not {os.getpid(), os.getppid()} & descendants(os.getpid())


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
    monkeypatch.setattr(processes, "descendants", lambda _: {2**22 + 1})
    end_descendants(os.getpid(), within_s=0.1)
