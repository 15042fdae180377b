"""Requests between their submission and their end: until when each may live, and how many wait, by tenant.

Not thread-safe: the loop's condition guards it.
"""

from __future__ import annotations

import math

from serve_app.engine.protocol import Clock, QueueFull
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import EngineSettings
from serve_app.fairness.shares import Budget, Shares


class LiveRequests:
    """Live requests by id. ``waiting``: those that were not admitted yet, by the rule of ``Budget``."""

    def __init__(self, settings: EngineSettings, clock: Clock) -> None:
        self.waiting = Budget(Shares(settings.tenant_shares, clock), lambda: settings.max_waiting_requests)
        self.next_deadline_s = math.inf
        self._deadlines_s: dict[str, float] = {}

    def check(self, request_id: str, tenant: str, retry_after_s: float) -> None:
        """Raise ValueError for an id in use, QueueFull where the line is full for a tenant."""
        if request_id in self._deadlines_s:
            raise ValueError(f"request id {request_id!r} is in use")
        self.waiting.shares.touch(tenant)
        if self.waiting.verdict(tenant, 1) != "granted":
            raise QueueFull(f"{self.waiting.used} requests are waiting", retry_after_s)

    def add(self, sequence: SequenceState) -> None:
        """Take in a request that was checked."""
        self._deadlines_s[sequence.request.request_id] = sequence.deadline_s
        self.next_deadline_s = min(self.next_deadline_s, sequence.deadline_s)
        self.waiting.take(sequence.request.tenant, 1)

    def take_overdue(self, now_s: float) -> list[str]:
        """Return the ids of live requests whose time is over. All are looked at only when one of them may be."""
        if now_s < self.next_deadline_s:
            return []
        deadlines = self._deadlines_s
        self.next_deadline_s = min((end_s for end_s in deadlines.values() if end_s > now_s), default=math.inf)
        return [request_id for request_id, end_s in deadlines.items() if end_s <= now_s]

    def admitted(self, sequence: SequenceState) -> None:
        """Note that a waiting sequence was admitted, or ended before that."""
        self.waiting.give_back(sequence.request.tenant, 1)

    def remove(self, sequence: SequenceState) -> None:
        """Note that a sequence is live no more."""
        del self._deadlines_s[sequence.request.request_id]
        if sequence.scheduled_s is None:
            self.admitted(sequence)
