"""What every policy is made of: a view of one request and the replicas, candidates, and the order of rows.

Owns ties, rendezvous order and the rule who may be chosen: full and blocked replicas never, those to avoid only
when no other is open. A row is a replica's place in ``LoadTable``'s columns; arrays here have one entry a row.
"""

from collections.abc import Collection, Mapping
from random import Random
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from router.load.load_table import Floats, LoadTable
from router.protocol.request import Reason, RoutedRequest
from router.settings import PolicySettings

Match = Mapping[str, int]
"""Cached tokens by replica."""


class Candidate(NamedTuple):
    """One replica in a ranking; a lower ``score`` is better, within one policy only."""

    replica_id: str
    score: float
    reason: Reason


_NOTHING: Match = MappingProxyType({})


class RoutingView(NamedTuple):
    """All that one decision is made from. ``match``: tokens that the directory believes cached.

    ``turn`` rises by one a decision. ``blocked``: replicas that cannot take a request for a reason only the caller
    knows. ``pending``: tokens that an unfinished prefill of the same prefix will have cached, by replica. ``closed``:
    further rows that cannot take it. ``adapter_s``: by row, the seconds that the request waits there for its LoRA
    adapter; None: nowhere, or for as long everywhere. ``overhead_s``: what a first token takes beside the work, the
    same everywhere; it is part of estimates and of no score. ``now_s``: the router's clock. ``labels``: of each
    replica's node, as Ray has them. ``counted``: False where the same request was counted before.
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
    overhead_s: float = 0.0
    now_s: float = 0.0
    labels: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    counted: bool = True

    @property
    def best_tokens(self) -> int:
        """The most that any replica has cached."""
        return max(self.match.values()) if self.match else 0


def rendezvous(placement_key: bytes, loads: LoadTable) -> npt.NDArray[np.uint64]:
    """Return each row's weight for a key, in every router alike: who joins or leaves moves only the keys it has."""
    mixed = loads.seeds ^ np.uint64(xxhash.xxh3_64_intdigest(placement_key))
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    mixed ^= mixed >> np.uint64(33)
    return mixed


def longest(match: Match, pending: Match) -> Match:
    """Return by replica the larger of two counts."""
    held = dict(match)
    for replica_id, tokens in pending.items():
        if tokens > held.get(replica_id, 0):
            held[replica_id] = tokens
    return held


def uncached_tokens(view: RoutingView) -> Floats:
    """Return by row the prompt tokens left to compute after a match; at least 1."""
    prompt_tokens, replicas = max(view.request.prompt_tokens, 1), view.loads.replicas
    uncached = np.full(len(replicas), float(prompt_tokens))
    for replica_id, held in view.match.items():
        replica = replicas.get(replica_id)
        if replica is not None:
            uncached[replica.row] = max(prompt_tokens - held, 1)
    return uncached


def closed_rows(view: RoutingView) -> tuple[npt.NDArray[np.bool_] | None, int]:
    """Return the rows that may not be chosen (None: all may; one to avoid, while another is open); how many may."""
    loads, avoid = view.loads, view.request.avoid
    rows = len(loads.replica_ids)
    if not loads.num_full and not view.blocked and not avoid and view.closed is None:
        return None, rows
    closed = loads.full.copy() if view.closed is None else loads.full | view.closed
    _close(closed, view.blocked, loads)
    preferred = closed.copy()
    _close(preferred, avoid, loads)
    if not preferred.all():
        closed = preferred
    return closed, rows - int(np.count_nonzero(closed))


def _close(closed: npt.NDArray[np.bool_], replica_ids: Collection[str], loads: LoadTable) -> None:
    for replica_id in replica_ids:
        row = loads.row_of(replica_id)
        if row is not None:
            closed[row] = True


def open_rows(view: RoutingView) -> list[int]:
    """Return the rows that may be chosen."""
    closed, _ = closed_rows(view)
    if closed is None:
        return list(range(len(view.loads.replica_ids)))
    rows: list[int] = np.flatnonzero(~closed).tolist()
    return rows


def best_rows(scores: Floats, uncached: Floats, view: RoutingView, limit: int, tolerance: float) -> list[int]:
    """Return the best ``limit`` rows: near-best scores by uncached tokens and rendezvous, the others by score."""
    best = scores.item(scores.argmin())
    # An array, for comparing with a number costs a conversion.
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
    """Rank the rows that may be chosen by score; scores within ``tolerance`` of the best go by ``uncached`` tokens."""
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
    """Return candidates for rows already in order; their score is their rank, from 0."""
    if len(rows) == 1:
        reason = "only_replica"
    return [Candidate(view.loads.replica_ids[row], float(rank), reason) for rank, row in enumerate(rows[:limit])]
