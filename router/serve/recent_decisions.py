"""Decisions that the ingress has not asked for yet, by request id. Bounded: the oldest is forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from router.protocol.request import Decision


class RecentDecisions:
    """The last decision of each of the newest ``max_requests`` requests. Any thread may call it."""

    def __init__(self, max_requests: int = 8192) -> None:
        self._max_requests = max_requests
        self._lock = Lock()
        self._decisions: OrderedDict[str, Decision] = OrderedDict()

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, request_id: str, decision: Decision) -> None:
        """Remember a request's decision, in the place of an earlier one."""
        with self._lock:
            self._decisions[request_id] = decision
            if len(self._decisions) > self._max_requests:
                self._decisions.popitem(last=False)

    def take(self, request_id: str) -> Decision | None:
        """Return a request's decision and forget it."""
        with self._lock:
            return self._decisions.pop(request_id, None)
