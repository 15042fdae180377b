"""The score of the default policy: what a request's first token costs at each replica, and what that costs others."""

from __future__ import annotations

import numpy as np

from router.load.load_table import Floats
from router.policy.candidates import RoutingView
from router.policy.pull_cost import work_tokens

TIE_TOLERANCE = 0.01
"""Scores of ``estimated_ttft`` within this share of the best are equal: noise in rates scatters no cold prompts."""

SHARED_PREFILL = 0.5
"""Of the wait for a prefill under way that computes a prompt's own prefix, the part that does not count: elsewhere the
prompt would wait as long for its own, and a second replica would do the same work."""


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
        for replica_id, tokens in view.pending.items():
            replica, missing = loads.replicas.get(replica_id), tokens - view.match.get(replica_id, 0)
            if replica is not None and missing > 0:
                scores[replica.row] -= SHARED_PREFILL * min(replica.committed_tokens, missing)
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
