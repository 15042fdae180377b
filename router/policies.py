"""The policies: estimated TTFT, and baselines. A new policy needs a rule here and its name in `settings.py`.

A rule is a pure function view -> ranked candidates. The view contains turn, randomness and time. A rule returns at most
``limit`` eligible replicas, best first. An empty list means "wait".

Nobody counts demand: a hot prefix gets one more holder when waiting at the present ones costs more than a copy
(``closed_to_holders``). The chosen replica checks the decision once more (``is_outdated``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

from router.candidates import (
    TIE_TOLERANCE,
    Candidate,
    RoutingView,
    listed,
    open_rows,
    rendezvous,
    scored,
    ttft_scores,
    uncached_tokens,
)
from router.load import DEFAULT_PREFILL_TOKENS_PER_S
from router.protocol.events import LoadReport
from router.protocol.request import Decision


def closed_to_holders(view: RoutingView, chosen_id: str) -> npt.NDArray[np.bool_] | None:
    """Return the rows that must not become holders of a request's prefix, or None if the chosen replica holds it.

    A prefix below half of the prompt, or not worth a pull, restricts no replica (None). Up to ``max_holders`` replicas
    may hold a prefix: the present holders, then the next ones in the key's rendezvous order.
    """
    loads, settings = view.loads, view.settings
    rows, most = len(loads.replica_ids), settings.max_holders
    if rows <= most:
        return None
    best = view.best_tokens
    least = max(best - settings.min_pull_tokens, settings.min_pull_tokens, view.request.prompt_tokens // 2)
    if best < least or view.match.get(chosen_id, 0) >= least:
        return None
    holders = _holders(view, least)
    if chosen_id in holders:
        return None
    holder_rows = [loads.replicas[name].row for name in holders]
    if len(holder_rows) >= most:
        closed = np.ones(rows, np.bool_)
        closed[holder_rows] = False
        return closed
    weights = rendezvous(view.request.placement_key, loads)
    weights[holder_rows] = np.uint64(2**64 - 1)  # before all others
    least_weight: np.uint64 = np.partition(weights, rows - most)[rows - most]
    return weights < least_weight


def _holders(view: RoutingView, tokens: int) -> set[str]:
    """Return the known replicas that hold or are computing the first ``tokens``."""
    return {
        replica_id
        for match in (view.match, view.pending)
        for replica_id, count in match.items()
        if count >= tokens and replica_id in view.loads.replicas
    }


MAX_REROUTES = 8
"""After this many returns, the next replica must accept the request."""

WORTH_ASKING_S = 0.02
"""An extra wait below this is not worth the two calls."""

_WORTH_ASKING = 0.1
"""Neither is an extra wait below this fraction of the expected work until the first token."""


def is_outdated(decision: Decision, load: LoadReport) -> bool:
    """Return whether far more tokens are queued than expected. ``load``: at the request's arrival, without it."""
    if decision.queued_tokens is None:
        return False
    unseen_tokens = load.queued_prefill_tokens - decision.queued_tokens
    unseen_s = unseen_tokens / (load.prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S)
    return unseen_s > max(WORTH_ASKING_S, _WORTH_ASKING * decision.estimated_ttft_s)


BOUNDED_LOAD = 1.25
"""Bounded hashing: a replica's maximum number of requests, relative to the mean."""

SGLANG_RELATIVE_LOAD, SGLANG_ABSOLUTE_LOAD, SGLANG_MATCH_RATIO = 1.1, 32.0, 0.5
"""Better for the rule than sglang-router's own defaults (1.5, 64 and 0.3): its mean TTFT in `benchmarks simulate` is
3 to 5 % shorter."""

Rule = Callable[[RoutingView, int | None], list[Candidate]]


def estimated_ttft(view: RoutingView, limit: int | None = None) -> list[Candidate]:
    """Rank by work: the tokens ahead of the request, its own uncached tokens, and the delay that it causes to others.

    score = (ahead + own x (1 + behind)) x ranked_s, the seconds of a token.
    Only a queue's totals are known: the tokens that no request overtakes, which are ahead, and ``others``, modeled as
    jobs with exponential sizes of mean m = others / jobs. A request of ``own`` tokens, with x = own / m, then runs
    after others x (1 - (1 + x) e^-x) of them and delays jobs x e^-x sequences. A prefill ahead that computes the
    request's own prefix counts only in part (``SHARED_PREFILL``). With first come, first served, all queued tokens are
    ahead and count in full, and none are behind. Ties go to the most cached tokens, then to rendezvous order, which
    places cold prompts stably while replicas are idle. A replica without the request's LoRA adapter costs its load time
    in addition, because loading also takes memory from another adapter. Simultaneous decisions of several routers do
    not see each other. A replica with more work than its router knew therefore returns the request (``is_outdated``).
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
