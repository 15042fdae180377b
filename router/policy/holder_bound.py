"""The bound on the replicas that hold one prefix.

Nobody counts demand: a hot prefix gets one more holder when waiting at the present ones costs more than a copy. When
demand falls, ties send requests to one of them again, and the other copies age out. In a large cluster, a burst would
copy a prefix everywhere, so ``max_holders`` bounds it.
"""

import numpy as np
import numpy.typing as npt

from router.policy.candidates import RoutingView, rendezvous


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
    held = [loads.replicas[name].row for name in holders]
    if len(held) >= most:
        closed = np.ones(rows, np.bool_)
        closed[held] = False
        return closed
    weights = rendezvous(view.request.placement_key, loads)
    weights[held] = np.uint64(2**64 - 1)  # before all others
    least_weight: np.uint64 = np.partition(weights, rows - most)[rows - most]
    return weights < least_weight


def _holders(view: RoutingView, tokens: int) -> set[str]:
    """Return the known replicas that hold or are computing the first ``tokens``."""
    return {
        replica_id
        for held in (view.match, view.pending)
        for replica_id, count in held.items()
        if count >= tokens and replica_id in view.loads.replicas
    }
