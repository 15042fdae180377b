"""Prefixes whose demand outgrows their holders: who becomes one more holder, before requests queue.

Owns the rule. A prefix is known by its first 2^k blocks, so that a hot system prompt is seen through conversations
that go on differently. Each held depth counts the work that its requests bring to a holder; where that exceeds what
its holders should carry, the request at hand goes to one more replica, which pulls. Holders are not taken away: when
demand falls, ties send requests to one of them again, and the copies of the others age out. Time is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp

import numpy as np
import numpy.typing as npt

from router.load.load_table import LoadTable
from router.policy.candidates import Candidate, Match, PolicyContext, rendezvous, scored
from router.policy.policies import TIE_TOLERANCE, ttft_scores
from router.policy.pull_cost import pulls_faster
from router.protocol.block_hash import HASH_BYTES
from router.protocol.request import RoutedRequest
from router.settings import PolicySettings

HOLDER_UTILISATION = 0.5
"""The part of its time that a replica should spend on one prefix before another one holds it too."""

_MOST_WORK_S = 0.5
"""Counted for one request at most: no single one makes a prefix hot, for more holders would not help it."""

_WORTH_LOOKING = 0.125
"""Part of ``HOLDER_UTILISATION`` below which nothing deeper is counted. A deeper prefix has no demand but a part of
this, so when it gets hot, what was not counted is an eighth of the bound at most, and decays.
"""
_FIRST = np.uint64(2**64 - 1)


class Replication:
    """One router's view of demand. Other routers see their part of it: rates are multiplied by how many there are."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.demand = PrefixDemand()

    def choose(
        self,
        request: RoutedRequest,
        match: Match,
        loads: LoadTable,
        context: PolicyContext,
        now_s: float,
        *,
        count: bool = True,
    ) -> Candidate | None:
        """Return who gets a request of which a replica holds something: the best by score, or another one.

        Another one where the best would be a holder too many, or where the prefix needs one more holder. None: nobody
        can take it. ``count``: False only asks, and leaves the demand as it is.
        """
        scores, own = ttft_scores(request, match, loads, context)
        ranked = scored(scores, own, request, match, loads, context, 1, TIE_TOLERANCE)
        if not ranked:
            return None
        chosen = ranked[0]
        if max(match.values()) < context.settings.min_pull_tokens:
            return chosen
        closed = beyond_bound(chosen.replica_id, request, match, context.pending, loads, context.settings)
        if closed is not None:
            # Where all others are full the bound gives way: one more holder is better than waiting.
            within = context._replace(closed=closed)
            chosen = next(iter(scored(scores, own, request, match, loads, within, 1, TIE_TOLERANCE)), chosen)
        another: str | None = None
        if loads.num_pulling:
            another = self.one_more_holder(chosen.replica_id, request, match, context, loads, now_s, count=count)
        if another is not None:
            for candidate in scored(scores, own, request, match, loads, context, None, TIE_TOLERANCE):
                if candidate.replica_id == another:
                    return candidate._replace(reason="hot_prefix")
        return chosen

    def one_more_holder(
        self,
        chosen_id: str,
        request: RoutedRequest,
        match: Match,
        context: PolicyContext,
        loads: LoadTable,
        now_s: float,
        *,
        count: bool = True,
    ) -> str | None:
        """Count a request's work at who was chosen; return the replica that should be one more holder, if any.

        It is the one with the least work, of equals the first in the prefix's rendezvous order, so that routers
        agree. None also while all others are full, busier than the idlest holder, or slower to copy than to compute.
        """
        size, settings = self._block_size, context.settings
        best = max(match.values())
        if best < settings.min_pull_tokens or settings.max_holders < 2:
            return None
        pace = loads.replicas[chosen_id].seconds_per_token
        work_s = max(request.prompt_tokens - best, 1) * pace
        work_s = (work_s if work_s < _MOST_WORK_S else _MOST_WORK_S) * loads.active_routers
        rate_of = self.demand.add if count else self.demand.rate_with
        hashes, enough = request.block_hashes, HOLDER_UTILISATION
        depth = 1 << (-(-settings.min_pull_tokens // size) - 1).bit_length()
        hot = []
        while depth * size <= best:
            rate = rate_of(hashes[HASH_BYTES * (depth - 1) : HASH_BYTES * depth], work_s, now_s)
            if rate > enough:
                hot.append((depth, rate))
            elif rate < _WORTH_LOOKING * enough:
                break
            depth <<= 1
        for depth, rate in reversed(hot):
            found = self._next_holder(request, depth * size, rate, match, context, loads)
            if found is not None:
                return found
        return None

    def _next_holder(
        self,
        request: RoutedRequest,
        tokens: int,
        rate: float,
        match: Match,
        context: PolicyContext,
        loads: LoadTable,
    ) -> str | None:
        settings = context.settings
        holders = _holders(tokens, (match, context.pending), loads)
        wanted = min(1 + int(rate / HOLDER_UTILISATION), settings.max_holders, len(loads.replica_ids))
        if not holders or len(holders) >= wanted:
            return None
        idlest = min(map(loads.queue_ahead, holders))
        allowed = _next_holders(request.placement_key, holders, loads, settings.max_holders)
        open_ones = [
            name
            for name in allowed
            if name not in context.blocked and not loads.is_full(name) and pulls_faster(name, loads)
        ]
        chosen = min(open_ones, key=loads.queue_ahead, default=None)  # the first of equals
        return chosen if chosen is not None and loads.queue_ahead(chosen) <= idlest else None


def beyond_bound(
    replica_id: str, request: RoutedRequest, match: Match, pending: Match, loads: LoadTable, settings: PolicySettings
) -> npt.NDArray[np.bool_] | None:
    """Return the rows that must not become holders of a request's prefix; None where who was chosen holds it.

    None too for a prefix that is less than half of the prompt, or not worth a pull: it binds nobody. The others that
    may are so many of the key's rendezvous order as holders are missing (see ``_next_holders``).
    """
    rows, most = len(loads.replica_ids), settings.max_holders
    if rows <= most:
        return None
    best = max(match.values())
    least = max(best - settings.min_pull_tokens, settings.min_pull_tokens, request.prompt_tokens // 2)
    if best < least or match.get(replica_id, 0) >= least:
        return None
    holders = _holders(least, (match, pending), loads)
    if replica_id in holders:
        return None
    held = [loads.replicas[name].row for name in holders]
    if len(held) >= most:
        closed = np.ones(rows, np.bool_)
        closed[held] = False
        return closed
    weights = rendezvous(request.placement_key, loads)
    weights[held] = _FIRST
    least_weight: np.uint64 = np.partition(weights, rows - most)[rows - most]
    return weights < least_weight


def _holders(tokens: int, matches: tuple[Match, ...], loads: LoadTable) -> set[str]:
    return {
        replica_id
        for held in matches
        for replica_id, count in held.items()
        if count >= tokens and replica_id in loads.replicas
    }


def _next_holders(key: bytes, holders: set[str], loads: LoadTable, most: int) -> list[str]:
    """Return those who may become holders, first ones first: so many of a key's rendezvous order as are missing.

    In an order that all routers know, so that routers that do not see each other's choices yet keep to the bound.
    """
    order = rendezvous(key, loads).argsort()[::-1].tolist()
    others = [loads.replica_ids[row] for row in order if loads.replica_ids[row] not in holders]
    return others[: max(most - len(holders), 0)]


_LONGEST_MEMORIES = 200.0


_NOTHING = 1e-9


class PrefixDemand:
    """Rates by key over about the last ``memory_s``; of ``max_keys``, the one unheard of for longest goes first."""

    def __init__(self, memory_s: float = 5.0, max_keys: int = 16_384) -> None:
        self._memory_s = memory_s
        self._max_keys = max_keys
        self._origin_s = self._now_s = 0.0
        self._growth = 1.0
        self._grown: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._grown)

    def add(self, key: bytes, work_s: float, now_s: float) -> float:
        """Count work and return the key's rate with it: a steady load of u seconds a second tends to u."""
        growth = self._growth if now_s == self._now_s else self._grow(now_s)
        grown = self._grown
        grown[key] = sum_with = grown.get(key, 0.0) + growth * work_s / self._memory_s
        grown.move_to_end(key)
        if len(grown) > self._max_keys:
            grown.popitem(last=False)
        return sum_with / growth

    def rate_with(self, key: bytes, work_s: float, now_s: float) -> float:
        """Return what ``add`` would, and count nothing."""
        return self.rate(key, now_s) + work_s / self._memory_s

    def rate(self, key: bytes, now_s: float) -> float:
        """Return a key's rate now; 0.0 when it is unknown."""
        return self._grown.get(key, 0.0) / self._grow(now_s)

    def _grow(self, now_s: float) -> float:
        """Work out by how much a rate of ``_origin_s`` is overstated now; the origin moves before numbers get huge."""
        memories = max(now_s - self._origin_s, 0.0) / self._memory_s
        if memories >= _LONGEST_MEMORIES:
            left = exp(-memories)
            self._grown = OrderedDict((key, sum_ * left) for key, sum_ in self._grown.items() if sum_ * left > _NOTHING)
            self._origin_s, memories = now_s, 0.0
        self._now_s, self._growth = now_s, exp(memories)
        return self._growth
