"""Decisions that the ingress has not fetched yet, by request id. Beyond the limit, the oldest is dropped."""

from collections import OrderedDict
from threading import Lock

from router.protocol.request import Decision

_MAX_REQUESTS = 8192


class RecentDecisions:
    """The last decision of each recent request, also for callers that leave early. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._decisions: OrderedDict[str, Decision] = OrderedDict()
        self._left: OrderedDict[str, None] = OrderedDict()

    def add(self, request_id: str, decision: Decision) -> bool:
        """Store a request's decision in place of an earlier one. Return False if the caller has already left."""
        with self._lock:
            if request_id in self._left:
                del self._left[request_id]
                return False
            self._decisions[request_id] = decision
            if len(self._decisions) > _MAX_REQUESTS:
                self._decisions.popitem(last=False)
            return True

    def leave(self, request_id: str) -> Decision | None:
        """Remove and return a leaving caller's decision. Without one, a later ``add`` will be refused."""
        with self._lock:
            decision = self._decisions.pop(request_id, None)
            if decision is None:
                self._left[request_id] = None
                if len(self._left) > _MAX_REQUESTS:
                    self._left.popitem(last=False)
            return decision

    def take(self, request_id: str) -> Decision | None:
        """Return a request's decision and forget it."""
        with self._lock:
            return self._decisions.pop(request_id, None)
