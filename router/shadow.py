"""A second policy that decides beside the acting one and never acts, to tell what it would have chosen.

It sees what the acting policy sees, before that one's reservation, with a turn and a randomness of its own. So it knows
only the caches and queues that the acting policy's choices made: what its own would have done to them, it cannot see.
A fault in it is counted and goes no further.
"""

import logging
from collections.abc import Callable
from copy import copy
from random import Random

import xxhash

from router.candidates import Candidate, Estimate, RoutingView, estimate
from router.observe import ShadowCounters
from router.policies import POLICIES
from router.protocol.request import ShadowDecision

BUDGET_S = 7e-6
"""What comparing takes of a request on average: 10 us with what it does to the CPU's caches (`routing --shadow`)."""

_LATEST = 64
"""The number of comparisons that the measured time of one is from."""

_MOST_S = 1e-3
"""Of a comparison that took longer, the rest is other threads'."""

logger = logging.getLogger(__name__)


class ShadowPolicy:
    """Compares ``policy`` with the acting one. ``clock``: seconds; measures what a comparison takes.

    ``share``: the part of requests that are compared, chosen by their ids: all, or as many as ``BUDGET_S`` allows.
    """

    def __init__(self, policy: str, counters: ShadowCounters, clock: Callable[[], float], rng: Random) -> None:
        self.policy = policy
        self.share = 1.0
        self._counters = counters
        self._rank = POLICIES[policy].rank
        self._clock = clock
        self._rng = rng
        self._turn = 0
        self._cost_s = BUDGET_S

    def compare(self, view: RoutingView, replica_id: str, chosen: Estimate) -> ShadowDecision | None:
        """Return the shadow's decision about a request that ``replica_id`` is about to get; None: it is not compared.

        ``view``: the acting policy's; ``chosen``: the estimate of its choice. Never raises.
        """
        share = self.share
        if share < 1.0 and xxhash.xxh32_intdigest(view.request.request_id.encode(errors="replace")) >= share * 2**32:
            return None
        started_s = self._clock()
        decision = None
        try:
            self._turn += 1
            own = view._replace(turn=self._turn, rng=self._rng)
            other = self._rank(own, 1)[0].replica_id
            expected = chosen if other == replica_id else estimate(view, other)
            decision = ShadowDecision(
                self.policy, other, other == replica_id, expected.cached_tokens, expected.estimated_ttft_s
            )
            self._count(decision, view.request.prompt_tokens, chosen)
        except Exception:
            self._counters.faults += 1
            if self._counters.faults == 1:
                logger.exception("the shadow policy %s failed; further faults are only counted", self.policy)
        self._cost_s += (min(self._clock() - started_s, _MOST_S) - self._cost_s) / _LATEST
        self.share = 1.0 if self._cost_s <= BUDGET_S else BUDGET_S / self._cost_s
        return decision

    def ranked(self, view: RoutingView) -> list[Candidate]:
        """Return the ranking that the next comparison would use, without changing it."""
        return self._rank(view._replace(turn=self._turn + 1, rng=copy(self._rng)), None)

    def _count(self, decision: ShadowDecision, prompt_tokens: int, chosen: Estimate) -> None:
        counters = self._counters
        counters.decisions += 1
        counters.different += not decision.same
        counters.prompt_tokens += prompt_tokens
        counters.predicted_tokens += decision.predicted_tokens
        counters.acting_predicted_tokens += chosen.cached_tokens
        counters.estimated_ttft_s += decision.estimated_ttft_s
        counters.acting_estimated_ttft_s += chosen.estimated_ttft_s
