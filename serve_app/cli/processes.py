"""The processes of an instance: all that descend from one, their end, and who holds a port.

Linux tells of them in /proc. Elsewhere only what Ray ends by itself is ended, and nobody is named.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

OWNER = "WARMPATH_SUPERVISOR"
"""Environment variable of everything an instance starts: the id of the process that a user started."""

_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36
_LISTENING = "0A"
END_WITHIN_S = 3.0


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that ``end_descendants`` finds them (Linux)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def forget_orphans(children: Container[int]) -> None:
    """Let the ids of adopted processes that have ended go; else each stays until this process ends.

    ``children``: ids of this process' own, whose end somebody else asks for.
    """
    with suppress(AttributeError, ChildProcessError):  # there is no such call elsewhere, or no child
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in children:  # it hides what ended after it until it is asked for
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def descendants(ancestor: int) -> set[int]:
    """Return the ids of the running processes that descend from one, itself left out."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    unseen = [ancestor]
    while unseen:
        for pid in children.get(unseen.pop(), ()):
            if pid not in found:
                found.add(pid)
                unseen.append(pid)
    return found


def end_descendants(ancestor: int, within_s: float = END_WITHIN_S) -> None:
    """Kill all that descends from a process, and what those start meanwhile; returns when there is none, or in time."""
    deadline_s = time.monotonic() + within_s
    while (running := descendants(ancestor)) and time.monotonic() < deadline_s:
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who listens on a port. ``supervisor``: the warmpath process to stop, where one of an instance's holds it."""

    pid: int
    name: str
    ours: bool
    supervisor: int | None


def port_holder(port: int) -> Holder | None:
    """Return who listens on a port of this machine; None where that cannot be seen: a process of another user."""
    inodes = {f"socket:[{inode}]" for inode in _listening(port)}
    for pid in _pids():
        with suppress(OSError):
            if any(str(link.readlink()) in inodes for link in (_PROC / str(pid) / "fd").iterdir()):
                return _holder(pid)
    return None


def _holder(pid: int) -> Holder:
    parents = _parents()
    line, owner = [pid], _owner(pid)
    while (parent := parents.get(line[-1], 0)) > 1:
        line.append(parent)
        owner = owner or _owner(parent)  # Ray's workers write their titles over their environment
    return Holder(pid, _name(pid), owner is not None, owner if owner in line else None)


def _owner(pid: int) -> int | None:
    with suppress(OSError):
        for variable in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
            name, _, value = variable.partition(b"=")
            if name == OWNER.encode() and value.isdigit():
                return int(value)
    return None


def _name(pid: int) -> str:
    with suppress(OSError):
        return (_PROC / str(pid) / "comm").read_text().strip()
    return "?"


def _pids() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def _parents() -> dict[int, int]:
    """Return each running process' parent; one that has ended and was not waited for is none."""
    found = {}
    for pid in _pids():
        with suppress(OSError):
            # pid (any name) state parent ...
            state, parent = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                found[pid] = int(parent)
    return found


def _listening(port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on a port."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]
