"""What sending a request to one given replica would mean: what is reused, pulled and computed, and when it answers.

Pure functions over a view, the same for every policy, so that policies can be compared by them.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from router.load.replica_load import ReplicaLoad
from router.policy.candidates import RoutingView
from router.policy.pull_cost import plan_pull


class Estimate(NamedTuple):
    """``cached_tokens``: by the directory; ``uncached_tokens``: left to compute after hits, prefills under way, pulls.

    ``work_s``: seconds of work in the replica until the first token, that before the request included.
    ``estimated_ttft_s``: ``work_s`` and what a first token takes beside it (``RoutingView.overhead_s``).
    """

    cached_tokens: int
    uncached_tokens: int
    pull_from: str
    pull_tokens: int
    work_s: float
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
    wait_s = expected_prefill_s(replica, uncached, first_come=not view.settings.shortest_first)
    if view.adapter_s is not None:
        wait_s += float(view.adapter_s[replica.row])
    work_s = wait_s + pull_s
    return Estimate(cached, uncached, pull_from, pull_tokens, work_s, work_s + view.overhead_s)


def expected_prefill_s(replica: ReplicaLoad, uncached_tokens: int, *, first_come: bool) -> float:
    """Return the seconds until a replica has computed a request: the work that runs before it, and its own.

    The queue is the one of ``policies.estimated_ttft``; the delay of others is no part of it.
    """
    ahead = float(replica.queued_tokens)
    if ahead and not first_come:
        ratio, committed = uncached_tokens * replica.falloff, replica.committed_tokens
        ahead = committed + (ahead - committed) * (1.0 - (1.0 - ratio) * exp(ratio))
    return (ahead + uncached_tokens) * replica.seconds_per_token
