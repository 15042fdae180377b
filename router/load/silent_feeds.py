"""Which replicas' feeds tell nothing any more, though the replicas may go on: a network that is cut in two.

A replica reports its load at least once a second. Whose feed told nothing for longer, and does not answer for a
snapshot either, is silent: what it told is old, and what it is still known to hold is what its own answers show. What
comes another way, as with a request that is sent back, is not its feed's. Time is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

SILENT_S = 5.0
"""Five reports that did not come."""

_LOOK_S = 0.5


class SilentFeeds:
    """The silent replicas of one router."""

    def __init__(self) -> None:
        self._heard_s: dict[str, float] = {}
        self._silent: set[str] = set()
        self._looked_s = 0.0

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._silent

    def heard(self, replica_id: str, now_s: float) -> None:
        """Something came from a replica's feed."""
        self._heard_s[replica_id] = now_s
        self._silent.discard(replica_id)

    def forget(self, replica_id: str) -> None:
        """Forget a replica that is gone; unknown ids are ignored."""
        self._heard_s.pop(replica_id, None)
        self._silent.discard(replica_id)

    def fallen_silent(self, is_live: Callable[[str], bool], now_s: float) -> Iterator[str]:
        """Yield the replicas that are silent since the last look; looks twice a second at most."""
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        for replica_id, heard_s in self._heard_s.items():
            if now_s - heard_s >= SILENT_S and replica_id not in self._silent and not is_live(replica_id):
                self._silent.add(replica_id)
                yield replica_id
