"""The chosen replica's check of a decision: was the decision's load estimate far too low?

Another router's request may have arrived first. The replica then returns this one with its real load. Pure functions.
"""

from router.load.replica_load import DEFAULT_PREFILL_TOKENS_PER_S
from router.protocol.events import LoadReport
from router.protocol.request import Decision

MAX_REROUTES = 8
"""After this many returns, the next replica must accept the request."""

WORTH_ASKING_S = 0.02
"""An extra wait below this is not worth the two calls."""

_WORTH_ASKING = 0.1
"""Neither is an extra wait below this fraction of the expected work until the first token."""


def is_outdated(decision: Decision, load: LoadReport) -> bool:
    """Return whether far more tokens are queued than expected. ``load``: at the request's arrival, without it."""
    if decision.queued_tokens is None:
        return False
    unseen_tokens = load.queued_prefill_tokens - decision.queued_tokens
    unseen_s = unseen_tokens / (load.prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S)
    return unseen_s > max(WORTH_ASKING_S, _WORTH_ASKING * decision.estimated_ttft_s)
