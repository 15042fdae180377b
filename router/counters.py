"""What a router counts of its decisions: a plain structure that the ingress renders to Prometheus.

Owns the three counts of cached tokens (best available, selected, delivered), decisions by reason and replica, and
histograms. Knows no metric library; every number only rises.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

DECISION_BUCKETS_S = (5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 5e-3, 2.5e-2)
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class Histogram:
    """Counts by upper bound, the last one for everything above; ``total`` is the sum of the values."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, int]]:
        """Return (upper bound as text, values up to it), as Prometheus wants buckets."""
        rows, running = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            rows.append(("+Inf" if bound == float("inf") else repr(bound), running))
        return rows


@dataclass(slots=True)
class TokensByReason:
    """Prompt and cached tokens of the decisions of one reason; ``delivered`` is what replicas really reused."""

    decisions: int = 0
    prompt_tokens: int = 0
    best_cached_tokens: int = 0
    selected_cached_tokens: int = 0
    delivered_cached_tokens: int = 0
    delivered_requests: int = 0


@dataclass(slots=True)
class RouterCounters:
    """Everything one router counts."""

    by_reason: dict[str, TokensByReason] = field(default_factory=dict)
    decisions_by_replica: dict[str, int] = field(default_factory=dict)
    decision_s: Histogram = field(default_factory=lambda: Histogram(DECISION_BUCKETS_S))
    ttft_s: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS_S))
    all_full: int = 0
    faults: int = 0
    rejected: int = 0
    feed_gaps: int = 0
    feed_snapshots: int = 0
    feed_malformed: int = 0
    feed_messages: int = 0

    def of_reason(self, reason: str) -> TokensByReason:
        """Return the counts of one reason, made on first use."""
        tokens = self.by_reason.get(reason)
        if tokens is None:
            tokens = self.by_reason[reason] = TokensByReason()
        return tokens
