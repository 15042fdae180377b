"""Pulls: when a replica lacks a prefix that another one holds, is copying its KV faster than computing it?

Pure functions over matches and loads, for scores and for the plan of one decision. Knows neither how KV travels nor
whether a pull succeeds: the chosen replica computes whatever did not arrive.
"""

from __future__ import annotations

import numpy as np

from router.load.load_table import Floats, LoadTable
from router.policy.candidates import Match, longest
from router.protocol.request import RoutedRequest
from router.settings import PolicySettings

PULL_PRICE = 2.0
"""Seconds that a second of pulling weighs: a copy takes room from other prefixes and the link from other pulls."""


def work_tokens(
    request: RoutedRequest, match: Match, pending: Match, loads: LoadTable, settings: PolicySettings
) -> Floats:
    """Return by row the work of a request in prefill tokens; at least 1. Missing KV is pulled where that is faster.

    What a prefill under way (``pending``) will hold counts as held. A pulled token costs ``PULL_PRICE`` x the
    prefill tokens that would be computed meanwhile.
    """
    # Floats and an array of no dimension: a whole number would cost numpy a conversion each time.
    prompt = float(request.prompt_tokens) or 1.0
    least = prompt - max(match.values()) if match else prompt
    if least < 1.0:
        least = 1.0
    own = np.empty(len(loads.replica_ids))
    shares = None
    if loads.num_pulling and prompt - least >= settings.min_pull_tokens:
        shares = loads.pull_shares(PULL_PRICE)
        own.fill(least)
        own += shares * np.array(prompt - least)
    else:
        own.fill(prompt)
    replicas = loads.replicas
    for replica_id, held in (longest(match, pending) if pending else match).items():
        replica = replicas.get(replica_id)
        if replica is not None:
            left = prompt - held
            if left < 1.0:
                left = 1.0
            if shares is not None and left - least >= settings.min_pull_tokens:
                left = (left - least) * shares.item(replica.row) + least
            own[replica.row] = left
    return own


def pulls_faster(replica_id: str, loads: LoadTable) -> bool:
    """Return whether a known replica copies KV faster than it computes it."""
    replica = loads.replicas.get(replica_id)
    return replica is not None and replica.pull_pace < 1.0


def plan_pull(
    replica_id: str, held_tokens: int, match: Match, loads: LoadTable, settings: PolicySettings
) -> tuple[str, int]:
    """Return who should hand its KV to a replica that holds ``held_tokens``, and how much; ("", 0): nobody.

    Of those that hold most, the one with the least prefill work.
    """
    most = max(match.values(), default=0)
    if most - held_tokens < settings.min_pull_tokens or not pulls_faster(replica_id, loads):
        return "", 0
    holder, least = "", 0
    for name, tokens in match.items():
        if tokens == most:
            replica = loads.replicas.get(name)
            if replica is not None and (not holder or replica.queued_tokens < least):
                holder, least = name, replica.queued_tokens
    return (holder, most) if holder else ("", 0)
