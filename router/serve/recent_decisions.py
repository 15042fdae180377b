"""Decisions that the ingress has not asked for yet, by request id. Bounded: the oldest is forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from router.protocol.request import Decision

_MAX_REQUESTS = 8192


class RecentDecisions:
    """The last decision of each of the newest ``_MAX_REQUESTS`` requests. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._decisions: OrderedDict[str, Decision] = OrderedDict()

    def add(self, request_id: str, decision: Decision) -> None:
        """Remember a request's decision, in the place of an earlier one."""
        with self._lock:
            self._decisions[request_id] = decision
            if len(self._decisions) > _MAX_REQUESTS:
                self._decisions.popitem(last=False)

    def take(self, request_id: str) -> Decision | None:
        """Return a request's decision and forget it."""
        with self._lock:
            return self._decisions.pop(request_id, None)
