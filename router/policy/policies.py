"""The scoring rules, pure functions view -> ranked candidates: estimated time to first token, and baselines.

Turn and randomness come in the view. A policy returns replicas that may take the request, best first, at most
``limit`` of them; an empty list means "wait".
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import numpy as np

from router.load.load_table import Floats
from router.policy.candidates import Candidate, RoutingView, listed, open_rows, rendezvous, scored, uncached_tokens
from router.policy.pull_cost import work_tokens

TIE_TOLERANCE = 0.01
"""Scores of ``estimated_ttft`` within this share of the best are equal: noise in rates scatters no cold prompts."""

BOUNDED_LOAD = 1.25
"""Bounded hashing: how far over the mean a replica's requests may be."""

SGLANG_RELATIVE_LOAD, SGLANG_ABSOLUTE_LOAD, SGLANG_MATCH_RATIO = 1.1, 32.0, 0.5
"""Kinder to the rule than sglang-router's own defaults, 1.5, 64 and 0.3: its mean TTFT in `benchmarks simulate`
is 3 to 5 % shorter with these."""

Policy = Callable[[RoutingView, int | None], list[Candidate]]


def estimated_ttft(view: RoutingView, limit: int | None = None) -> list[Candidate]:
    """Rank by work: what runs before the request, its own uncached tokens, and the delay it causes to others.

    score = (ahead + own x (1 + behind)) x seconds_per_token.
    Of a queue only totals are known: the tokens that nobody overtakes, which are ahead, and ``others``, taken as jobs
    with exponential sizes of mean m = others / jobs. Then a request of ``own`` tokens, x = own / m, runs behind
    others x (1 - (1 + x) e^-x) of them and pushes back jobs x e^-x sequences. First come first served: everything is
    ahead, nobody is behind. Ties go to the most cached tokens, then to rendezvous order, which places cold prompts
    stably while replicas are idle. Where other routers decide at the same moment, unseen, a part of the replicas is
    left to each: the others cost up to as much more as the request itself (``LoadTable.left_to_peers``). A replica that
    lacks the request's LoRA adapter costs the seconds of loading it more: it also takes memory from another adapter.
    """
    scores_s, work = ttft_scores(view)
    return scored(scores_s, work, view, limit, TIE_TOLERANCE)


def ttft_scores(view: RoutingView) -> tuple[Floats, Floats]:
    """Return by row the scores of ``estimated_ttft`` in seconds and the work in tokens, whoever may take it."""
    loads = view.loads
    work = work_tokens(view)
    if view.settings.shortest_first:
        # ahead + own x (1 + behind), put so that it needs the fewest steps: committed + others x (1 - e^-x) + own
        shorter = work * loads.falloff
        np.expm1(shorter, shorter)
        scores = work + loads.committed_tokens
        scores -= shorter * loads.overtakable_tokens
    else:
        scores = loads.queued_tokens + work
    left_to_peers = loads.left_to_peers
    if left_to_peers is not None and len(scores):
        # As many equal choices as there are routers: rendezvous order spreads prompts over them, and equal ones agree.
        equal = np.count_nonzero(scores <= scores.min() * (1.0 + TIE_TOLERANCE))
        if equal < min(loads.active_routers, len(scores)):
            scores += left_to_peers * work.min()
    scores *= loads.seconds_per_token
    if view.adapter_s is not None:
        scores += view.adapter_s
    return scores, work


def lmetric(view: RoutingView, limit: int | None = None) -> list[Candidate]:
    """Rank by uncached prefill tokens, queued ones included, times batch size. Source: LMetric."""
    loads, uncached = view.loads, uncached_tokens(view)
    scores = (loads.queued_tokens + uncached) * (loads.running + loads.waiting + 1.0)
    return scored(scores, uncached, view, limit)


def round_robin(view: RoutingView, limit: int | None = None) -> list[Candidate]:
    """Rank in turn, whatever the caches and loads."""
    rows = open_rows(view)
    start = view.turn % len(rows) if rows else 0
    return listed(rows[start:] + rows[:start], "round_robin", view, limit)


def power_of_two(view: RoutingView, limit: int | None = None) -> list[Candidate]:
    """Draw two replicas, the one with fewer requests first; the rest follow in random order."""
    rows = open_rows(view)
    view.rng.shuffle(rows)
    requests = view.loads.running + view.loads.waiting
    return listed(sorted(rows[:2], key=lambda row: float(requests[row])) + rows[2:], "power_of_two", view, limit)


def least_loaded(view: RoutingView, limit: int | None = None) -> list[Candidate]:
    """Rank by queued tokens per rate, then by requests; for calls that carry no prompt and for faults."""
    rows = open_rows(view)
    wait_s = view.loads.queued_tokens * view.loads.seconds_per_token
    requests = view.loads.running + view.loads.waiting
    view.rng.shuffle(rows)
    rows.sort(key=lambda row: (float(wait_s[row]), float(requests[row])))
    return listed(rows, "fallback", view, limit)


def bounded_hash(view: RoutingView, limit: int | None = None) -> list[Candidate]:
    """Rank by rendezvous order of the placement key; replicas over ``BOUNDED_LOAD`` x the mean come last, by load.

    Source: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam).
    """
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
    """Rank by shortest queue when load is uneven, else by match when it is long enough, else by shortest queue.

    Uneven: the most requests are over ``SGLANG_RELATIVE_LOAD`` x the mean and over mean + ``SGLANG_ABSOLUTE_LOAD``.
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


POLICIES: dict[str, Policy] = {
    "estimated_ttft": estimated_ttft,
    "lmetric": lmetric,
    "bounded_hash": bounded_hash,
    "sglang": sglang,
    "power_of_two": power_of_two,
    "round_robin": round_robin,
    "least_loaded": least_loaded,
}
