"""The counters of a router's decisions. Every number only rises, and the ingress exports them to Prometheus."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from router.feed.messages import FeedCounters
from router.protocol.samples import WAIT_BUCKETS_S, Histogram

DECISION_BUCKETS_S = (5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 5e-3, 2.5e-2)
TTFT_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0, 100.0)


@dataclass(slots=True)
class TokensByReason:
    """Prompt and cached tokens of the decisions with one reason. ``delivered``: the tokens that replicas really reused.

    Of the tokens selected but not delivered, ``evicted`` were gone and ``unused`` were not: a false hint, or slower to
    load than to compute. ``unpredicted``: delivered beyond the selected tokens, such as by a prefill in progress.
    """

    decisions: int = 0
    prompt_tokens: int = 0
    best_cached_tokens: int = 0
    selected_cached_tokens: int = 0
    delivered_cached_tokens: int = 0
    delivered_requests: int = 0
    evicted_tokens: int = 0
    unused_tokens: int = 0
    unpredicted_tokens: int = 0

    @property
    def not_selected_tokens(self) -> int:
        """The regret of the choice: the tokens that the best replica held beyond the chosen one."""
        return self.best_cached_tokens - self.selected_cached_tokens

    def add_decision(self, prompt_tokens: int, best_tokens: int, selected_tokens: int) -> None:
        """Count one decision."""
        self.decisions += 1
        self.prompt_tokens += prompt_tokens
        self.best_cached_tokens += best_tokens
        self.selected_cached_tokens += selected_tokens

    def add_delivered(self, selected_tokens: int, delivered_tokens: int, held_tokens: int) -> None:
        """Count one first token. ``held_tokens``: from the directory now, needed if fewer tokens were delivered."""
        self.delivered_requests += 1
        self.delivered_cached_tokens += delivered_tokens
        missing = max(selected_tokens - delivered_tokens, 0)
        evicted = min(max(selected_tokens - held_tokens, 0), missing)
        self.evicted_tokens += evicted
        self.unused_tokens += missing - evicted
        self.unpredicted_tokens += max(delivered_tokens - selected_tokens, 0)


@dataclass(slots=True)
class EstimateCounters:
    """Estimated and actual TTFTs. ``late_s``, ``early_s``: sums of the time over and under the estimates."""

    estimated_s: float = 0.0
    actual_s: float = 0.0
    late_s: float = 0.0
    early_s: float = 0.0
    ratio: Histogram = field(default_factory=lambda: Histogram(TTFT_RATIO_BUCKETS))

    def add(self, estimated_s: float, actual_s: float) -> None:
        """Count one request; ``estimated_s`` is positive."""
        self.estimated_s += estimated_s
        self.actual_s += actual_s
        self.late_s += max(actual_s - estimated_s, 0.0)
        self.early_s += max(estimated_s - actual_s, 0.0)
        self.ratio.observe(actual_s / estimated_s)


@dataclass(slots=True)
class PolicyCounters:
    """The results of one policy's decisions."""

    by_reason: defaultdict[str, TokensByReason] = field(default_factory=lambda: defaultdict(TokensByReason))
    estimates: EstimateCounters = field(default_factory=EstimateCounters)


@dataclass(slots=True)
class RouterCounters:
    """All counters of one router. ``decision_s``: the duration of each decision; ``wait_s``: waits for a replica."""

    by_policy: defaultdict[str, PolicyCounters] = field(default_factory=lambda: defaultdict(PolicyCounters))
    decisions_by_replica: Counter[str] = field(default_factory=Counter)
    decision_s: Histogram = field(default_factory=lambda: Histogram(DECISION_BUCKETS_S))
    wait_s: Histogram = field(default_factory=lambda: Histogram(WAIT_BUCKETS_S))
    all_full: int = 0
    faults: int = 0
    rejected: int = 0
    rerouted: int = 0
    feed: FeedCounters = field(default_factory=FeedCounters)
