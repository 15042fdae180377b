"""What a router tells of itself.

Counters for Prometheus, statistics of requests for autoscaling, its state, explanations.

Counters only rise. A decision only records times and hashes, which are evaluated later. Memory is bounded. Documents
are JSON-able, and their caller holds the lock of the objects that it passes in.
"""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

import numpy as np

from router.candidates import Candidate, Estimate, RoutingView, estimate
from router.directory import Directory, DriftChecks
from router.feed.sequencing import FeedCounters
from router.load import LoadTable
from router.protocol.block_hash import HASH_BYTES
from router.protocol.events import StatsReport
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

    def add_delivered(self, selected_tokens: int, delivered_tokens: int, listed_tokens: int) -> None:
        """Count one first token. ``listed_tokens``: from the directory now, needed if fewer tokens were delivered."""
        self.delivered_requests += 1
        self.delivered_cached_tokens += delivered_tokens
        missing = max(selected_tokens - delivered_tokens, 0)
        evicted = min(max(selected_tokens - listed_tokens, 0), missing)
        self.evicted_tokens += evicted
        self.unused_tokens += missing - evicted
        self.unpredicted_tokens += max(delivered_tokens - selected_tokens, 0)

    def recount(self, more_tokens: int) -> None:
        """Add to a first token's delivered tokens; negative ones were thought to be reused, but were not."""
        self.delivered_cached_tokens += more_tokens
        self.unpredicted_tokens += max(more_tokens, 0)
        self.unused_tokens += max(-more_tokens, 0)


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
class ShadowCounters:
    """Sums over the compared decisions. ``acting_``: of the policy that acted. ``faults`` are in no other number."""

    decisions: int = 0
    different: int = 0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    acting_predicted_tokens: int = 0
    estimated_ttft_s: float = 0.0
    acting_estimated_ttft_s: float = 0.0
    faults: int = 0


@dataclass(slots=True)
class RouterCounters:
    """All counters of one router. ``decision_s``: the duration of each decision; ``wait_s``: waits for a replica.

    ``shadows``: by the acting policy and the shadow's.
    """

    by_policy: defaultdict[str, PolicyCounters] = field(default_factory=lambda: defaultdict(PolicyCounters))
    shadows: defaultdict[tuple[str, str], ShadowCounters] = field(default_factory=lambda: defaultdict(ShadowCounters))
    decisions_by_replica: Counter[str] = field(default_factory=Counter)
    decision_s: Histogram = field(default_factory=lambda: Histogram(DECISION_BUCKETS_S))
    wait_s: Histogram = field(default_factory=lambda: Histogram(WAIT_BUCKETS_S))
    all_full: int = 0
    faults: int = 0
    rejected: int = 0
    rerouted: int = 0
    feed: FeedCounters = field(default_factory=FeedCounters)


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


MAX_SAMPLES = 10_000
_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_ESTIMATES = ("estimated_s", "actual_s", "late_s", "early_s")
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def sane_stats(report: StatsReport) -> StatsReport:
    """Return a report without the samples that a metrics page cannot show. A replica's report is not trusted."""
    return StatsReport(
        tuple(
            (name, labels, value)
            for name, labels, value in report.samples[:MAX_SAMPLES]
            if _METRIC_NAME.fullmatch(name)
            and isfinite(value)
            and all(_LABEL_NAME.fullmatch(label) for label, _ in labels)
        )
    )


def router_state(
    directory: Directory, drift: DriftChecks, loads: LoadTable, away: Collection[str], now_s: float
) -> dict[str, Any]:
    """Return the JSON-able state of a router. ``away``: replicas that it remembers but sends no requests."""
    return {
        "block_size": directory.block_size,
        "directory": {
            "blocks": directory.num_blocks,
            "max_blocks": directory.max_blocks,
            "bytes": directory.size_bytes,
            "refused_blocks": directory.refused_blocks,
            "checks": drift.checks,
        },
        "open_reservations": loads.open_reservations,
        "replicas": [
            {
                "replica_id": replica_id,
                "away": replica_id in away,
                "blocks": dict(directory.blocks_held(replica_id)),
                "drift": dict(drift.differences.get(replica_id, {})),
            }
            | replica_load_state(replica_id, loads, now_s)
            for replica_id in loads.replica_ids
        ],
    }


def replica_load_state(replica_id: str, loads: LoadTable, now_s: float) -> dict[str, Any]:
    """Return a known replica's load, JSON-able."""
    replica = loads.replicas[replica_id]
    report = replica.report
    return {
        "queued_prefill_tokens": loads.queue_ahead(replica_id),
        "full": loads.is_full(replica_id),
        "running_sequences": report.running_sequences,
        "waiting_sequences": report.waiting_sequences,
        "prefill_tokens_per_s": report.prefill_tokens_per_s,
        "attributes": report.attributes,
        "out": report.out or None,
        "report_age_s": None if replica.reported_at_s is None else round(now_s - replica.reported_at_s, 3),
    }


def regret_state(counters: RouterCounters) -> dict[str, Any]:
    """Return by policy the cached tokens that its decisions lost, by reason, and the errors of its TTFT estimates."""
    return {
        policy: {
            "decisions": sum(tokens.decisions for tokens in counted.by_reason.values()),
            "by_reason": {
                reason: {**asdict(tokens), "not_selected_tokens": tokens.not_selected_tokens}
                for reason, tokens in counted.by_reason.items()
            },
            "ttft": {
                "requests": counted.estimates.ratio.count,
                **{name: round(getattr(counted.estimates, name), 6) for name in _ESTIMATES},
            },
        }
        for policy, counted in counters.by_policy.items()
    }


_BECAUSE = {
    "only_replica": "it is the only replica that can accept the request",
    "round_robin": "it is its turn",
    "power_of_two": "of two replicas drawn at random it has fewer requests",
    "placement": "it comes first in the rendezvous order of the prompt's placement key and is within its load bound",
    "fallback": "it has the least queued work",
    "bounded_hash load_spill": "the replicas before it in the placement key's rendezvous order are over their bound",
}


def explain(
    view: RoutingView,
    rankings: Mapping[str, list[Candidate]],
    tiers: Mapping[str, Mapping[str, int]],
    shadow: tuple[str, list[Candidate]] | None = None,
) -> dict[str, Any]:
    """Return the replicas in the order of the first ranking, and each policy's winner, also that of a ``shadow``.

    ``tiers``: of the matches.
    """
    loads, adapter_s = view.loads, view.adapter_s
    estimates = {replica_id: estimate(view, replica_id) for replica_id in loads.replica_ids}
    places = {
        policy: {
            candidate.replica_id: {"rank": rank, "score": candidate.score, "reason": candidate.reason}
            for rank, candidate in enumerate(ranked, 1)
        }
        for policy, ranked in rankings.items()
    }
    order = list(next(iter(places.values())))
    order += [replica_id for replica_id in loads.replica_ids if replica_id not in order]
    return {
        "prompt_tokens": view.request.prompt_tokens,
        "best_cached_tokens": view.best_tokens,
        "winners": {policy: _winner(policy, ranked, estimates, view) for policy, ranked in rankings.items()},
        "shadow": None if shadow is None else {"policy": shadow[0], **_winner(*shadow, estimates, view)},
        "replicas": [
            {
                "replica_id": replica_id,
                **estimates[replica_id]._asdict(),
                "pull_from": estimates[replica_id].pull_from or None,
                "cached_tokens_by_tier": dict(tiers.get(replica_id, {})),
                "in_flight_tokens": view.pending.get(replica_id, 0),
                "adapter_load_s": 0.0 if adapter_s is None else float(adapter_s[loads.replicas[replica_id].row]),
                "blocked": replica_id in view.blocked,
                **replica_load_state(replica_id, loads, view.now_s),
                "policies": {policy: places[policy].get(replica_id) for policy in rankings},
            }
            for replica_id in order
        ],
    }


def _winner(
    policy: str, ranked: list[Candidate], estimates: Mapping[str, Estimate], view: RoutingView
) -> dict[str, Any]:
    if not ranked:
        why = "every replica is full or blocked: the request would wait" if estimates else "there are no replicas"
        return {"replica_id": None, "reason": None, "because": f"No replica: {why}."}
    first = ranked[0]
    because = _BECAUSE.get(first.reason) or _BECAUSE.get(f"{policy} {first.reason}")
    because = because or _because(ranked, estimates, view)
    expected = estimates[first.replica_id]
    return {
        "replica_id": first.replica_id,
        "reason": first.reason,
        "because": f"{first.replica_id} would get the request, because {because}; "
        f"the work until its first token is estimated at {_seconds(expected.estimated_ttft_s)}.",
    }


def _because(ranked: list[Candidate], estimates: Mapping[str, Estimate], view: RoutingView) -> str:
    """Return the reason for the first place of a ranking by score."""
    match, loads = view.match, view.loads
    first, estimated = ranked[0], estimates[ranked[0].replica_id]
    selected, best = estimated.cached_tokens, view.best_tokens
    if first.reason == "cached":
        holders = sum(tokens == best for tokens in match.values())
        among = "the most" if holders == 1 else f"as {holders} replicas do, and of these it scores best"
        return f"it holds {selected} of {view.request.prompt_tokens} prompt tokens, {among}"
    if first.reason == "in_flight":
        return (
            f"it is computing a prompt of the same beginning, and will hold all but {estimated.uncached_tokens} tokens"
        )
    if first.reason == "cold":
        return "no replica holds any of the prompt, and it scores best; equal scores go by rendezvous order"
    holder = min((name for name in match if match[name] == best), key=lambda name: estimates[name].estimated_ttft_s)
    place = next((candidate for candidate in ranked if candidate.replica_id == holder), None)
    if place is None:
        why = "is full" if loads.is_full(holder) else "cannot accept it"
        return f"{holder}, which holds {best} tokens, {why}, and of the others it scores best"
    if place.score < first.score:
        return "the prefix has its maximum of holders, and this one scores best of the replicas that may hold it"
    return (
        f"it scores {first.score:.6g} (lower wins) against {place.score:.6g} at {holder}, which holds {best} tokens "
        f"where it holds {selected} but has {loads.queue_ahead(holder)} prefill tokens queued"
    )


def _seconds(value: float) -> str:
    return f"{1000 * value:.1f} ms" if value < 1.0 else f"{value:.2f} s"
