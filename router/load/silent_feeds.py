"""Which replicas' feeds tell nothing any more, though the replicas may go on: a network that is cut in two.

A replica reports its load at least once a second. Who does not, and whose feed does not answer for a snapshot either,
is silent: what it told is old, and what it is still known to hold is what its own answers show. Time is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from router.load.load_table import LoadTable

SILENT_S = 5.0
"""Five reports that did not come."""

_LOOK_S = 0.5


class SilentFeeds:
    """The silent replicas of one router."""

    def __init__(self) -> None:
        self._silent: set[str] = set()
        self._looked_s = 0.0

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._silent

    def heard(self, replica_id: str) -> None:
        """Something came from a replica's feed, or the replica is gone."""
        self._silent.discard(replica_id)

    def fallen_silent(self, loads: LoadTable, is_live: Callable[[str], bool], now_s: float) -> Iterator[str]:
        """Yield the replicas that are silent since the last look; looks twice a second at most."""
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        for replica_id, replica in loads.replicas.items():
            told = replica.report is not None and now_s - replica.reported_at_s >= SILENT_S
            if told and replica_id not in self._silent and not is_live(replica_id):
                self._silent.add(replica_id)
                yield replica_id
