"""Whether a waiting sequence may start, and a running one grow beyond its reservation: slots, blocks, shares.

Owns the blocks reserved for running sequences, in all and by tenant. A tenant within its share, or with nothing
running, may start whatever fits. One beyond its share borrows: it must leave the idle blocks within others' shares, and
an eighth of slots and blocks, so that a newcomer finds room at once.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.settings import EngineSettings
from serve_app.fairness.shares import UNBORROWED_PART

Verdict = Literal["admitted", "parked", "no_room", "over_share"]


class Admission:
    """Reservations of blocks for running sequences, and the rule for new ones."""

    def __init__(self, settings: EngineSettings, cache: PrefixCache) -> None:
        self._slots = settings.max_num_seqs
        self._cache = cache
        self._running: Counter[str] = Counter()
        self._reserved: Counter[str] = Counter()
        self.reserved_blocks = 0

    def verdict(self, tenant: str, needed: int, idle_hits: int) -> Verdict:
        """Say whether ``needed`` blocks besides its hits, ``idle_hits`` of them idle now, can be reserved."""
        cache = self._cache
        room = cache.available_blocks - idle_hits - self.reserved_blocks
        running = self._running[tenant]
        fraction = cache.quota.fraction(tenant) if running else 1.0
        if fraction < 1.0:
            total = cache.pool.total_blocks
            in_use = cache.quota.in_use(tenant) + self._reserved[tenant]
            if running + 1 > max(1.0, fraction * self._slots) or in_use + needed > fraction * total:
                slots_left = self._slots - self._running.total() - 1
                blocks_left = room - needed - cache.quota.protected(tenant)
                may = slots_left >= max(1, self._slots // UNBORROWED_PART) and blocks_left >= total // UNBORROWED_PART
                return "admitted" if may else "over_share"
        return "admitted" if needed <= room else "no_room"

    def growth_room(self, tenant: str) -> int:
        """Return how many blocks a running sequence of ``tenant`` may take beyond its reservation."""
        cache = self._cache
        room = cache.available_blocks - self.reserved_blocks
        if self._running[tenant] > 1:
            total, in_use = cache.pool.total_blocks, cache.quota.in_use(tenant) + self._reserved[tenant]
            fraction = cache.quota.fraction(tenant)
            if fraction < 1.0 and in_use + 1 > fraction * total:
                room -= cache.quota.protected(tenant) + total // UNBORROWED_PART
        return room

    def started(self, tenant: str, reserved: int) -> None:
        """Note a sequence that starts with this many blocks reserved."""
        self._running[tenant] += 1
        self._reserve(tenant, reserved)

    def taken(self, tenant: str, blocks: int) -> None:
        """Note reserved blocks that were allocated."""
        self._reserve(tenant, -blocks)

    def ended(self, tenant: str, reserved: int) -> None:
        """Note a sequence that ended, with what was reserved for it and not taken."""
        self._reserve(tenant, -reserved)
        self._running[tenant] -= 1
        if not self._running[tenant]:
            # Nothing runs, so nothing is reserved: the tables stay as small as the running set.
            del self._running[tenant], self._reserved[tenant]

    def _reserve(self, tenant: str, blocks: int) -> None:
        self._reserved[tenant] += blocks
        self.reserved_blocks += blocks
