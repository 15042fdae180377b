"""What a rule of scaling sees of a pool, whatever the pool is made of, and what became of a day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.observe.demand import RecentTimes
from router.protocol.autoscaling import ReplicaFigures

START_S = 60.0
"""From the decision until a replica takes requests: a process, weights, a warm-up."""


class PoolView(Protocol):
    """The running replicas, as sums. ``wanted``: running and starting; ``most``: there may be."""

    wanted: int
    most: int

    def figures(self) -> Mapping[str, ReplicaFigures]:
        """Return what each running replica would report."""

    def demand(self) -> Sequence[tuple[RecentTimes, int]]:
        """Return by router what its requests of the last minute were like, and the tokens of the working set."""

    def ongoing(self) -> int:
        """Return the requests that wait, are computed or answered."""


class Rule(Protocol):
    """Decides how many replicas there should be. ``delay_s``: before it shrinks; ``interval_s``: between two looks."""

    interval_s: float
    delay_s: float

    def target(self, pool: PoolView, now_s: float) -> int:
        """Return the number."""


@dataclass(slots=True)
class DayOutcome:
    """``ttft_s``: by request; ``sizes``: moment and wanted number at each change; ``replica_s``: paid for.

    ``gone_s``: when the last request had ended; ``smallest_s``: when one replica was wanted after that, 0 if never.
    """

    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sizes: list[tuple[float, int]] = field(default_factory=list)
    replica_s: float = 0.0
    gone_s: float = 0.0
    smallest_s: float = 0.0
