"""Router reservations at one engine, as reported in its load reports. Not thread-safe."""

from collections import OrderedDict

from router.protocol.request import Decision

ROUTERS_REMEMBERED = 256
"""Number of routers with a remembered reservation; the one silent for longest is dropped first."""


class RouterReservations:
    """The last reservation of each router that has arrived here."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = OrderedDict()

    def arrived(self, decision: Decision | None) -> None:
        """Note the arrival of a request that a router decided on; None: no router did."""
        if decision is None:
            return
        router_id = decision.router_id
        self._last[router_id] = max(self._last.get(router_id, 0), decision.reservation)
        self._last.move_to_end(router_id)
        if len(self._last) > ROUTERS_REMEMBERED:
            self._last.popitem(last=False)

    def admitted(self) -> dict[str, int]:
        """Return each router's last reservation."""
        return dict(self._last)


def retry_after_s(queued_tokens: int, prefill_tokens_per_s: float) -> float:
    """Return when a refused request might fit: the time to compute half of the queue."""
    return max(0.1, queued_tokens / prefill_tokens_per_s / 2) if prefill_tokens_per_s > 0.0 else 1.0
