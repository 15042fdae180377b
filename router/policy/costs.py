"""The cost of a request: by row, for scores, and at one replica, as reused, pulled and computed tokens.

It chooses between pulling a prefix's KV from another replica and computing it. A pull may fail, and the chosen replica
computes the missing tokens. Pure functions over a view. The estimate is the same for every policy, so that policies
can be compared by it.
"""

from math import exp
from typing import NamedTuple

import numpy as np

from router.load.load_table import Floats, LoadTable
from router.policy.candidates import RoutingView, longest

TIE_TOLERANCE = 0.01
"""Scores of ``estimated_ttft`` within this fraction of the best tie, so that rate noise does not scatter prompts."""

SHARED_PREFILL = 0.5
"""The uncounted part of the wait for a prefill in progress that computes the prompt's own prefix. Elsewhere the prompt
would wait as long for its own prefill, and a second replica would do the same work."""


def ttft_scores(view: RoutingView) -> tuple[Floats, Floats]:
    """Return by row the scores of ``estimated_ttft`` in seconds and the work in tokens, ineligible rows included."""
    loads = view.loads
    work = work_tokens(view)
    if view.settings.shortest_first:
        # ahead + own x (1 + behind), in the form with the fewest steps: committed + others x (1 - e^-x) + own
        shorter = work * loads.falloff
        np.expm1(shorter, shorter)
        scores = work + loads.committed_tokens
        scores -= shorter * loads.overtakable_tokens
        for replica_id, tokens in view.pending.items():
            replica, missing = loads.replicas.get(replica_id), tokens - view.match.get(replica_id, 0)
            if replica is not None and missing > 0:
                scores[replica.row] -= SHARED_PREFILL * min(replica.committed_tokens, missing)
    else:
        scores = loads.queued_tokens + work
    scores *= loads.seconds_per_token
    if view.adapter_s is not None:
        scores += view.adapter_s
    return scores, work


def work_tokens(view: RoutingView) -> Floats:
    """Return by row the work of a request in prefill tokens, at least 1. Missing KV is pulled where that is faster.

    ``pending`` counts as held. A pulled token costs ``PULL_PRICE`` x the prefill tokens computed meanwhile.
    """
    match, pending, loads = view.match, view.pending, view.loads
    min_pull_tokens = view.settings.min_pull_tokens
    # Floats and a zero-dimensional array, because an int costs numpy a conversion each time.
    prompt = float(view.request.prompt_tokens) or 1.0
    least = prompt - max(match.values()) if match else prompt
    if least < 1.0:
        least = 1.0
    work = np.empty(len(loads.replica_ids))
    shares = None
    if loads.num_pulling and view.request.store_kv and prompt - least >= min_pull_tokens:
        shares = loads.pull_shares
        work.fill(least)
        work += shares * np.array(prompt - least)
    else:
        work.fill(prompt)
    replicas = loads.replicas
    for replica_id, held in (longest(match, pending) if pending else match).items():
        replica = replicas.get(replica_id)
        if replica is not None:
            left = prompt - held
            if left < 1.0:
                left = 1.0
            if shares is not None and left - least >= min_pull_tokens:
                left = (left - least) * shares.item(replica.row) + least
            work[replica.row] = left
    return work


def pulls_faster(replica_id: str, loads: LoadTable) -> bool:
    """Return whether a known replica copies KV faster than it computes it."""
    replica = loads.replicas.get(replica_id)
    return replica is not None and replica.pull_pace < 1.0


def plan_pull(view: RoutingView, replica_id: str, held_tokens: int) -> tuple[str, int]:
    """Return the least busy of the replicas that hold most, and the tokens to pull from it; ("", 0): no pull."""
    most, loads = view.best_tokens, view.loads
    if most - held_tokens < view.settings.min_pull_tokens or not pulls_faster(replica_id, loads):
        return "", 0
    holder, least = "", 0
    for name, tokens in view.match.items():
        if tokens == most:
            replica = loads.replicas.get(name)
            if replica is not None and (not holder or replica.queued_tokens < least):
                holder, least = name, replica.queued_tokens
    return (holder, most) if holder else ("", 0)


class Estimate(NamedTuple):
    """``cached_tokens``: by the directory; ``uncached_tokens``: to compute after hits, prefills in progress and pulls.

    ``estimated_ttft_s``: seconds of work in the replica until the first token, including the work ahead of the request.
    """

    cached_tokens: int
    uncached_tokens: int
    pull_from: str
    pull_tokens: int
    estimated_ttft_s: float


def estimate(view: RoutingView, replica_id: str) -> Estimate:
    """Return the estimate for a known replica."""
    cached = held = view.match.get(replica_id, 0)
    if view.pending:
        held = max(held, view.pending.get(replica_id, 0))
    loads = view.loads
    replica = loads.replicas[replica_id]
    pull_from, pull_tokens, pull_s = "", 0, 0.0
    if loads.num_pulling and view.request.store_kv and view.best_tokens > held:
        pull_from, pull_tokens = plan_pull(view, replica_id, held)
        if pull_tokens:
            pull_s = (pull_tokens - held) * replica.pull_pace * replica.seconds_per_token
            held = pull_tokens
    uncached = max(view.request.prompt_tokens - held, 1)
    ahead = float(replica.queued_tokens)
    if ahead and view.settings.shortest_first:
        # The queue as in ``ttft_scores``. Only scores count the delay of others and ``SHARED_PREFILL``.
        ratio, committed = uncached * replica.falloff, replica.committed_tokens
        ahead = committed + (ahead - committed) * (1.0 - (1.0 - ratio) * exp(ratio))
    wait_s = (ahead + uncached) * replica.seconds_per_token
    if view.adapter_s is not None:
        wait_s += float(view.adapter_s[replica.row])
    return Estimate(cached, uncached, pull_from, pull_tokens, wait_s + pull_s)
