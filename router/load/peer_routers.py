"""How many routers decide beside this one: load reports say who was active lately. Time is passed in."""

from __future__ import annotations

from collections.abc import Mapping

ACTIVE_S = 30.0


class PeerRouters:
    """One router's knowledge of the others."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.active = 1
        """Routers that sent something to a replica within ``ACTIVE_S``, this one among them."""
        self._admitted: dict[str, Mapping[str, int]] = {}
        self._active_at_s: dict[str, float] = {}
        self._looked_at_s = 0.0

    def report(self, replica_id: str, admitted: Mapping[str, int], now_s: float) -> None:
        """Take a replica's report: a router with a higher reservation number than before is active."""
        before = self._admitted.get(replica_id, {})
        self._admitted[replica_id] = admitted
        for name, number in admitted.items():
            if number > before.get(name, 0):
                self._active_at_s[name] = now_s
        if now_s - self._looked_at_s > 1.0:
            self._looked_at_s = now_s
            for name in [name for name, at_s in self._active_at_s.items() if now_s - at_s > ACTIVE_S]:
                del self._active_at_s[name]
        self.active = len(self._active_at_s) + (self.router_id not in self._active_at_s)

    def forget(self, replica_id: str) -> None:
        """Forget a replica that left."""
        self._admitted.pop(replica_id, None)
