"""What the requests of the last minutes were like: how long until their first token, and which blocks they reused.

Bounded, and cheap where requests are decided: times and hashes are noted, and counted many at once, later. Seconds,
blocks. Not thread-safe.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from math import log

import numpy as np
import numpy.typing as npt

from router.protocol.block_hash import HASH_BYTES

_LEAST_S, _GROWTH, _BUCKETS = 1e-3, 1.15, 100
_PER_E = 1.0 / log(_GROWTH)

_SLICE_S, _SLICES = 10.0, 6
_PENDING_TIMES = 1024

_REUSE_SLICE_S, _REUSE_SLICES = 60.0, 5
_REUSED = 3
_FIRST_SHIFT = 6
_MAX_SAMPLED = 2048
_PENDING_BLOCKS = 8192


Counts = npt.NDArray[np.int64]


@dataclass(slots=True)
class _TimesSlice:
    """``counts``: by bucket, of TTFT and of own prefill."""

    ends_s: float
    requests: int = 0
    own_s: float = 0.0
    counts: Counts = field(default_factory=lambda: np.zeros((2, _BUCKETS), dtype=np.int64))


@dataclass(frozen=True, slots=True)
class RecentTimes:
    """Of the requests of about the last minute: how many, p90 of the estimated TTFT and of their own prefill, and the
    mean of the latter; 0.0 where there were none."""

    requests: int = 0
    p90_ttft_s: float = 0.0
    p90_own_s: float = 0.0
    mean_own_s: float = 0.0


class RequestTimes:
    """Estimated times of about the last minute, within 7 %."""

    def __init__(self) -> None:
        self._slices: deque[_TimesSlice] = deque(maxlen=_SLICES)
        self._ends_s = 0.0
        self._pending: list[tuple[float, float]] = []

    def add(self, ttft_s: float, own_s: float, now_s: float) -> None:
        """Count a request that was routed: its estimated TTFT, and its own prefill's part of that."""
        if now_s >= self._ends_s:
            self._count()
            self._ends_s = now_s + _SLICE_S
            self._slices.append(_TimesSlice(self._ends_s))
        pending = self._pending
        pending.append((ttft_s, own_s))
        if len(pending) >= _PENDING_TIMES:
            self._count()

    def recent(self, now_s: float) -> RecentTimes:
        """Return the figures as of now."""
        self._count()
        live = [one for one in self._slices if one.ends_s > now_s - _SLICE_S * (_SLICES - 1)]
        requests = sum(one.requests for one in live)
        if not requests:
            return RecentTimes()
        counts: Counts = np.sum([one.counts for one in live], axis=0)
        return RecentTimes(requests, _p90_s(counts[0]), _p90_s(counts[1]), sum(one.own_s for one in live) / requests)

    def _count(self) -> None:
        if not self._pending:
            return
        times = np.array(self._pending).T
        self._pending.clear()
        last = self._slices[-1]
        last.requests += times.shape[1]
        last.own_s += float(times[1].sum())
        buckets = np.log(np.maximum(times, _LEAST_S) / _LEAST_S) * _PER_E
        for counts, found in zip(last.counts, np.minimum(buckets, _BUCKETS - 1).astype(np.intp), strict=True):
            counts += np.bincount(found, minlength=_BUCKETS)


def _p90_s(counts: Counts) -> float:
    cumulative = np.cumsum(counts)
    found = int(np.searchsorted(cumulative, 0.9 * cumulative[-1]))
    return float(_LEAST_S * _GROWTH ** (found + 0.5))


class WorkingSet:
    """Estimates how many distinct blocks were reused ``_REUSED`` times or more in the last five minutes.

    A block counts once, however many replicas hold it. Of the blocks those are counted whose hash ends in so many
    zeros that ``_MAX_SAMPLED`` of them fit.
    """

    def __init__(self) -> None:
        self._shift = _FIRST_SHIFT
        self._pending: list[bytes] = []
        self._pending_blocks = 0
        self._slices: deque[tuple[float, Counter[int]]] = deque(maxlen=_REUSE_SLICES)

    def add(self, chain: bytes, blocks: int, now_s: float) -> None:
        """Note that a request reuses the first ``blocks`` of a chain."""
        self._pending.append(chain[: blocks * HASH_BYTES])
        self._pending_blocks += blocks
        if self._pending_blocks >= _PENDING_BLOCKS:
            self._count(now_s)

    def blocks(self, now_s: float, routers: int = 1) -> int:
        """Return the estimate. ``routers``: that share the traffic; each sees its part of the uses."""
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
            for _, each in self._slices:
                for block in [block for block in each if block & mask]:
                    del each[block]
