"""vLLM's waiting requests. While tenants take turns in a step, it offers only the requests chosen for the step."""

import heapq
from collections import deque
from typing import Any

from vllm.v1.core.sched.request_queue import PriorityRequestQueue

from serve_app.engine.vllm.scheduling.tenant import order_of, tenant_of


class FairRequestQueue(PriorityRequestQueue):  # type: ignore[misc]
    """vLLM's queue by priority and arrival; ``chosen``: requests that may start now, in order (None: any)."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: deque[Any] | None = None

    def make_way(self, request: Any) -> None:
        """Give an arriving request the turn (arrival time) of its tenant's first later one, and so on."""
        tenant, order = tenant_of(request), order_of(request)
        others = (other for other in self._heap if tenant_of(other) == tenant and not other.num_preemptions)
        later = [other for other in others if other.priority >= 0 and order_of(other) > order]
        for other in sorted(later, key=lambda other: other.arrival_time, reverse=True):
            other.arrival_time, request.arrival_time = request.arrival_time, other.arrival_time
        if later:
            heapq.heapify(self._heap)

    def tenants(self) -> set[str]:
        """Return the tenants of the waiting requests."""
        return set(map(tenant_of, self._heap))

    def in_order(self) -> list[Any]:
        """Return the waiting requests in order."""
        return sorted(self._heap, key=lambda request: (request.priority, request.arrival_time))

    def peek_request(self) -> Any:
        """Return the next request."""
        return super().peek_request() if self.chosen is None else self.chosen[0]

    def pop_request(self) -> Any:
        """Remove and return the next request."""
        if self.chosen is None:
            return super().pop_request()
        request = self.chosen.popleft()
        self.remove_request(request)
        return request

    def __bool__(self) -> bool:
        return super().__bool__() if self.chosen is None else bool(self.chosen)
