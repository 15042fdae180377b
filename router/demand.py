"""How much work each prefix brings, as a decayed rate in seconds of prefill per second.

Owns a bounded table by block hash, which stands for all blocks up to it. Knows nothing of replicas. Time is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp


class PrefixDemand:
    """Rates by key over about the last ``memory_s``; of ``max_keys``, the one unheard of for longest goes first."""

    def __init__(self, memory_s: float = 5.0, max_keys: int = 16_384) -> None:
        self._memory_s = memory_s
        self._max_keys = max_keys
        self._rates: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rates)

    def add(self, key: bytes, work_s: float, now_s: float) -> float:
        """Count work and return the key's rate with it: a steady load of u seconds a second tends to u."""
        rate = self.rate_with(key, work_s, now_s)
        self._rates[key] = (rate, now_s)
        self._rates.move_to_end(key)
        if len(self._rates) > self._max_keys:
            self._rates.popitem(last=False)
        return rate

    def rate_with(self, key: bytes, work_s: float, now_s: float) -> float:
        """Return what ``add`` would, and count nothing."""
        return self.rate(key, now_s) + work_s / self._memory_s

    def rate(self, key: bytes, now_s: float) -> float:
        """Return a key's rate now; 0.0 when it is unknown."""
        rate, then_s = self._rates.get(key, (0.0, now_s))
        return rate * exp(min(then_s - now_s, 0.0) / self._memory_s)
