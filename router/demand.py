"""How much work each prefix brings, as a decayed rate in seconds of prefill per second.

Owns a bounded table by block hash, which stands for all blocks up to it. Knows nothing of replicas. Time is passed in.
Rates are kept as if nothing had decayed since ``_origin_s``: then one exponential serves all keys of a request.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp

_LONGEST_MEMORIES = 200.0
_NOTHING = 1e-9


class PrefixDemand:
    """Rates by key over about the last ``memory_s``; of ``max_keys``, the one unheard of for longest goes first."""

    def __init__(self, memory_s: float = 5.0, max_keys: int = 16_384) -> None:
        self._memory_s = memory_s
        self._max_keys = max_keys
        self._origin_s = self._now_s = 0.0
        self._growth = 1.0
        self._grown: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._grown)

    def add(self, key: bytes, work_s: float, now_s: float) -> float:
        """Count work and return the key's rate with it: a steady load of u seconds a second tends to u."""
        growth = self._growth if now_s == self._now_s else self._grow(now_s)
        grown = self._grown
        grown[key] = sum_with = grown.get(key, 0.0) + growth * work_s / self._memory_s
        grown.move_to_end(key)
        if len(grown) > self._max_keys:
            grown.popitem(last=False)
        return sum_with / growth

    def rate_with(self, key: bytes, work_s: float, now_s: float) -> float:
        """Return what ``add`` would, and count nothing."""
        return self.rate(key, now_s) + work_s / self._memory_s

    def rate(self, key: bytes, now_s: float) -> float:
        """Return a key's rate now; 0.0 when it is unknown."""
        return self._grown.get(key, 0.0) / self._grow(now_s)

    def _grow(self, now_s: float) -> float:
        """Work out by how much a rate of ``_origin_s`` is overstated now; the origin moves before numbers get huge."""
        memories = max(now_s - self._origin_s, 0.0) / self._memory_s
        if memories >= _LONGEST_MEMORIES:
            left = exp(-memories)
            self._grown = OrderedDict((key, sum_ * left) for key, sum_ in self._grown.items() if sum_ * left > _NOTHING)
            self._origin_s, memories = now_s, 0.0
        self._now_s, self._growth = now_s, exp(memories)
        return self._growth
