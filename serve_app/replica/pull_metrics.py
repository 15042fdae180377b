"""What a replica counts of pulls: planned, refused, begun, how they ended, and what was handed to others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from router.protocol.samples import Histogram, Labels, Sample

Refusal = Literal["off", "held", "short", "slow", "busy"]
"""Why a planned pull was not begun: already here, too little, slower than computing, too many under way."""

Outcome = Literal["whole", "part", "late", "gone", "holder_busy", "holder_lost", "no_room", "invalid", "failed"]
"""How a pull ended: "part" brought less than planned because the holder had no more; the others after that too."""

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class PullMeters:
    """Counters of one replica's life. Belongs to its event loop."""

    def __init__(self) -> None:
        self.refused: Counter[Refusal] = Counter()
        self.ended: Counter[Outcome] = Counter()
        self.begun = 0
        self.joined = 0
        self.tokens = 0
        self.exported_tokens = 0
        self.exports: Counter[str] = Counter()
        self.seconds = Histogram(_BUCKETS_S)

    def samples(self, labels: Labels, tokens_per_s: float) -> Iterable[Sample]:
        """Yield every counter, and the rate."""
        yield "warmpath_kv_pulls_begun_total", labels, float(self.begun)
        yield "warmpath_kv_pulls_joined_total", labels, float(self.joined)
        for outcome, count in self.ended.items():
            yield "warmpath_kv_pulls_total", (*labels, ("outcome", outcome)), float(count)
        for reason, count in self.refused.items():
            yield "warmpath_kv_pulls_refused_total", (*labels, ("reason", reason)), float(count)
        for answer, count in self.exports.items():
            yield "warmpath_kv_exports_total", (*labels, ("outcome", answer)), float(count)
        yield "warmpath_kv_pulled_tokens_total", labels, float(self.tokens)
        yield "warmpath_kv_exported_tokens_total", labels, float(self.exported_tokens)
        yield "warmpath_kv_pull_tokens_per_second", labels, tokens_per_s
        yield from self.seconds.samples("warmpath_kv_pull_seconds", labels)
