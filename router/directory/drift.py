"""Comparisons of the directory with the digests that replicas report, and the times to ask for a snapshot.

Both sides update their digests incrementally, so a comparison's cost does not depend on the cache. Callers pass time.
"""

import logging
from collections import Counter

from router.directory.directory import Directory, DriftKind
from router.protocol.events import CacheDigest

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 10.0
LAST_PAUSE_S = 600.0


class DriftChecks:
    """Comparisons of one router since its start. ``differences``: their number by replica and kind."""

    def __init__(self) -> None:
        self.checks = 0
        self.differences: dict[str, Counter[DriftKind]] = {}
        self._next_s: dict[str, tuple[float, float]] = {}

    def compare(self, directory: Directory, replica_id: str, digest: CacheDigest, now_s: float) -> bool:
        """Compare, and return whether to ask for a snapshot now. While digests differ, the pauses double."""
        self.checks += 1
        kind = directory.drift(replica_id, digest)
        next_s, pause_s = self._next_s.get(replica_id, (now_s, FIRST_PAUSE_S))
        if kind is None:
            if now_s >= next_s:
                self._next_s.pop(replica_id, None)
            return False
        self.differences.setdefault(replica_id, Counter())[kind] += 1
        if now_s < next_s:
            return False
        self._next_s[replica_id] = (now_s + pause_s, min(2 * pause_s, LAST_PAUSE_S))
        logger.warning("the directory disagrees with the cache of %s (%s): asking for a snapshot", replica_id, kind)
        return True

    def forget(self, replica_id: str) -> None:
        """Forget a removed replica. Unknown ids are ignored."""
        self.differences.pop(replica_id, None)
        self._next_s.pop(replica_id, None)
