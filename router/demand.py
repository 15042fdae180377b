"""How much work each prefix brings, as a decayed rate in seconds of prefill per second.

Owns a bounded table by block hash, which stands for all blocks up to it. Knows nothing of replicas. Time is passed in.
Rates are kept as if nothing had decayed since ``_origin_s``: then one exponential serves all keys of a request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import exp

_LONGEST_MEMORIES = 200.0
_NOTHING = 1e-9


class PrefixDemand:
    """Rates by key over about the last ``memory_s``; of ``max_keys``, the one unheard of for longest goes first."""

    def __init__(self, memory_s: float = 5.0, max_keys: int = 16_384) -> None:
        self._memory_s = memory_s
        self._max_keys = max_keys
        self._origin_s = 0.0
        self._grown: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._grown)

    def add(self, keys: Sequence[bytes], work_s: float, now_s: float) -> list[float]:
        """Count work for each key and return their rates with it: a steady load of u seconds a second tends to u."""
        growth = self._growth(now_s)
        more, grown = growth * work_s / self._memory_s, self._grown
        rates = []
        for key in keys:
            grown[key] = sum_with = grown.get(key, 0.0) + more
            grown.move_to_end(key)
            rates.append(sum_with / growth)
        while len(grown) > self._max_keys:
            grown.popitem(last=False)
        return rates

    def rates_with(self, keys: Sequence[bytes], work_s: float, now_s: float) -> list[float]:
        """Return what ``add`` would, and count nothing."""
        growth = self._growth(now_s)
        return [self._grown.get(key, 0.0) / growth + work_s / self._memory_s for key in keys]

    def _growth(self, now_s: float) -> float:
        """Return by how much a rate of ``_origin_s`` is overstated now; moves the origin before numbers get huge."""
        memories = max(now_s - self._origin_s, 0.0) / self._memory_s
        if memories < _LONGEST_MEMORIES:
            return exp(memories)
        left = exp(-memories)
        self._grown = OrderedDict((key, sum_ * left) for key, sum_ in self._grown.items() if sum_ * left > _NOTHING)
        self._origin_s = now_s
        return 1.0
