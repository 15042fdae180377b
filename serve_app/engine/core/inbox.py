"""What other threads ask of the engine's loop: requests, cancellations, calls; and who is live or waits.

Owns the condition that guards all of it, and the bound of the waiting line. Any thread puts in; the loop takes out
between two steps.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from serve_app.engine.protocol import EngineError, QueueFull
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import EngineSettings
from serve_app.fairness.shares import UNBORROWED_PART

T = TypeVar("T")

Call = Callable[[], None]


class Inbox:
    """Everything asked for since the last step. ``changed`` is held by whoever calls a method or reads a field."""

    def __init__(self, settings: EngineSettings) -> None:
        self.changed = threading.Condition()
        self.tenants = len(settings.tenant_shares)
        """How many tenants there can be."""
        self.arrivals: dict[str, SequenceState] = {}
        self.stopping = False
        self.closed = False
        self._settings = settings
        self._cancels: list[str] = []
        self._calls: list[Call] = []
        self._live: dict[str, float] = {}
        self.next_deadline_s = math.inf
        self._waiting: Counter[str] = Counter()

    @property
    def waiting_count(self) -> int:
        """Live requests that were not admitted yet."""
        return self._waiting.total()

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
        if self.waiting_count >= self._most_waiting(tenant):
            raise QueueFull(f"{self.waiting_count} requests are waiting", retry_after_s)

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
        self._waiting[sequence.request.tenant] += 1

    def take_overdue(self, now_s: float) -> list[str]:
        """Return the ids of live requests whose time is over. All are looked at only when one of them may be."""
        if now_s < self.next_deadline_s:
            return []
        self.next_deadline_s = min((end_s for end_s in self._live.values() if end_s > now_s), default=math.inf)
        return [request_id for request_id, end_s in self._live.items() if end_s <= now_s]

    def stop_waiting(self, sequence: SequenceState) -> None:
        """Note that a waiting sequence was admitted, or ended before that."""
        tenant = sequence.request.tenant
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def remove_live(self, sequence: SequenceState) -> None:
        """Note that a sequence is live no more."""
        self._live.pop(sequence.request.request_id, None)
        if sequence.scheduled_s is None:
            self.stop_waiting(sequence)

    def _most_waiting(self, tenant: str) -> int:
        """Return the length of the waiting line beyond which a tenant is refused.

        Among several tenants the last eighth is for those that do not fill more than their part of the line.
        """
        most = self._settings.max_waiting_requests
        others = sum(1 for other in self._waiting if other != tenant)
        if self.tenants > 1 and self._waiting[tenant] >= max(1, most // (others + 2)):
            return most - most // UNBORROWED_PART
        return most


def deferred(work: Callable[[], T]) -> tuple[Call, Future[T]]:
    """Return ``work`` as a call that raises nothing, and the future that gets what it returns or raises."""
    answer: Future[T] = Future()

    def call() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    return call, answer
