"""Replication of prefixes in high demand: another replica becomes a holder before requests queue.

A prefix is identified by its first 2^k blocks, so that conversations with different continuations share a hot system
prompt. Each held depth counts the work (seconds per second) of its requests. If that exceeds its holders' share, the
current request goes to one more replica, which pulls the prefix. Holders are not removed: when demand falls, ties send
requests to one of them again, and the other copies age out.
"""

from collections import OrderedDict
from math import exp

import numpy as np
import numpy.typing as npt

from router.policy.candidates import Candidate, RoutingView, rendezvous, scored
from router.policy.costs import TIE_TOLERANCE, pulls_faster, ttft_scores
from router.protocol.block_hash import HASH_BYTES

HOLDER_UTILISATION = 0.5
"""The fraction of its time that a replica should spend on one prefix before another replica holds it too."""

_MOST_WORK_S = 0.5
"""The maximum counted for one request. More holders would not help a single long request."""

_WORTH_LOOKING = 0.125
"""Below this fraction of ``HOLDER_UTILISATION``, deeper prefixes are not counted. Their demand is part of this prefix's
demand, so a prefix that gets hot later has lost at most an eighth of the bound, and that decays."""


class PrefixDemand:
    """Rates by key over about the last ``memory_s``. Beyond ``max_keys``, the least recently used key is dropped."""

    def __init__(self, memory_s: float = 5.0, max_keys: int = 16_384) -> None:
        self._memory_s = memory_s
        self._max_keys = max_keys
        self._rates: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def add(self, key: bytes, work_s: float, now_s: float) -> float:
        """Count work and return the key's new rate. A steady load of u seconds per second tends to u."""
        rate = self.rate_with(key, work_s, now_s)
        self._rates[key] = rate, now_s
        self._rates.move_to_end(key)
        if len(self._rates) > self._max_keys:
            self._rates.popitem(last=False)
        return rate

    def rate_with(self, key: bytes, work_s: float, now_s: float) -> float:
        """Return the result of ``add`` without counting."""
        rate, at_s = self._rates.get(key, (0.0, now_s))
        kept = rate if at_s == now_s else rate * exp(min(at_s - now_s, 0.0) / self._memory_s)
        return kept + work_s / self._memory_s


class Replication:
    """One router's view of demand. Other routers see other parts, so rates are multiplied by the number of routers."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.demand = PrefixDemand()

    def choose(self, view: RoutingView) -> Candidate | None:
        """Choose a replica when a prefix is already held in part: the best by score, or another one.

        It is another one if the best would exceed the holder limit, or if the prefix needs one more holder. None: no
        replica can accept the request. A view that is not ``counted`` does not change the demand.
        """
        scores_s, work = ttft_scores(view)
        ranked = scored(scores_s, work, view, 1, TIE_TOLERANCE)
        if not ranked:
            return None
        chosen = ranked[0]
        if view.best_tokens < view.settings.min_pull_tokens or not view.request.store_kv:
            return chosen  # a request that stores nothing creates no holder
        closed = closed_to_holders(view, chosen.replica_id)
        if closed is not None:
            # If all others are full, one more holder is better than waiting.
            within = scored(scores_s, work, view._replace(closed=closed), 1, TIE_TOLERANCE)
            chosen = next((one for one in within if one.replica_id not in view.quiet), chosen)
        another: str | None = None
        if view.loads.num_pulling:
            another = self.one_more_holder(view, chosen.replica_id)
        if another is None:
            return chosen
        return Candidate(another, scores_s.item(view.loads.replicas[another].row), "hot_prefix")

    def one_more_holder(self, view: RoutingView, chosen_id: str) -> str | None:
        """Count a request's work at the chosen replica, and return the replica that should become a holder, if any.

        It is the one with the least work. Ties go by the prefix's rendezvous order, so that routers agree. None also
        while all others are full, busier than the idlest holder, or slower to copy than to compute.
        """
        request, loads, size, settings = view.request, view.loads, self._block_size, view.settings
        best = view.best_tokens
        if best < settings.min_pull_tokens or settings.max_holders < 2:
            return None
        work_s = max(request.prompt_tokens - best, 1) * loads.replicas[chosen_id].seconds_per_token
        work_s = (work_s if work_s < _MOST_WORK_S else _MOST_WORK_S) * loads.active_routers
        rate_of = self.demand.add if view.counted else self.demand.rate_with
        hashes = request.block_hashes
        depth = 1 << (-(-settings.min_pull_tokens // size) - 1).bit_length()
        hot = []
        while depth * size <= best:
            rate = rate_of(hashes[HASH_BYTES * (depth - 1) : HASH_BYTES * depth], work_s, view.now_s)
            if rate > HOLDER_UTILISATION:
                hot.append((depth, rate))
            elif rate < _WORTH_LOOKING * HOLDER_UTILISATION:
                break
            depth <<= 1
        for depth, rate in reversed(hot):
            found = _next_holder(view, depth * size, rate)
            if found is not None:
                return found
        return None


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


def _next_holder(view: RoutingView, tokens: int, rate: float) -> str | None:
    """Return the replica that should also hold the first ``tokens``, at their demand ``rate``, or None."""
    loads, most = view.loads, view.settings.max_holders
    holders = _holders(view, tokens)
    wanted = min(1 + int(rate / HOLDER_UTILISATION), most, len(loads.replica_ids))
    if not holders or len(holders) >= wanted:
        return None
    # All routers use this order, so that they keep the bound even before they see each other's choices.
    order = rendezvous(view.request.placement_key, loads).argsort()[::-1].tolist()
    others = [loads.replica_ids[row] for row in order if loads.replica_ids[row] not in holders]
    open_ones = [
        name
        for name in others[: max(most - len(holders), 0)]
        if name not in view.blocked
        and name not in view.request.avoid
        and name not in view.quiet
        and not loads.is_full(name)
        and pulls_faster(name, loads)
    ]
    chosen = min(open_ones, key=loads.queue_ahead, default=None)  # the first of equals
    idlest = min(map(loads.queue_ahead, holders))
    return chosen if chosen is not None and loads.queue_ahead(chosen) <= idlest else None
