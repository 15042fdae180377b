"""The rule to load KV: bytes / measured bandwidth <= ratio * tokens / prefill rate. Not thread-safe."""

import math
from collections.abc import Mapping

_EXPECTED_WEIGHT_S = 0.05
_MEMORY_S = 1.0
_FORGET = 0.99


class LoadRule:
    """Bandwidth by tier over about the last second of loading, with an expected initial value in bytes per second."""

    def __init__(self, ratio: float, expected_bytes_per_s: Mapping[str, float]) -> None:
        self.ratio = ratio
        self._expected = {tier: rate * _EXPECTED_WEIGHT_S for tier, rate in expected_bytes_per_s.items()}
        self._bytes = dict(self._expected)
        self._seconds = dict.fromkeys(expected_bytes_per_s, _EXPECTED_WEIGHT_S)

    def bytes_per_s(self, tier: str) -> float:
        """Return the current estimate of a tier's bandwidth."""
        return self._bytes[tier] / self._seconds[tier]

    def observe(self, tier: str, loaded_bytes: int, duration_s: float) -> None:
        """Update the estimate with a load's measured duration."""
        kept = math.exp(-duration_s / _MEMORY_S)
        self._bytes[tier] = self._bytes[tier] * kept + loaded_bytes
        self._seconds[tier] = self._seconds[tier] * kept + duration_s

    def worthwhile(self, bytes_of_tier: Mapping[str, int], tokens: int, prefill_tokens_per_s: float) -> bool:
        """Return whether to load; True at an unknown prefill rate (0). A refusal moves bandwidths to expected ones."""
        if self.ratio <= 0.0:
            return False
        if prefill_tokens_per_s <= 0.0:
            return True
        load_s = sum(size / self.bytes_per_s(tier) for tier, size in bytes_of_tier.items())
        if load_s <= self.ratio * tokens / prefill_tokens_per_s:
            return True
        for tier in bytes_of_tier:
            self._bytes[tier] = _FORGET * self._bytes[tier] + (1 - _FORGET) * self._expected[tier]
            self._seconds[tier] = _FORGET * self._seconds[tier] + (1 - _FORGET) * _EXPECTED_WEIGHT_S
        return False
