"""The processes of an instance: a process's descendants, ending them, and the holder of a port."""

import ctypes
import os
import signal
import time
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass

import psutil

OWNER = "WARMPATH_SUPERVISOR"
"""Environment variable of an instance's processes: the id of the process that a user started."""

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that ``end_descendants`` finds them (Linux)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def forget_orphans(children: Container[int]) -> None:
    """Reap adopted processes that have ended. ``children``: this process' own, which are waited for elsewhere."""
    with suppress(AttributeError, ChildProcessError):  # not on Linux, or no child
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in children:  # it hides later ones until it is reaped
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def runs(process: psutil.Process) -> bool:
    """Return whether a process is running; a zombie is not."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    return False


def descendants(ancestor: int) -> set[int]:
    """Return the ids of a process's running descendants, without itself."""
    with suppress(psutil.NoSuchProcess):
        return {process.pid for process in psutil.Process(ancestor).children(recursive=True) if runs(process)}
    return set()


def end_descendants(ancestor: int, within_s: float = 3.0) -> None:
    """Kill a process's descendants, including new ones; return when there are none, or after ``within_s``."""
    deadline_s = time.monotonic() + within_s
    while (running := descendants(ancestor)) and time.monotonic() < deadline_s:
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Holder:
    """A process. ``ours``: an instance started it; ``supervisor``: the process to stop, if it is an ancestor."""

    pid: int
    name: str
    ours: bool
    supervisor: int | None


def port_holder(port: int) -> Holder | None:
    """Return the process that listens on a port of this machine; None if it is invisible, as another user's."""
    with suppress(psutil.Error):
        for socket in psutil.net_connections(kind="tcp"):
            if socket.status == psutil.CONN_LISTEN and socket.laddr.port == port and socket.pid is not None:
                process = psutil.Process(socket.pid)
                line = [process, *process.parents()]
                # Use the nearest readable one: Ray's workers write their titles over their environment.
                owner = next(filter(None, map(_owner, line)), None)
                supervisor = owner if owner in {ancestor.pid for ancestor in line} else None
                return Holder(process.pid, process.name(), owner is not None, supervisor)
    return None


def _owner(process: psutil.Process) -> int | None:
    with suppress(psutil.Error):
        value = process.environ().get(OWNER, "")
        return int(value) if value.isdigit() else None
    return None
