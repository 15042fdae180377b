"""Answers, refusals and times to first token of the last 15 minutes, by tenant, in buckets of ten seconds.

They are always kept, so a page that opens later shows them too. Not thread-safe: one event loop makes all calls.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import floor, log
from typing import Any

BUCKET_S = 10
BUCKETS = 90
MINUTE = 6
"""Buckets of the last minute, including the one that is filling now."""
STEP = 1.15
"""The ratio of the ends of two adjacent cells. Times are counted by cell, with an error of at most 7 %."""
MAX_TENANTS = 256
"""The limit of tenants with figures, about 90 KB for each busy one. The most recently active ones stay."""


@dataclass(slots=True)
class Bucket:
    """Ten seconds. ``refused``: answers with 429; ``failed``: with 5xx; ``ttft``: the others, by cell of time."""

    refused: int = 0
    failed: int = 0
    ttft: Counter[int] = field(default_factory=Counter)

    def add(self, other: "Bucket") -> None:
        """Add the counts of another bucket."""
        self.refused += other.refused
        self.failed += other.failed
        self.ttft.update(other.ttft)

    def row(self, at_s: int) -> dict[str, Any]:
        """Return the bucket as a FIGURE (docs: api). ``at_s``: its start."""
        counts = {"requests": self.ttft.total(), "refused": self.refused, "failed": self.failed}
        return {"at_s": at_s, **counts, "ttft_p50_s": self._quantile_s(0.5), "ttft_p95_s": self._quantile_s(0.95)}

    def _quantile_s(self, share: float) -> float | None:
        left = share * self.ttft.total()
        for cell, answers in sorted(self.ttft.items()):
            left -= answers
            if left <= 0:
                return float(f"{STEP ** (cell + 0.5):.3g}")
        return None


Rings = Mapping[str | None, dict[int, Bucket]]
"""By tenant (None: all requests, also without a known tenant) and bucket number: seconds since 1970 // BUCKET_S."""


class Figures:
    """One ingress' figures. ``clock``: wall-clock time, which all ingresses share."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.rings: OrderedDict[str | None, dict[int, Bucket]] = OrderedDict()

    def answered(self, tenant: str, ttft_s: float) -> None:
        """Count an answer at its first token."""
        for bucket in self._now(tenant):
            bucket.ttft[floor(log(max(ttft_s, 1e-4), STEP))] += 1

    def refused(self, tenant: str, status: int) -> None:
        """Count an error response, unless the client caused the error."""
        for bucket in self._now(tenant) if status == 429 or status >= 500 else ():
            bucket.refused += status == 429
            bucket.failed += status >= 500

    def _now(self, tenant: str) -> list[Bucket]:
        number = int(self._clock()) // BUCKET_S
        for name in (None, tenant):
            ring = self.rings.setdefault(name, {})
            self.rings.move_to_end(name)
            if number not in ring:
                # Later ones are there if the clock was ahead and has been set back.
                for other in [other for other in ring if not number - BUCKETS < other < number]:
                    del ring[other]
                ring[number] = Bucket()
        if len(self.rings) > MAX_TENANTS:
            self.rings.popitem(last=False)
        return [self.rings[None][number], self.rings[tenant][number]]


def joined(before: Rings, more: Rings, most: int = BUCKETS) -> Rings:
    """Return the latest buckets of each ring. Buckets of ``more`` replace earlier ones, and its last is the last."""
    both = {name: {**before.get(name, {}), **more.get(name, {})} for name in {**before, **more}}
    last = {name: max(more.get(name) or both[name], default=0) for name in both}
    return {
        name: dict(sorted(each for each in ring.items() if each[0] <= last[name])[-most:])
        for name, ring in both.items()
    }


def rows_of(sources: Iterable[Rings], viewer: str | None, now_s: float) -> tuple[dict[int, dict[str, Any]], Bucket]:
    """Return a viewer's (None: an operator's) rows by time, and the sum of the last minute."""
    number, sums, minute = int(now_s) // BUCKET_S, dict[int, Bucket](), Bucket()
    for at, bucket in (each for rings in sources for each in rings.get(viewer, {}).items()):
        if number - BUCKETS < at <= number + 1:
            sums.setdefault(at, Bucket()).add(bucket)
        if number - MINUTE < at <= number + 1:
            minute.add(bucket)
    return {at * BUCKET_S: bucket.row(at * BUCKET_S) for at, bucket in sorted(sums.items())}, minute
