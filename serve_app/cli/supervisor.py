"""Runs an instance in a process of its own, and ends it at any moment: what a user started, and what signals reach.

Ray's calls wait in C++ and heed no signal, and its processes print what helps nobody: here neither can. The instance's
progress comes as events over a pipe; its other output goes to a log. Knows nothing of Ray or models.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from rich.console import Console

from serve_app.cli.processes import OWNER, adopt_orphans, end_descendants, forget_orphans

STOP_MARGIN_S = 60.0
"""For the end of replicas and of Ray, beside the time that answers have."""

CLEAN_UP_S = 1.0

_ENTRY = "from serve_app.cli.instance import main; main()"


@dataclass(frozen=True, slots=True)
class Launch:
    """All that an instance's process is told.

    ``settings``: as ``AppConfig.to_json`` gives them; ``run_dir``: a directory that is gone when the instance is;
    ``log``: a file for what helps nobody at a terminal.
    """

    settings: dict[str, Any]
    host: str
    port: int
    haproxy: bool
    max_connections_per_address: int
    verbose: bool
    run_dir: str = ""
    log: str = ""

    def to_line(self) -> bytes:
        """Return it as one line."""
        return json.dumps(asdict(self)).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Event:
    """What an instance says. ``kind``: begun (may be interrupted), doing, done, serving, failed, refused (at once)."""

    kind: str
    text: str


class Supervisor:
    """One instance from start to end.

    ``shutdown_timeout_s``: the time that answers have when it is stopped; ``stop_margin_s``: and all the rest of it.
    """

    def __init__(self, console: Console, shutdown_timeout_s: float, stop_margin_s: float = STOP_MARGIN_S) -> None:
        self._console = console
        self._shutdown_timeout_s = shutdown_timeout_s
        self._stop_margin_s = stop_margin_s
        self._inbox: SimpleQueue[Event | signal.Signals | None] = SimpleQueue()

    def run(self, launch: Launch, command: list[str] | None = None) -> int:
        """Start it and return when nothing of it is left: the status to leave with.

        0 after a stop, 1 where it failed, 2 where it was refused before anything started, 128 and the signal's number
        where it was stopped before it served, or at once. ``command``: another program than the instance's own.
        """
        adopt_orphans()
        with self._signals(), _log() as log, tempfile.TemporaryDirectory(prefix="warmpath-") as run_dir:
            process = subprocess.Popen(  # noqa: S603  # our own program
                command or [sys.executable, *path_flags(), "-c", _ENTRY],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, OWNER: str(os.getpid())},
                start_new_session=True,  # a terminal's Ctrl-C is for this process alone
            )
            orphans = signal.signal(signal.SIGCHLD, lambda *_: forget_orphans((process.pid,)))
            try:
                assert process.stdin is not None and process.stdout is not None
                threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()
                _write(process.stdin, replace(launch, run_dir=run_dir, log=log.name).to_line())
                status = self._follow(process, process.stdin)
            finally:
                process.kill()
                process.wait()
                end_descendants(os.getpid())
                signal.signal(signal.SIGCHLD, orphans)
                self._console.show_cursor()  # a bar of the instance's may have hidden it
            if status == 1 and not launch.verbose:
                self._say(f"log: {log.name} (--verbose shows it here)")
            else:
                Path(log.name).unlink(missing_ok=True)
        if status != 2:
            self._say("stopped")
        return status

    def _follow(self, process: subprocess.Popen[bytes], orders: IO[bytes]) -> int:
        """Show what the instance says until it has ended, or must be ended; return the status to leave with."""
        begun, serving, failed, stopping = False, False, 0, False
        spinner = self._console.status("")
        try:
            while True:
                try:
                    said = self._inbox.get(timeout=self._shutdown_timeout_s + self._stop_margin_s if stopping else None)
                except Empty:
                    self._say("it does not stop in time: ending it", error=True)
                    return 1
                if said is None:
                    return 0 if stopping else failed or self._lost()
                if isinstance(said, signal.Signals):
                    if stopping or not serving:
                        self._say("stopping at once" if stopping else "stopping: the start is given up")
                        if begun and not stopping:
                            _interrupt(process)
                        return 128 + said
                    stopping = True
                    self._say(
                        f"stopping: answers under way have {self._shutdown_timeout_s:g} s; Ctrl-C again ends them now"
                    )
                    spinner.update("stopping")
                    spinner.start()
                    _write(orders, b"stop\n")
                elif said.kind == "begun":
                    begun = True
                elif said.kind == "doing":
                    spinner.update(said.text)
                    spinner.start()
                elif said.kind == "serving":
                    serving = True
                    spinner.stop()
                    print(said.text, flush=True)
                elif said.kind in ("failed", "refused"):
                    failed = 2 if said.kind == "refused" else 1
                    self._say(f"error: {said.text}", error=True)
                else:
                    self._say(said.text)

        finally:
            spinner.stop()

    def _lost(self) -> int:
        self._say("error: the instance ended without a word", error=True)
        return 1

    def _say(self, text: str, *, error: bool = False) -> None:
        self._console.print(text, style="red" if error else None, markup=False, soft_wrap=True)

    def _read(self, events: IO[bytes]) -> None:
        for line in events:
            with suppress(ValueError, TypeError):
                self._inbox.put(Event(*json.loads(line)))
        self._inbox.put(None)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def note(number: int, _: object) -> None:
            self._inbox.put(signal.Signals(number))

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _log() -> Iterator[IO[bytes]]:
    with tempfile.NamedTemporaryFile(prefix="warmpath-serve-", suffix=".log", delete=False) as log:
        yield log


def path_flags() -> list[str]:
    """Return what makes the other process find modules where this one does: not in any directory it is started in."""
    return [] if "" in sys.path else ["-P"]


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Give a start a moment to remove what it has half made: a model in the cache."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(CLEAN_UP_S)


def _write(pipe: IO[bytes], line: bytes) -> None:
    with suppress(BrokenPipeError):  # it has ended; that is seen where it is read
        pipe.write(line)
        pipe.flush()
