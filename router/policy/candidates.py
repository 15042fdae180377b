"""What every policy is made of: candidates, settings, context, and the order of rows.

Owns ties, rendezvous order and the rule who may be chosen: full and blocked replicas never, those to avoid only
when no other is open. Knows no scoring rule. Reasons are stable words that counters use.
"""

from __future__ import annotations

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


_DEFAULTS = PolicySettings()
_NOTHING: Match = MappingProxyType({})


class PolicyContext(NamedTuple):
    """What a policy needs besides request, match and loads. ``turn`` rises by one a decision.

    ``blocked``: replicas that cannot take a request for a reason only the caller knows. ``pending``: tokens that
    an unfinished prefill of the same prefix will have cached, by replica. ``closed``: further rows that cannot take it.
    ``adapter_s``: by row, the seconds that the request waits there for its LoRA adapter; None: nowhere, or for as long
    everywhere.
    """

    turn: int
    rng: Random
    settings: PolicySettings = _DEFAULTS
    blocked: Collection[str] = ()
    pending: Match = _NOTHING
    closed: npt.NDArray[np.bool_] | None = None
    adapter_s: Floats | None = None


def rendezvous(placement_key: bytes, loads: LoadTable) -> npt.NDArray[np.uint64]:
    """Return each row's weight for a key; the order of weights is the same in every router.

    A replica that joins or leaves moves only the keys it wins or won.
    """
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


def uncached_tokens(request: RoutedRequest, match: Match, loads: LoadTable) -> Floats:
    """Return by row the prompt tokens left to compute after a match; at least 1."""
    prompt_tokens = max(request.prompt_tokens, 1)
    own = np.empty(len(loads.replica_ids))
    own.fill(prompt_tokens)
    for replica_id, held in match.items():
        replica = loads.replicas.get(replica_id)
        if replica is not None:
            own[replica.row] = max(prompt_tokens - held, 1)
    return own


def closed_rows(
    request: RoutedRequest, loads: LoadTable, context: PolicyContext
) -> tuple[npt.NDArray[np.bool_] | None, int]:
    """Return the rows that may not be chosen (None: every row may) and how many may.

    Replicas to avoid are closed only while another one is open.
    """
    rows = len(loads.replica_ids)
    if not loads.num_full and not context.blocked and not request.avoid and context.closed is None:
        return None, rows
    closed = loads.full.copy() if context.closed is None else loads.full | context.closed
    for replica_id in context.blocked:
        row = loads.row_of(replica_id)
        if row is not None:
            closed[row] = True
    preferred = closed.copy()
    for replica_id in request.avoid:
        row = loads.row_of(replica_id)
        if row is not None:
            preferred[row] = True
    if not preferred.all():
        closed = preferred
    return closed, rows - int(np.count_nonzero(closed))


def open_rows(request: RoutedRequest, loads: LoadTable, context: PolicyContext) -> list[int]:
    """Return the rows that may be chosen."""
    closed, _ = closed_rows(request, loads, context)
    if closed is None:
        return list(range(len(loads.replica_ids)))
    rows: list[int] = np.flatnonzero(~closed).tolist()
    return rows


def best_rows(
    scores: Floats, own: Floats, request: RoutedRequest, loads: LoadTable, tolerance: float, limit: int
) -> list[int]:
    """Return the best ``limit`` rows: near-best scores by uncached tokens and rendezvous, the others by score."""
    best = scores.item(scores.argmin())
    # An array, for comparing with a number costs a conversion.
    bound = np.array(best + abs(best) * tolerance)
    near = (scores <= bound).nonzero()[0]
    if limit == 1:
        if len(near) > 1:
            left = own[near]
            near = near[left == left.min()]
            if len(near) > 1:
                return [int(near[rendezvous(request.placement_key, loads)[near].argmax()])]
        return [near.item(0)]
    weights = rendezvous(request.placement_key, loads)
    nearest = near[np.lexsort((~weights[near], own[near]))]
    rest = (scores > bound).nonzero()[0]
    rest = rest[np.lexsort((~weights[rest], scores[rest]))]
    ranked: list[int] = np.concatenate((nearest, rest))[:limit].tolist()
    return ranked


def scored(
    scores: Floats,
    own: Floats,
    request: RoutedRequest,
    match: Match,
    loads: LoadTable,
    context: PolicyContext,
    limit: int | None,
    tolerance: float = 0.0,
) -> list[Candidate]:
    """Rank the rows that may be chosen by score."""
    closed, routable = closed_rows(request, loads, context)
    if not routable:
        return []
    if closed is not None:
        scores = np.where(closed, np.inf, scores)
    best = max(match.values()) if match else 0
    candidates = []
    for row in best_rows(scores, own, request, loads, tolerance, min(limit or routable, routable)):
        replica_id = loads.replica_ids[row]
        held = match.get(replica_id, 0)
        if routable == 1:
            reason: Reason = "only_replica"
        elif 0 < best == held:
            reason = "cached"
        elif context.pending.get(replica_id, 0) > best:
            reason = "in_flight"
        else:
            reason = "load_spill" if best > 0 else "cold"
        candidates.append(Candidate(replica_id, scores.item(row), reason))
    return candidates


def listed(rows: list[int], reason: Reason, loads: LoadTable, limit: int | None) -> list[Candidate]:
    """Return candidates for rows already in order; their score is their rank."""
    if len(rows) == 1:
        reason = "only_replica"
    return [Candidate(loads.replica_ids[row], float(rank), reason) for rank, row in enumerate(rows[:limit])]
