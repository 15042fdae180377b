"""The parts of every policy: a view of one request and the replicas, candidates, and the order of rows.

It owns ties, rendezvous order and eligibility: full and blocked replicas are never chosen, quiet ones and those to
avoid only when no other is open. A row is a replica's place in ``LoadTable``'s columns. Arrays here have one entry for
each row.
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
    others do.
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
    held = dict(match)
    for replica_id, tokens in pending.items():
        if tokens > held.get(replica_id, 0):
            held[replica_id] = tokens
    return held


def uncached_tokens(view: RoutingView) -> Floats:
    """Return by row the prompt tokens left to compute after a match, at least 1."""
    prompt_tokens, replicas = max(view.request.prompt_tokens, 1), view.loads.replicas
    uncached = np.full(len(replicas), float(prompt_tokens))
    for replica_id, held in view.match.items():
        replica = replicas.get(replica_id)
        if replica is not None:
            uncached[replica.row] = max(prompt_tokens - held, 1)
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
