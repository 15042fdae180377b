"""vLLM's waiting requests. In a step in which tenants take turns only those chosen for it are there to be started."""

from collections import deque
from typing import Any

from vllm.v1.core.sched.request_queue import PriorityRequestQueue


class WaitingLine(PriorityRequestQueue):  # type: ignore[misc]
    """vLLM's own, by priority and arrival; ``chosen``: who may start in this step, in this order (None: anyone)."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: deque[Any] | None = None

    def in_order(self) -> list[Any]:
        """Return who waits, first come first."""
        return sorted(self._heap, key=lambda request: (request.priority, request.arrival_time))

    def peek_request(self) -> Any:
        """Return who is next."""
        return super().peek_request() if self.chosen is None else self.chosen[0]

    def pop_request(self) -> Any:
        """Take out who is next."""
        if self.chosen is None:
            return super().pop_request()
        request = self.chosen.popleft()
        self.remove_request(request)
        return request

    def __bool__(self) -> bool:
        return super().__bool__() if self.chosen is None else bool(self.chosen)
