"""What the router decided and reserved for one call to a replica, until its first token or whatever ends it."""

from __future__ import annotations

from router.core import RoutingCore
from router.protocol.events import LoadReport
from router.protocol.request import Decision, RoutedRequest
from router.serve.recent_decisions import RecentDecisions


class Reservation:
    """Ending it again is harmless. ``decision``: what the router decided, once it has ended; None if it did not."""

    def __init__(self, core: RoutingCore, decisions: RecentDecisions, route: RoutedRequest) -> None:
        self._core = core
        self._decisions = decisions
        self._route = route
        self._ended = False
        self.decision: Decision | None = None

    @property
    def replica_id(self) -> str:
        """The replica the router chose, "" when it chose none."""
        return self.decision.replica_id if self.decision is not None else ""

    def delivered(self, cached_tokens: int, ttft_s: float) -> None:
        """The first token came: count what was reused, and end the reservation."""
        if not self._ended:
            self.end()
            if self.decision is not None:
                route = self._route
                self._core.record_delivered(
                    self.decision, cached_tokens, ttft_s, route.block_hashes, stored=route.store_kv
                )

    def rerouted(self, load: LoadReport) -> None:
        """The replica has more to do than was known: learn it, and free what was reserved there."""
        if self._take() and self.decision is not None:
            self._core.rerouted(self.decision, load)

    def leave(self) -> None:
        """Whoever asked is gone: free what was reserved, and have nothing sent that was not."""
        if self._take(leaves=True) and self.decision is not None:
            self._core.release(self.decision)

    def end(self) -> None:
        """Free what was reserved."""
        if self._take() and self.decision is not None:
            self._core.release(self.decision)

    def _take(self, *, leaves: bool = False) -> bool:
        """Take the decision; False when it was taken before."""
        if self._ended:
            return False
        self._ended = True
        take = self._decisions.leave if leaves else self._decisions.take
        self.decision = take(self._route.request_id)
        return True
