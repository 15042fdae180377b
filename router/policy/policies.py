"""The policies: estimated TTFT, and baselines. A new policy needs a rule here and its name in `settings.py`.

A rule is a pure function view -> ranked candidates. The view contains turn, randomness and time. A rule returns at
most ``limit`` eligible replicas, best first. An empty list means "wait".
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from router.policy.candidates import Candidate, RoutingView, listed, open_rows, rendezvous, scored, uncached_tokens
from router.policy.costs import TIE_TOLERANCE, ttft_scores
from router.policy.holder_bound import closed_to_holders

BOUNDED_LOAD = 1.25
"""Bounded hashing: a replica's maximum number of requests, relative to the mean."""

SGLANG_RELATIVE_LOAD, SGLANG_ABSOLUTE_LOAD, SGLANG_MATCH_RATIO = 1.1, 32.0, 0.5
"""Better for the rule than sglang-router's own defaults (1.5, 64 and 0.3): its mean TTFT in `benchmarks simulate` is
3 to 5 % shorter."""

Rule = Callable[[RoutingView, int | None], list[Candidate]]


def estimated_ttft(view: RoutingView, limit: int | None = None) -> list[Candidate]:
    """Rank by work: the tokens ahead of the request, its own uncached tokens, and the delay that it causes to others.

    score = (ahead + own x (1 + behind)) x seconds_per_token.
    Only a queue's totals are known: the tokens that no request overtakes, which are ahead, and ``others``, modeled as
    jobs with exponential sizes of mean m = others / jobs. A request of ``own`` tokens, with x = own / m, then runs
    after others x (1 - (1 + x) e^-x) of them and delays jobs x e^-x sequences. A prefill ahead that computes the
    request's own prefix counts only in part (``SHARED_PREFILL``). With first come, first served, all queued tokens are
    ahead and count in full, and none are behind. Ties go to the most cached tokens, then to rendezvous order, which
    places cold prompts stably while replicas are idle. A replica without the request's LoRA adapter costs its load time
    in addition, because loading also takes memory from another adapter. Simultaneous decisions of several routers do
    not see each other. A replica with more work than its router knew therefore returns the request (``recheck``).
    A replica beyond the prefix's ``max_holders`` comes first only if all others are full or quiet.
    """
    scores_s, work = ttft_scores(view)
    ranked = scored(scores_s, work, view, limit, TIE_TOLERANCE)
    if not ranked or not view.request.store_kv:  # a request that stores nothing creates no holder
        return ranked
    closed = closed_to_holders(view, ranked[0].replica_id)
    if closed is None:
        return ranked
    within = scored(scores_s, work, view._replace(closed=closed), 1, TIE_TOLERANCE)
    if not within or within[0].replica_id in view.quiet:
        return ranked
    return [within[0], *(other for other in ranked if other.replica_id != within[0].replica_id)][:limit]


def lmetric(view: RoutingView, limit: int | None = None) -> list[Candidate]:
    """Rank by uncached prefill tokens, including queued ones, times batch size. Source: LMetric."""
    loads, uncached = view.loads, uncached_tokens(view)
    scores = (loads.queued_tokens + uncached) * (loads.running + loads.waiting + 1.0)
    return scored(scores, uncached, view, limit)


def round_robin(view: RoutingView, limit: int | None = None) -> list[Candidate]:
    """Rank in turn, independent of caches and loads."""
    rows = open_rows(view)
    start = view.turn % len(rows) if rows else 0
    return listed(rows[start:] + rows[:start], "round_robin", view, limit)


def power_of_two(view: RoutingView, limit: int | None = None) -> list[Candidate]:
    """Rank two random replicas first, the one with fewer requests before the other, then the rest in random order."""
    rows = open_rows(view)
    view.rng.shuffle(rows)
    requests = view.loads.running + view.loads.waiting
    return listed(sorted(rows[:2], key=lambda row: float(requests[row])) + rows[2:], "power_of_two", view, limit)


def least_loaded(view: RoutingView, limit: int | None = None) -> list[Candidate]:
    """Rank by queued prefill time, then by requests; for calls without a prompt and for faults."""
    rows = open_rows(view)
    wait_s = view.loads.queued_tokens * view.loads.seconds_per_token
    requests = view.loads.running + view.loads.waiting
    view.rng.shuffle(rows)
    rows.sort(key=lambda row: (float(wait_s[row]), float(requests[row])))
    return listed(rows, "fallback", view, limit)


def bounded_hash(view: RoutingView, limit: int | None = None) -> list[Candidate]:
    """Rank by rendezvous order of the placement key. Replicas over ``BOUNDED_LOAD`` x the mean are last, by load."""
    rows = open_rows(view)
    if not rows:
        return []
    requests = view.loads.running + view.loads.waiting
    bound = ceil(BOUNDED_LOAD * (float(requests[rows].sum()) + 1.0) / len(rows))
    weights = rendezvous(view.request.placement_key, view.loads).tolist()
    rows.sort(key=lambda row: -weights[row])
    home = rows[0]
    within = [row for row in rows if requests[row] < bound]
    beyond = sorted((row for row in rows if requests[row] >= bound), key=lambda row: float(requests[row]))
    ranked = listed(within + beyond, "placement", view, limit)
    if len(rows) > 1 and ranked[0].replica_id != view.loads.replica_ids[home]:
        ranked[0] = ranked[0]._replace(reason="load_spill")
    return ranked


def sglang(view: RoutingView, limit: int | None = None) -> list[Candidate]:
    """Rank by match when load is even and the match is long enough, otherwise by shortest queue.

    Uneven: the maximum of requests exceeds ``SGLANG_RELATIVE_LOAD`` x the mean and mean + ``SGLANG_ABSOLUTE_LOAD``.
    Source: the cache-threshold rule of sglang-router.
    """
    requests = view.loads.running + view.loads.waiting
    uncached = uncached_tokens(view)
    scores = requests
    if len(requests):
        mean, largest = float(requests.mean()), float(requests.max())
        uneven = largest > SGLANG_RELATIVE_LOAD * mean and largest > mean + SGLANG_ABSOLUTE_LOAD
        if not uneven and float(uncached.min()) < (1.0 - SGLANG_MATCH_RATIO) * view.request.prompt_tokens:
            scores = uncached
    return scored(scores, uncached, view, limit)


@dataclass(frozen=True, slots=True)
class Policy:
    """A stateless rule. ``may_reroute``: whether a replica with more work than expected may return its requests."""

    rank: Rule
    may_reroute: bool = False


POLICIES: dict[str, Policy] = {
    "estimated_ttft": Policy(estimated_ttft, may_reroute=True),
    "lmetric": Policy(lmetric),
    "bounded_hash": Policy(bounded_hash),
    "sglang": Policy(sglang),
    "power_of_two": Policy(power_of_two),
    "round_robin": Policy(round_robin),
    "least_loaded": Policy(least_loaded),
}
"""The policies by name."""
