"""Statistics of the latest requests: their times to first token and the blocks that they reused.

A decision only records times and hashes, which are evaluated later. Memory is bounded. Not thread-safe.
"""

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from router.protocol.block_hash import HASH_BYTES

_WINDOW_S = 60.0
_MAX_TIMES = 4096

_REUSE_SLICE_S, _REUSE_SLICES = 60.0, 5
_REUSED = 3
_FIRST_SHIFT = 6
_MAX_SAMPLED = 2048
_PENDING_BLOCKS = 8192


@dataclass(frozen=True, slots=True)
class RecentTimes:
    """The last minute's number of requests, the p90 of their estimated TTFT and of their own prefill, and the latter's
    mean; 0.0 without requests."""

    requests: int = 0
    p90_ttft_s: float = 0.0
    p90_own_s: float = 0.0
    mean_own_s: float = 0.0


class RequestTimes:
    """Estimated times of the last minute. The latest ``_MAX_TIMES`` requests represent all."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, float, float]] = deque(maxlen=_MAX_TIMES)

    def add(self, ttft_s: float, own_s: float, now_s: float) -> None:
        """Record a routed request: its estimated TTFT, and the part of it for its own prefill."""
        self._times.append((now_s, ttft_s, own_s))

    def recent(self, now_s: float) -> RecentTimes:
        """Return the current statistics."""
        times = self._times
        while times and times[0][0] <= now_s - _WINDOW_S:
            times.popleft()
        if not times:
            return RecentTimes()
        requests = float(len(times))
        if len(times) == _MAX_TIMES:
            requests *= _WINDOW_S / max(now_s - times[0][0], 1.0)
        _, ttft_s, own_s = np.array(times).T
        p90_ttft_s, p90_own_s = (float(np.quantile(column, 0.9, method="inverted_cdf")) for column in (ttft_s, own_s))
        return RecentTimes(round(requests), p90_ttft_s, p90_own_s, float(own_s.mean()))


class WorkingSet:
    """Estimates the blocks reused ``_REUSED`` times in five minutes, from a sample: hashes that end in zero bits."""

    def __init__(self) -> None:
        self._shift = _FIRST_SHIFT
        self._pending: list[bytes] = []
        self._pending_blocks = 0
        self._slices: deque[tuple[float, Counter[int]]] = deque(maxlen=_REUSE_SLICES)

    def add(self, chain: bytes, blocks: int, now_s: float) -> None:
        """Record that a request reuses the first ``blocks`` of a chain."""
        self._pending.append(chain[: blocks * HASH_BYTES])
        self._pending_blocks += blocks
        if self._pending_blocks >= _PENDING_BLOCKS:
            self._count(now_s)

    def blocks(self, now_s: float, routers: int = 1) -> int:
        """Return the estimate. ``routers``: the number that share the traffic, each with its part of the uses."""
        self._count(now_s)
        uses = Counter[int]()
        for ends_s, counts in self._slices:
            if ends_s > now_s - _REUSE_SLICE_S * (_REUSE_SLICES - 1):
                uses.update(counts)
        least = max(1, round(_REUSED / routers))
        return sum(count >= least for count in uses.values()) << self._shift

    def _count(self, now_s: float) -> None:
        if not self._pending:
            return
        words = np.frombuffer(b"".join(self._pending), dtype="<u8")[::2]
        self._pending.clear()
        self._pending_blocks = 0
        if not self._slices or now_s >= self._slices[-1][0]:
            self._slices.append((now_s + _REUSE_SLICE_S, Counter()))
        counts = self._slices[-1][1]
        counts.update(words[(words & np.uint64((1 << self._shift) - 1)) == 0].tolist())
        while len(counts) > _MAX_SAMPLED:
            self._shift += 1
            mask = (1 << self._shift) - 1
            for _, uses in self._slices:
                for block in [block for block in uses if block & mask]:
                    del uses[block]
