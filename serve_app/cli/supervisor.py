"""Runs an instance in a child process, to end it at any moment: Ray's calls block in C++ and ignore signals.

Their socket carries the launch and the order to stop; the child replies "serving" once it can stop in order.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

from serve_app.cli.processes import OWNER, adopt_orphans, end_descendants, forget_orphans

_OWN_LINE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), ControlType.SHOW_CURSOR)
"""Clears the line of the instance's spinner and restores the cursor."""


MAX_CONNECTIONS_PER_ADDRESS = 512
IDLE_TIMEOUT_S = 30
"""For a connection without a request, by default."""
GIVEN_UP = "stopping: the start is given up"


@dataclass(frozen=True, slots=True)
class Launch:
    """The arguments of an instance's process. ``settings``: as JSON. ``run_dir``: a directory of the same lifetime."""

    settings: dict[str, Any]
    host: str
    port: int
    haproxy: bool
    max_connections_per_address: int
    verbose: bool
    keep_alive_timeout_s: int = IDLE_TIMEOUT_S
    run_dir: str = ""
    log: str = ""

    @property
    def url(self) -> str:
        """The URL for clients on this machine: "every address" becomes the loopback, and IPv6 gets brackets."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


class Supervisor:
    """Runs one instance. ``stop_margin_s``: the time for replicas and Ray to end after ``shutdown_timeout_s``."""

    def __init__(self, console: Console, shutdown_timeout_s: float, stop_margin_s: float = 60.0) -> None:
        self._console = console
        self._shutdown_timeout_s = shutdown_timeout_s
        self._stop_margin_s = stop_margin_s

    def run(self, launch: Launch, command: list[str] | None = None) -> int:
        """Run the instance until all its processes have ended. ``command``: replaces the instance's program.

        Return the exit status: 0 after a stop, 1 failed, 128 + signal if it was cut short.
        """
        adopt_orphans()
        channel, theirs = socket.socketpair()
        with tempfile.NamedTemporaryFile(prefix="warmpath-serve-", suffix=".log", delete=False) as file:
            log = Path(file.name)
        with _noted_signals() as signals, channel, tempfile.TemporaryDirectory(prefix="warmpath-") as run_dir:
            process = subprocess.Popen(  # noqa: S603  # our own program
                command or [sys.executable, *path_flags(), "-c", "from serve_app.cli.instance import main; main()"],
                stdin=theirs.fileno(),
                env={**os.environ, OWNER: str(os.getpid())},
                start_new_session=True,  # a terminal's Ctrl-C reaches only this process
            )
            theirs.close()
            orphans = signal.signal(signal.SIGCHLD, lambda *_: forget_orphans((process.pid,)))
            try:
                _tell(channel, json.dumps(asdict(replace(launch, run_dir=run_dir, log=str(log)))))
                status = self._follow(process, channel, signals)
            finally:
                process.kill()
                process.wait()
                end_descendants(os.getpid())
                signal.signal(signal.SIGCHLD, orphans)
        if status == 1 and not launch.verbose:
            self._say(f"log: {log} (--verbose shows it here)")
        else:
            log.unlink(missing_ok=True)  # the system may have deleted it after weeks
        self._say("stopped")
        return status

    def _follow(self, process: subprocess.Popen[bytes], channel: socket.socket, signals: socket.socket) -> int:
        """Wait until the instance has ended or must be ended; return the exit status."""
        words, stopping = b"", False
        while True:
            patience_s = self._shutdown_timeout_s + self._stop_margin_s if stopping else None
            if not select.select([channel, signals], [], [], patience_s)[0]:
                self._say("it does not stop in time: ending it", error=True)
                return 1
            # Read these before any signal: its sender may have read that the instance serves.
            while (part := _received(channel)) is not None:
                if not part:
                    return 0 if stopping else self._ended(process.wait())
                words += part
            for number in _received(signals) or b"":
                if number == signal.SIGCHLD:
                    continue
                if stopping or b"serving" not in words:
                    self._say("stopping at once" if stopping else GIVEN_UP)
                    return 128 + number
                stopping = True
                self._say(
                    f"stopping: answers under way have {self._shutdown_timeout_s:g} s; Ctrl-C again ends them now"
                )
                _tell(channel, "stop")

    def _ended(self, status: int) -> int:
        if status != 1:
            self._say("error: the instance ended without a word", error=True)
        return 1

    def _say(self, text: str, *, error: bool = False) -> None:
        self._console.control(_OWN_LINE)
        self._console.print(text, style="red" if error else None, markup=False, emoji=False, soft_wrap=True)


@contextmanager
def giving_up(console: Console) -> Iterator[None]:
    """End this process at a signal as ``Supervisor.run`` does during a start; what runs here is interrupted."""

    def interrupt(number: int, _: object) -> None:
        raise KeyboardInterrupt(number)  # a half-made model is removed

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt as error:
        console.print(f"{GIVEN_UP}\nstopped")
        sys.exit(128 + error.args[0])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _noted_signals() -> Iterator[socket.socket]:
    """Yield a socket that gets each signal's number as a byte; meanwhile SIGINT and SIGTERM do nothing else."""
    heard, noted = socket.socketpair()
    noted.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    wakeup = signal.set_wakeup_fd(noted.fileno())
    try:
        yield heard
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        heard.close()
        noted.close()


def _received(source: socket.socket) -> bytes | None:
    """Return the received bytes, b"" at the end, None if there are none."""
    try:
        return source.recv(4096, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except ConnectionError:  # it was killed before it read all our data
        return b""


def path_flags() -> list[str]:
    """Return Python's flags that keep a child process from importing modules from its current directory."""
    return [] if "" in sys.path else ["-P"]


def _tell(channel: socket.socket, line: str) -> None:
    with suppress(OSError):  # the process has ended, which the reader notices
        channel.sendall(f"{line}\n".encode())
