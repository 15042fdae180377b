"""Pulls: when a replica lacks a prefix that another one holds, is copying its KV faster than computing it?

Pure functions over matches and loads, for scores and for the plan of one decision. Knows neither how KV travels nor
whether a pull succeeds: the chosen replica computes whatever did not arrive.
"""

from __future__ import annotations

import numpy as np

from router.load import Floats, LoadTable
from router.ranking import Match, PolicySettings
from router.request import RoutedRequest


def work_with_pull(
    own: Floats, request: RoutedRequest, match: Match, loads: LoadTable, settings: PolicySettings
) -> Floats:
    """Return by row the work of a request in prefill tokens, where missing KV is pulled if that is faster.

    A pulled token costs ``pull_price`` x the prefill tokens that would be computed meanwhile. ``own``: uncached tokens
    without a pull.
    """
    least = max(request.prompt_tokens - max(match.values()), 1)
    pulled = own - least
    pulled[pulled < settings.min_pull_tokens] = np.inf
    pulled *= loads.pull_pace
    pulled *= settings.pull_price
    pulled += least
    return np.minimum(own, pulled, out=pulled)


def pulls_faster(replica_id: str, loads: LoadTable) -> bool:
    """Return whether a known replica copies KV faster than it computes it."""
    row = loads.row_of(replica_id)
    return row is not None and float(loads.pull_pace[row]) < 1.0


def plan_pull(
    replica_id: str, held_tokens: int, match: Match, loads: LoadTable, settings: PolicySettings
) -> tuple[str, int]:
    """Return who should hand its KV to a replica that holds ``held_tokens``, and how much; ("", 0): nobody.

    Of those that hold most, the one with the least prefill work.
    """
    most = max(match.values(), default=0)
    missing = most - held_tokens
    if missing < settings.min_pull_tokens or not pulls_faster(replica_id, loads):
        return "", 0
    holders = [name for name, tokens in match.items() if tokens == most and loads.row_of(name) is not None]
    return (min(holders, key=loads.queue_ahead), most) if holders else ("", 0)
