"""The engine's thread, the work that other threads give it, and their shared condition. Knows no requests."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from serve_app.engine.protocol import Clock, EngineError

T = TypeVar("T")
Command = Callable[[], None]


class EngineLoop:
    """One thread, from ``start`` to ``stop``. ``calls``: work posted since the last step, in order.

    ``run``: the thread's function, until ``stopping``. ``deliver``: sends the outputs of a call if no thread runs.
    """

    def __init__(
        self, run: Callable[[], None], deliver: Callable[[], None], clock: Clock, stall_after_s: float
    ) -> None:
        self.changed = threading.Condition()
        self.calls: list[Command] = []
        self.stopping = False
        self._closed = False
        self._run = run
        self._deliver = deliver
        self._clock = clock
        self._stall_after_s = stall_after_s
        self._thread: threading.Thread | None = None
        self._step_started_s: float | None = None

    def start(self) -> None:
        """Start the thread. Raises EngineError if it was started before."""
        if self._thread is not None:
            raise EngineError("the engine was started before")
        self._thread = threading.Thread(target=self._run, name="warmpath-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after its current step, and wait for it."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        if self._thread is None:
            self._run()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def healthy(self) -> bool:
        """Return whether the thread is alive and its current step is not stalled."""
        if self._thread is None or not self._thread.is_alive() or self.stopping:
            return False
        started = self._step_started_s
        return started is None or self._clock() - started < self._stall_after_s

    def post(self, call: Command) -> None:
        """Run ``call``, which must not raise, between two steps (any thread)."""
        with self.changed:
            self.calls.append(call)
            self.changed.notify_all()

    def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` between two steps and return its result; run it at once if no thread runs."""
        answer: Future[T] = Future()

        def call() -> None:
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)

        with self.changed:
            if self._thread is None or self._closed or self._thread is threading.current_thread():
                call()
                self._deliver()
            else:
                self.post(call)
        return answer.result()

    def run_calls(self, *, last: bool = False) -> None:
        """Run the posted calls (the loop's thread); ``last``: later calls run at once."""
        with self.changed:
            calls, self.calls = self.calls, []
            self._closed = last
        for call in calls:
            call()

    def wake(self) -> None:
        """Make an idle loop check its conditions again (any thread)."""
        with self.changed:
            self.changed.notify_all()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time the enclosed step."""
        self._step_started_s = self._clock()
        yield
        self._step_started_s = None
