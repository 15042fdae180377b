"""What other threads ask of the engine's loop: requests, cancellations, calls; and who is live or waits.

Owns the condition that guards all of it. Any thread puts in; the loop takes out
between two steps.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from serve_app.engine.protocol import EngineError
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import EngineSettings
from serve_app.engine.waiting import WaitingByTenant

T = TypeVar("T")

Call = Callable[[], None]


class Inbox:
    """Everything asked for since the last step. ``changed`` is held by whoever calls a method or reads a field."""

    def __init__(self, settings: EngineSettings) -> None:
        self.changed = threading.Condition()
        self.waiting = WaitingByTenant(settings.max_waiting_requests, len(settings.tenant_shares))
        """Live requests that were not admitted yet."""
        self.arrivals: dict[str, SequenceState] = {}
        self.stopping = False
        self.closed = False
        self._cancels: list[str] = []
        self._calls: list[Call] = []
        self._live: dict[str, float] = {}
        self.next_deadline_s = math.inf

    @property
    def has_news(self) -> bool:
        """Whether the loop has something to take out."""
        return bool(self.stopping or self.arrivals or self._cancels or self._calls)

    def check(self, request_id: str, tenant: str, retry_after_s: float) -> None:
        """Raise EngineError once stopping, ValueError for an id in use, QueueFull for a full line."""
        if self.stopping:
            raise EngineError("the engine is stopped")
        if request_id in self._live:
            raise ValueError(f"request id {request_id!r} is in use")
        self.waiting.check(tenant, retry_after_s)

    def put(self, sequence: SequenceState) -> None:
        """Take in a request that was checked, and wake the loop."""
        self.arrivals[sequence.request.request_id] = sequence
        self.add_live(sequence)
        self.changed.notify_all()

    def put_cancel(self, request_id: str) -> None:
        """Ask for a request's end; unknown ids are ignored."""
        if request_id in self._live:
            self._cancels.append(request_id)
            self.changed.notify_all()

    def put_call(self, call: Call) -> None:
        """Ask for a call between two steps."""
        self._calls.append(call)
        self.changed.notify_all()

    def stop(self) -> None:
        """Ask the loop to end."""
        self.stopping = True
        self.changed.notify_all()

    def wake(self) -> None:
        """Let an idle loop look again. Takes the condition itself."""
        with self.changed:
            self.changed.notify_all()

    def take_arrivals(self) -> list[SequenceState]:
        """Return the requests since the last call."""
        taken, self.arrivals = self.arrivals, {}
        return list(taken.values())

    def take_cancels(self) -> list[str]:
        """Return the ids to cancel since the last call."""
        taken, self._cancels = self._cancels, []
        return taken

    def take_calls(self) -> list[Call]:
        """Return the calls since the last call."""
        taken, self._calls = self._calls, []
        return taken

    def add_live(self, sequence: SequenceState) -> None:
        """Note a live sequence that waits."""
        self._live[sequence.request.request_id] = sequence.deadline_s
        self.next_deadline_s = min(self.next_deadline_s, sequence.deadline_s)
        self.waiting.add(sequence.request.tenant)

    def take_overdue(self, now_s: float) -> list[str]:
        """Return the ids of live requests whose time is over. All are looked at only when one of them may be."""
        if now_s < self.next_deadline_s:
            return []
        self.next_deadline_s = min((end_s for end_s in self._live.values() if end_s > now_s), default=math.inf)
        return [request_id for request_id, end_s in self._live.items() if end_s <= now_s]

    def stop_waiting(self, sequence: SequenceState) -> None:
        """Note that a waiting sequence was admitted, or ended before that."""
        self.waiting.remove(sequence.request.tenant)

    def remove_live(self, sequence: SequenceState) -> None:
        """Note that a sequence is live no more."""
        self._live.pop(sequence.request.request_id, None)
        if sequence.scheduled_s is None:
            self.stop_waiting(sequence)


def deferred(work: Callable[[], T]) -> tuple[Call, Future[T]]:
    """Return ``work`` as a call that raises nothing, and the future that gets what it returns or raises."""
    answer: Future[T] = Future()

    def call() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    return call, answer
