"""What other threads ask of the engine's loop: requests, cancellations, calls; and who is live or waits.

Owns the condition that guards all of it. Any thread puts in; the loop takes out between two steps.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from serve_app.engine.protocol import Clock, EngineError, QueueFull
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import EngineSettings
from serve_app.fairness.shares import Budget, Shares

Call = Callable[[], None]


class Inbox:
    """Everything asked for since the last step. ``changed`` is held by whoever calls a method or reads a field."""

    def __init__(self, settings: EngineSettings, clock: Clock) -> None:
        self.changed = threading.Condition()
        self.waiting = Budget(Shares(settings.tenant_shares, clock), lambda: settings.max_waiting_requests)
        """Live requests that were not admitted yet, by tenant."""
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
        """Raise EngineError once stopping, ValueError for an id in use, QueueFull where the line is full for a tenant.

        The line is shared by the rule of ``Budget``.
        """
        if self.stopping:
            raise EngineError("the engine is stopped")
        if request_id in self._live:
            raise ValueError(f"request id {request_id!r} is in use")
        self.waiting.shares.touch(tenant)
        if self.waiting.verdict(tenant, 1) != "granted":
            raise QueueFull(f"{self.waiting.used} requests are waiting", retry_after_s)

    def put(self, sequence: SequenceState) -> None:
        """Take in a request that was checked, and wake the loop."""
        request_id = sequence.request.request_id
        self.arrivals[request_id] = sequence
        self._live[request_id] = sequence.deadline_s
        self.next_deadline_s = min(self.next_deadline_s, sequence.deadline_s)
        self.waiting.take(sequence.request.tenant, 1)
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

    def take(self) -> tuple[list[SequenceState], list[str], list[Call]]:
        """Return the requests, the ids to cancel and the calls since the last call."""
        taken = list(self.arrivals.values()), self._cancels, self._calls
        self.arrivals, self._cancels, self._calls = {}, [], []
        return taken

    def take_overdue(self, now_s: float) -> list[str]:
        """Return the ids of live requests whose time is over. All are looked at only when one of them may be."""
        if now_s < self.next_deadline_s:
            return []
        self.next_deadline_s = min((end_s for end_s in self._live.values() if end_s > now_s), default=math.inf)
        return [request_id for request_id, end_s in self._live.items() if end_s <= now_s]

    def stop_waiting(self, sequence: SequenceState) -> None:
        """Note that a waiting sequence was admitted, or ended before that."""
        self.waiting.give_back(sequence.request.tenant, 1)

    def remove_live(self, sequence: SequenceState) -> None:
        """Note that a sequence is live no more."""
        del self._live[sequence.request.request_id]
        if sequence.scheduled_s is None:
            self.stop_waiting(sequence)
