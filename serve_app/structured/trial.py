"""Checks clients' grammars in processes of their own, each of which may be ended in the middle of its work.

llguidance bounds most of its work, but not all: some regular expressions and ranges take it hours, and some numbers
overflow its stack. What a process has checked, other processes compile with the same limits.
"""

from __future__ import annotations

import math
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import IO

import msgspec

from serve_app.fairness.work import check_wanted
from serve_app.structured.compiler import GrammarCompiler, GrammarError, Vocabulary, read_vocabulary
from serve_app.structured.grammar import Grammar

MAX_CPU_S = 3
"""CPU seconds of one check, beyond those in which a grammar's wrong part is searched for."""
MAX_WAIT_S = 120.0
"""Seconds that one check may take in all: on a busy machine its CPU time takes a while."""
MAX_MORE_BYTES = 2 << 30
"""Memory that a process may take beside its tokenizer."""
PROCESSES = 2
"""Checks at the same time, over all tenants; the first grammar starts the first process."""
IDLE_S = 600.0
"""A process without work ends after this time."""
_LOOK_S = 0.1

_TOO_MUCH = "it takes too much work: use fewer optional or repeated parts, and smaller numbers"


class _Reply(msgspec.Struct, array_like=True, frozen=True):
    """``form`` and ``left_out`` as of ``GrammarCompiler.checked``, or the ``error``."""

    form: str = ""
    left_out: tuple[str, ...] = ()
    error: str = ""


class _Setup(msgspec.Struct, array_like=True, frozen=True):
    vocabulary: Vocabulary
    end_token_ids: tuple[int, ...]
    max_cpu_s: int


_encode = msgspec.msgpack.encode


class GrammarTrials:
    """Checks grammars for one tokenizer (any thread)."""

    def __init__(
        self,
        path: Path,
        vocab_size: int,
        end_token_ids: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
        max_cpu_s: int = MAX_CPU_S,
    ) -> None:
        self._clock = clock
        self._lock = Lock()
        self._places = BoundedSemaphore(PROCESSES)
        self._idle: list[_Process] = []
        self._read_setup = cache(
            lambda: _encode(_Setup(read_vocabulary(path, vocab_size), tuple(end_token_ids), max_cpu_s))
        )

    def checked(self, grammar: Grammar) -> tuple[str, tuple[str, ...]]:
        """Do as ``GrammarCompiler.checked``. Raises GrammarError, and AbandonedError once the caller has left."""
        while not self._places.acquire(timeout=_LOOK_S):
            check_wanted()
        try:
            reply = self._ask(_encode(grammar))
        finally:
            self._places.release()
        if reply.error:
            raise GrammarError(reply.error)
        return reply.form, reply.left_out

    def idle_pids(self) -> list[int]:
        """Return the ids of the processes that have no work now and take the next grammars, by which an operator
        finds them among all: they are in sessions of their own.
        """
        with self._lock:
            return [process.pid for process in self._idle]

    def close(self) -> None:
        """End the processes that have no work."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _ask(self, grammar: bytes) -> _Reply:
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                process = _Process(self._setup())
            try:
                reply = process.ask(grammar, self._clock)
            except BaseException:
                process.kill()
                raise
            if reply is not None:
                with self._lock:
                    self._idle.append(process)
                return reply
            code = process.end()
            if code < 0:  # a signal, for its time, its memory, or its stack
                return _Reply(error=_TOO_MUCH)
            if code > 0:
                raise RuntimeError(f"the process that checks grammars ended with code {code}")
            # It had been idle for too long.

    def _setup(self) -> bytes:
        with self._lock:
            return self._read_setup()


class _Process:
    """A process that checks one grammar after the other. ``setup``: its first message."""

    def __init__(self, setup: bytes) -> None:
        command = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
        self._popen = subprocess.Popen(  # noqa: S603  # nothing of a client's is in the command
            [sys.executable, "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the server, which ends this one
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._in, self._out = self._popen.stdin, self._popen.stdout
        self._unsent = setup

    @property
    def pid(self) -> int:
        return self._popen.pid

    def ask(self, grammar: bytes, clock: Callable[[], float]) -> _Reply | None:
        """Return the answer, None if the process ended before it. Raises GrammarError, AbandonedError."""
        until_s = clock() + MAX_WAIT_S
        try:
            if self._unsent:
                _write(self._in, self._unsent)
                self._unsent = b""
            _write(self._in, grammar)
        except BrokenPipeError:
            return None
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        while not poll.poll(_LOOK_S * 1000):
            check_wanted()
            if clock() > until_s:
                raise GrammarError(_TOO_MUCH)
        raw = _read(self._out.fileno())
        return msgspec.msgpack.decode(raw, type=_Reply) if raw else None

    def end(self) -> int:
        """Let the process end, which it does once it has no input; return its exit code."""
        self._close_input()
        try:
            self._popen.wait(MAX_WAIT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
        self._out.close()
        return self._popen.wait()

    def kill(self) -> None:
        """End the process in the middle of its work."""
        self._popen.kill()
        self._close_input()
        self._out.close()
        self._popen.wait()

    def _close_input(self) -> None:
        with suppress(BrokenPipeError):
            self._in.close()


def _write(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(4, "little") + message)
    stream.flush()


def _read(descriptor: int) -> bytes:
    """Return the next message, b"" at the end. Nothing is read ahead, so that ``select`` tells of the next one."""
    size = _exactly(descriptor, 4)
    return _exactly(descriptor, int.from_bytes(size, "little")) if size else b""


def _exactly(descriptor: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(descriptor, size - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)


def main() -> None:
    """Answer each grammar on standard input until there is none for a while, or the server has ended."""
    requests, replies = 0, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write to it
    setup = msgspec.msgpack.decode(_read(requests), type=_Setup)
    compiler = GrammarCompiler(Path(), 0, setup.end_token_ids, vocabulary=setup.vocabulary)
    compiler.compile('start: "a"')
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MAX_MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    decode = msgspec.msgpack.Decoder(Grammar).decode
    while select.select([requests], [], [], IDLE_S)[0] and (raw := _read(requests)):
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + setup.max_cpu_s, hard))
        try:
            reply = _Reply(*compiler.checked(decode(raw)))
        except GrammarError as error:
            reply = _Reply(error=str(error))
        except MemoryError:
            reply = _Reply(error=_TOO_MUCH)
        _write(replies, _encode(reply))


@cache
def trials_of(path: Path, vocab_size: int, end_token_ids: tuple[int, ...]) -> GrammarTrials:
    """Return the checks for a tokenizer, the same for everybody in this process."""
    return GrammarTrials(path, vocab_size, end_token_ids)
