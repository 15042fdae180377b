"""The routers that decide beside this one: how many there are, and which replicas to leave to them.

Load reports say who was active lately. A router does not see what its peers sent since the last reports, and equal
views make equal choices: a burst over eight routers would go to the same few replicas. So while a router has requests
of its own that no report contains yet, it prefers every n-th replica in the order of their names. Time is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from router.protocol.events import RouterShare

ACTIVE_S = 30.0
_WEIGHT = 0.05
_LEAST_UNSEEN = 0.02


class PeerRouters:
    """One router's knowledge of the others."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.unseen = 0.0
        """Own requests in no report yet, at a decision, smoothed over about twenty."""
        self.active = 1
        """Routers that sent something to a replica within ``ACTIVE_S``, this one among them."""
        self._last_of: dict[str, dict[str, int]] = {}
        self._active_at_s: dict[str, float] = {}
        self._looked_at_s = 0.0
        self._drawn: tuple[tuple[str, ...], npt.NDArray[np.float64] | None] | None = None

    def report(self, replica_id: str, shares: Iterable[RouterShare], now_s: float) -> None:
        """Take the routers of a replica's report: whose reservations went on, is active."""
        before = self._last_of.get(replica_id, {})
        last = {share.router_id: share.last_reservation for share in shares}
        self._last_of[replica_id] = last
        for name, number in last.items():
            if number > before.get(name, 0):
                if name not in self._active_at_s:
                    self._drawn = None
                self._active_at_s[name] = now_s
        if now_s - self._looked_at_s > 1.0:
            self._looked_at_s = now_s
            for name in [name for name, at_s in self._active_at_s.items() if now_s - at_s > ACTIVE_S]:
                del self._active_at_s[name]
                self._drawn = None
        self.active = len(self._active_at_s) + (self.router_id not in self._active_at_s)

    def forget(self, replica_id: str) -> None:
        """Forget a replica that left."""
        self._last_of.pop(replica_id, None)

    def decided(self, unreported: int) -> None:
        """Note a decision that was made while ``unreported`` own requests were in no report."""
        self.unseen += _WEIGHT * (unreported - self.unseen)

    def left_to_peers(self, replica_ids: Sequence[str]) -> npt.NDArray[np.float64] | None:
        """Return by row how much to leave a replica to others: 0 for this router's, else ``unseen``, 1 at most.

        None: nothing, since there are no others or everything is seen.
        """
        if len(self._active_at_s) < 2 or self.unseen < _LEAST_UNSEEN:
            return None
        names = tuple(replica_ids)
        if self._drawn is None or self._drawn[0] != names:
            self._drawn = names, self._draw(names)
        drawn = self._drawn[1]
        return None if drawn is None else drawn * min(self.unseen, 1.0)

    def _draw(self, names: tuple[str, ...]) -> npt.NDArray[np.float64] | None:
        routers = sorted(self._active_at_s.keys() | {self.router_id})
        parts = min(len(routers), len(names))
        if parts < 2:
            return None
        mine = routers.index(self.router_id) % parts
        place = {name: at for at, name in enumerate(sorted(names))}
        return np.array([float(place[name] % parts != mine) for name in names])
