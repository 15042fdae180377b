"""A second look at a decision, by the replica that was chosen: was the load it was made from far too low?

Another router's request may have come first: the replica sends this one back with its load as it is. Pure functions.
"""

from router.load.replica_load import DEFAULT_PREFILL_TOKENS_PER_S
from router.protocol.events import LoadReport
from router.protocol.request import Decision

MAX_REROUTES = 8
"""A request that was sent back so often is taken by whoever gets it next."""

WORTH_ASKING_S = 0.02
"""A wait longer by less than this is not worth the two calls."""

_WORTH_ASKING = 0.1
"""Nor is one that is a smaller part of the work until the first token that was expected."""


def is_outdated(decision: Decision, load: LoadReport) -> bool:
    """Return whether far more is queued than was believed. ``load``: as the request arrives, without it."""
    if decision.queued_tokens is None:
        return False
    unseen_tokens = load.queued_prefill_tokens - decision.queued_tokens
    unseen_s = unseen_tokens / (load.prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S)
    return unseen_s > max(WORTH_ASKING_S, _WORTH_ASKING * decision.work_s)
