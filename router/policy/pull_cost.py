"""Pulls: when a replica lacks a prefix that another one holds, is copying its KV faster than computing it?

Pure functions over a view, for scores and for the estimate of one decision. A pull may fail: the chosen replica
computes whatever did not arrive.
"""

from __future__ import annotations

import numpy as np

from router.load.load_table import Floats, LoadTable
from router.policy.candidates import RoutingView, longest

PULL_PRICE = 2.0
"""Seconds that a second of pulling weighs: a copy takes room from other prefixes and the link from other pulls."""


def work_tokens(view: RoutingView) -> Floats:
    """Return by row the work of a request in prefill tokens; at least 1. Missing KV is pulled where that is faster.

    What a prefill under way (``pending``) will hold counts as held. A pulled token costs ``PULL_PRICE`` x the
    prefill tokens that would be computed meanwhile. What stores nothing is not pulled for.
    """
    match, pending, loads = view.match, view.pending, view.loads
    min_pull_tokens = view.settings.min_pull_tokens
    # Floats and an array of no dimension: a whole number would cost numpy a conversion each time.
    prompt = float(view.request.prompt_tokens) or 1.0
    least = prompt - max(match.values()) if match else prompt
    if least < 1.0:
        least = 1.0
    work = np.empty(len(loads.replica_ids))
    shares = None
    if loads.num_pulling and view.request.store_kv and prompt - least >= min_pull_tokens:
        shares = loads.pull_shares(PULL_PRICE)
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
    """Return who should hand its KV to a replica that holds ``held_tokens``, and how much; ("", 0): nobody.

    Of those that hold most, the one with the least prefill work.
    """
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
