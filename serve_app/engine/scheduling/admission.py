"""Whether a waiting sequence may start, and a running one take more than it was promised: slots, blocks, shares.

Owns what is promised to running sequences, in all and by tenant. Knows nothing of order or of tokens. A tenant
within its share, or with nothing running, may start whatever fits. One beyond its share borrows: it must leave
the idle blocks within others' shares, and an eighth of slots and blocks, so that a newcomer finds room at once.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.settings import EngineSettings

Verdict = Literal["admitted", "parked", "no_room", "over_share"]

RESERVE = 8
"""One part in this many of slots and blocks is never borrowed."""


class Admission:
    """Promises of blocks to running sequences, and the rule for new ones."""

    def __init__(self, settings: EngineSettings, cache: PrefixCache) -> None:
        self._slots = settings.max_num_seqs
        self._cache = cache
        self._running: Counter[str] = Counter()
        self._promised: Counter[str] = Counter()
        self.promised_blocks = 0

    def verdict(self, tenant: str, needed: int, idle_hits: int) -> Verdict:
        """Say whether ``needed`` blocks besides its hits, ``idle_hits`` of them idle now, can be promised."""
        cache = self._cache
        room = cache.available_blocks - idle_hits - self.promised_blocks
        running = self._running[tenant]
        fraction = cache.quota.fraction(tenant) if running else 1.0
        if fraction < 1.0:
            total = cache.pool.total_blocks
            in_use = cache.quota.in_use(tenant) + self._promised[tenant]
            if running + 1 > max(1.0, fraction * self._slots) or in_use + needed > fraction * total:
                slots_left = self._slots - self._running.total() - 1
                blocks_left = room - needed - cache.quota.protected(tenant)
                may = slots_left >= max(1, self._slots // RESERVE) and blocks_left >= total // RESERVE
                return "admitted" if may else "over_share"
        return "admitted" if needed <= room else "no_room"

    def growth_room(self, tenant: str) -> int:
        """Return how many blocks a running sequence of ``tenant`` may take beyond what it was promised."""
        cache = self._cache
        room = cache.available_blocks - self.promised_blocks
        if self._running[tenant] > 1:
            total, in_use = cache.pool.total_blocks, cache.quota.in_use(tenant) + self._promised[tenant]
            fraction = cache.quota.fraction(tenant)
            if fraction < 1.0 and in_use + 1 > fraction * total:
                room -= cache.quota.protected(tenant) + total // RESERVE
        return room

    def started(self, tenant: str, promised: int) -> None:
        """Note a sequence that starts with a promise of blocks."""
        self._running[tenant] += 1
        self._promise(tenant, promised)

    def taken(self, tenant: str, blocks: int) -> None:
        """Note promised blocks that were allocated."""
        self._promise(tenant, -blocks)

    def ended(self, tenant: str, promised: int) -> None:
        """Note a sequence that is over, with what was promised to it and not taken."""
        self._promise(tenant, -promised)
        self._running[tenant] -= 1
        if not self._running[tenant]:
            # Nothing runs, so nothing is promised: the tables stay as small as the running set.
            del self._running[tenant], self._promised[tenant]

    def _promise(self, tenant: str, blocks: int) -> None:
        self._promised[tenant] += blocks
        self.promised_blocks += blocks
