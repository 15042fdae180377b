"""The parts of every policy: a view of one request and the replicas, candidates, and the order of rows.

It owns ties, rendezvous order and eligibility: full and blocked replicas are never chosen, quiet ones and those to
avoid only when no other is open. A row is a replica's place in ``LoadTable``'s columns. Arrays here have one entry for
each row.

The cost of a request (``estimate``) is the same for every policy, so that policies can be compared by it. It chooses
between pulling a prefix's KV and computing it; after a failed pull the chosen replica computes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import exp
from random import Random
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from router.load import Floats, LoadTable
from router.protocol.request import Reason, RoutedRequest
from router.settings import PolicySettings

TIE_TOLERANCE = 0.01
"""Scores of ``estimated_ttft`` within this fraction of the best tie, so that rate noise does not scatter prompts."""

SHARED_PREFILL = 0.5
"""The uncounted part of the wait for a prefill in progress that computes the prompt's own prefix. Elsewhere the prompt
would wait as long for its own prefill, and a second replica would do the same work."""


COMPUTED_AGAIN = 2.0
"""The cost of a token that another replica holds and this one would compute anew, in tokens: it takes space and time
from other prompts. It is 1 while a request in progress has the same prefix: one in demand is worth a further holder."""


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
    scores *= loads.ranked_s
    if view.adapter_s is not None:
        scores += view.adapter_s
    return scores, work


def work_tokens(view: RoutingView) -> Floats:
    """Return by row the work of a request in prefill tokens, at least 1. Missing KV is pulled where that is faster.

    ``pending`` counts as held. A pulled token costs ``PULL_PRICE`` x the prefill tokens computed meanwhile, and one
    from a tier those of its load. Without pulls a token held elsewhere costs ``COMPUTED_AGAIN``.
    """
    match, pending, loads, loaded = view.match, view.pending, view.loads, view.loaded
    min_pull_tokens = view.settings.min_pull_tokens
    # Floats and a zero-dimensional array, because an int costs numpy a conversion each time.
    prompt = float(view.request.prompt_tokens) or 1.0
    least = prompt - max(match.values()) if match else prompt
    if least < 1.0:
        least = 1.0
    work = np.empty(len(loads.replica_ids))
    shares, price = None, 1.0
    if loads.num_pulling and view.request.store_kv and prompt - least >= min_pull_tokens:
        shares = loads.pull_shares
        work.fill(least)
        work += shares * np.array(prompt - least)
    else:
        if match and not (pending and max(pending.values()) >= prompt - least):
            price = COMPUTED_AGAIN
        work.fill(least + price * (prompt - least))
    replicas = loads.replicas
    last, left = -1, 0.0
    for replica_id, tokens in (longest(match, pending) if pending else match).items():
        replica = replicas.get(replica_id)
        if replica is not None:
            if tokens != last or shares is not None or loaded:  # many hold as much as the one before
                last, left = tokens, prompt - tokens
                if left < 1.0:
                    left = 1.0
                if shares is not None and left - least >= min_pull_tokens:
                    left = (left - least) * shares.item(replica.row) + least
                elif price > 1.0:
                    left = (left - least) * price + least
                if loaded:
                    left += loaded.get(replica_id, 0) * replica.tier_pace
            work[replica.row] = left
    return work


def pulls_faster(replica_id: str, loads: LoadTable) -> bool:
    """Return whether a known replica copies KV faster than it computes it."""
    replica = loads.replicas.get(replica_id)
    return replica is not None and replica.pull_pace < 1.0


def plan_pull(view: RoutingView, replica_id: str, cached_tokens: int) -> tuple[str, int]:
    """Return the least busy of the replicas that hold most, and the tokens to pull from it; ("", 0): no pull."""
    most, loads = view.best_tokens, view.loads
    if most - cached_tokens < view.settings.min_pull_tokens or not pulls_faster(replica_id, loads):
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
    cached = available = view.match.get(replica_id, 0)
    if view.pending:
        available = max(available, view.pending.get(replica_id, 0))
    loads = view.loads
    replica = loads.replicas[replica_id]
    pull_from, pull_tokens, pull_s = "", 0, 0.0
    if loads.num_pulling and view.request.store_kv and view.best_tokens > available:
        pull_from, pull_tokens = plan_pull(view, replica_id, available)
        if pull_tokens:
            pull_s = (pull_tokens - available) * replica.pull_pace * replica.seconds_per_token
            available = pull_tokens
    uncached = max(view.request.prompt_tokens - available, 1)
    ahead = float(replica.queued_tokens)
    if ahead and view.settings.shortest_first:
        # The queue as in ``ttft_scores``. Only scores count the delay of others and ``SHARED_PREFILL``.
        ratio, committed = uncached * replica.falloff, replica.committed_tokens
        ahead = committed + (ahead - committed) * (1.0 - (1.0 - ratio) * exp(ratio))
    loading = view.loaded.get(replica_id, 0) * replica.tier_pace
    wait_s = (ahead + uncached + loading) * replica.seconds_per_token
    if view.adapter_s is not None:
        wait_s += float(view.adapter_s[replica.row])
    return Estimate(cached, uncached, pull_from, pull_tokens, wait_s + pull_s)


Match = Mapping[str, int]
"""Cached tokens by replica."""


class Candidate(NamedTuple):
    """One replica in a ranking. A lower ``score`` is better. Scores are comparable within one policy only."""

    replica_id: str
    score: float
    reason: Reason


_NOTHING: Match = MappingProxyType({})


class RoutingView(NamedTuple):
    """The input of one decision. ``match``: cached tokens by replica, from the directory.

    ``turn`` rises by one with each decision. ``blocked``: replicas that cannot accept a request for reasons known only
    to the caller. ``pending``: tokens by replica that an unfinished prefill of the same prefix will cache. ``closed``:
    further rows that cannot accept it. ``adapter_s``: by row, the request's wait in seconds for its LoRA adapter; None:
    no wait, or the same wait everywhere. ``now_s``: the router's clock. ``quiet``: replicas that send nothing while
    others do. ``loaded``: tokens of the match that a replica with measured loads has only below its pool.
    """

    request: RoutedRequest
    match: Match
    loads: LoadTable
    turn: int
    rng: Random
    settings: PolicySettings = PolicySettings()
    blocked: Collection[str] = ()
    pending: Match = _NOTHING
    closed: npt.NDArray[np.bool_] | None = None
    adapter_s: Floats | None = None
    now_s: float = 0.0
    quiet: Collection[str] = ()
    loaded: Match = _NOTHING

    @property
    def best_tokens(self) -> int:
        """The most tokens that any replica has cached."""
        return max(self.match.values()) if self.match else 0

    def attribute(self, name: str, default: float) -> Floats:
        """Return by row a numeric attribute of the replicas (``replica_attributes``), or ``default``."""
        values = (self.loads.replicas[replica_id].report.attributes.get(name) for replica_id in self.loads.replica_ids)
        return np.array([default if value is None or isinstance(value, str) else value for value in values], np.float64)


def rendezvous(placement_key: bytes, loads: LoadTable) -> npt.NDArray[np.uint64]:
    """Return each row's weight for a key, equal in all routers. A new or removed replica moves only its own keys."""
    mixed = loads.seeds ^ np.uint64(xxhash.xxh3_64_intdigest(placement_key))
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    mixed ^= mixed >> np.uint64(33)
    return mixed


def longest(match: Match, pending: Match) -> Match:
    """Return the larger of two counts by replica."""
    near = dict(match)
    for replica_id, tokens in pending.items():
        if tokens > near.get(replica_id, 0):
            near[replica_id] = tokens
    return near


def uncached_tokens(view: RoutingView) -> Floats:
    """Return by row the prompt tokens left to compute after a match, at least 1."""
    prompt_tokens, replicas = max(view.request.prompt_tokens, 1), view.loads.replicas
    uncached = np.full(len(replicas), float(prompt_tokens))
    for replica_id, tokens in view.match.items():
        replica = replicas.get(replica_id)
        if replica is not None:
            uncached[replica.row] = max(prompt_tokens - tokens, 1)
    return uncached


def closed_rows(view: RoutingView) -> tuple[npt.NDArray[np.bool_] | None, int]:
    """Return the ineligible rows (None: no row) and the number eligible.

    Rows to avoid are ineligible only while others are open, and quiet ones while others of the same kind are.
    """
    loads, avoid, quiet = view.loads, view.request.avoid, view.quiet
    rows = len(loads.replica_ids)
    if not loads.num_full and not view.blocked and not avoid and not quiet and view.closed is None:
        return None, rows
    closed = loads.full.copy() if view.closed is None else loads.full | view.closed
    _close(closed, view.blocked, loads)
    for worse in (avoid, quiet):
        preferred = closed.copy()
        _close(preferred, worse, loads)
        if not preferred.all():
            closed = preferred
    return closed, rows - int(np.count_nonzero(closed))


def _close(closed: npt.NDArray[np.bool_], replica_ids: Collection[str], loads: LoadTable) -> None:
    for replica_id in replica_ids:
        row = loads.row_of(replica_id)
        if row is not None:
            closed[row] = True


def open_rows(view: RoutingView) -> list[int]:
    """Return the eligible rows."""
    closed, _ = closed_rows(view)
    if closed is None:
        return list(range(len(view.loads.replica_ids)))
    rows: list[int] = np.flatnonzero(~closed).tolist()
    return rows


def best_rows(scores: Floats, uncached: Floats, view: RoutingView, limit: int, tolerance: float) -> list[int]:
    """Return the best ``limit`` rows: near-best scores by uncached tokens and rendezvous, other rows by score."""
    best = scores.item(scores.argmin())
    # An array, because comparing with a number costs a conversion.
    bound = np.array(best + abs(best) * tolerance)
    near = (scores <= bound).nonzero()[0]
    if limit == 1:
        if len(near) > 1:
            left = uncached[near]
            near = near[left == left.min()]
            if len(near) > 1:
                return [int(near[rendezvous(view.request.placement_key, view.loads)[near].argmax()])]
        return [near.item(0)]
    weights = rendezvous(view.request.placement_key, view.loads)
    nearest = near[np.lexsort((~weights[near], uncached[near]))]
    rest = (scores > bound).nonzero()[0]
    rest = rest[np.lexsort((~weights[rest], scores[rest]))]
    ranked: list[int] = np.concatenate((nearest, rest))[:limit].tolist()
    return ranked


def scored(
    scores: Floats, uncached: Floats, view: RoutingView, limit: int | None, tolerance: float = 0.0
) -> list[Candidate]:
    """Rank the eligible rows by score. Scores within ``tolerance`` of the best are ranked by ``uncached`` tokens."""
    closed, routable = closed_rows(view)
    if not routable:
        return []
    if closed is not None:
        scores = np.where(closed, np.inf, scores)
    match, pending, best = view.match, view.pending, view.best_tokens
    candidates = []
    for row in best_rows(scores, uncached, view, min(limit or routable, routable), tolerance):
        replica_id = view.loads.replica_ids[row]
        if routable == 1:
            reason: Reason = "only_replica"
        elif 0 < best == match.get(replica_id, 0):
            reason = "cached"
        elif pending.get(replica_id, 0) > best:
            reason = "in_flight"
        else:
            reason = "load_spill" if best > 0 else "cold"
        candidates.append(Candidate(replica_id, scores.item(row), reason))
    return candidates


def listed(rows: list[int], reason: Reason, view: RoutingView, limit: int | None) -> list[Candidate]:
    """Return candidates for rows already in order. Their score is their rank, from 0."""
    if len(rows) == 1:
        reason = "only_replica"
    return [Candidate(view.loads.replica_ids[row], float(rank), reason) for rank, row in enumerate(rows[:limit])]
