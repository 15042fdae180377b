"""The engine's thread: it takes in what was asked for, steps, and ends everything when it ends.

Owns the thread and how it is doing. Work that any thread hands it is run between two steps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from serve_app.engine.core.inbox import Inbox
from serve_app.engine.protocol import Clock, EngineError
from serve_app.engine.settings import STALL_AFTER_S

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Stepper(Protocol):
    """What the loop drives."""

    def take_in(self) -> bool:
        """Wait for work and take it in; False once there is to be no further step."""

    def step(self) -> None:
        """Run one step, if there is something to compute."""

    def deliver(self) -> object:
        """Send what is ready."""

    def fail_all(self, reason: str) -> None:
        """End everything that is under way, because of ``reason``."""


class EngineLoop:
    """One thread, from ``start`` to ``stop``."""

    def __init__(self, inbox: Inbox, stepper: Stepper, clock: Clock, stall_after_s: float = STALL_AFTER_S) -> None:
        self._inbox = inbox
        self._stepper = stepper
        self._clock = clock
        self._stall_after_s = stall_after_s
        self._thread: threading.Thread | None = None
        self._step_started_s: float | None = None

    def start(self) -> None:
        """Start the thread. Raises EngineError when it was started before."""
        if self._thread is not None:
            raise EngineError("the engine was started before")
        self._thread = threading.Thread(target=self._run, name="warmpath-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after its current step, and wait for it."""
        with self._inbox.changed:
            self._inbox.stop()
        if self._thread is None:
            self._stepper.fail_all("the engine was stopped")
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def healthy(self) -> bool:
        """Return whether the thread is alive and its current step has not run for too long."""
        if self._thread is None or not self._thread.is_alive() or self._inbox.stopping:
            return False
        started = self._step_started_s
        return started is None or self._clock() - started < self._stall_after_s

    def call(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, run between two steps; at once where no thread runs."""
        answer: Future[T] = Future()

        def call() -> None:
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)

        with self._inbox.changed:
            if self._thread is None or self._inbox.closed or self._thread is threading.current_thread():
                call()
                self._stepper.deliver()
            else:
                self._inbox.put_call(call)
        return answer.result()

    def _run(self) -> None:
        reason = "the engine was stopped"
        try:
            while self._stepper.take_in():
                self._step_started_s = self._clock()
                self._stepper.step()
                self._step_started_s = None
        except Exception:
            _log.exception("the engine loop died")
            reason = "the engine failed"
        self._stepper.fail_all(reason)
