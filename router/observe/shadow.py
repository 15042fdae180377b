"""A second policy that decides about every request beside the acting one, and never acts.

It has its own counters, turn, randomness and demand for prefixes, and sees what the acting policy sees, before that
one's reservation. What its choices would have done to later loads and caches it cannot see: a prefix stays hot to it
while nobody becomes one more holder. A fault in it is counted and goes no further.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from router.observe.counters import DECISION_BUCKETS_S
from router.policy.candidates import Candidate, RoutingView
from router.policy.estimate import Estimate, estimate
from router.policy.policies import POLICIES
from router.protocol.samples import Histogram

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ShadowCounters:
    """Sums over the decisions that both policies made.

    ``acting_``: of the policy that acted, for comparison. ``faults`` are in no other number but ``decision_s``.
    """

    decisions: int = 0
    agreed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    acting_cached_tokens: int = 0
    estimated_ttft_s: float = 0.0
    acting_estimated_ttft_s: float = 0.0
    faults: int = 0
    by_reason: dict[str, int] = field(default_factory=dict)
    decision_s: Histogram = field(default_factory=lambda: Histogram(DECISION_BUCKETS_S))


class ShadowPolicy:
    """Compares one policy with the acting one. ``clock``: seconds, for its own decision time."""

    def __init__(self, policy: str, block_size: int, clock: Callable[[], float], rng: Random) -> None:
        self.policy = policy
        self._policy = POLICIES[policy](block_size)
        self._clock = clock
        self.counters = ShadowCounters()
        self._rng = rng
        self._turn = 0

    def compare(self, view: RoutingView, acting_replica_id: str, acting: Estimate) -> float:
        """Decide about a request that ``acting_replica_id`` is about to get, and count the difference.

        ``view``: the acting policy's. Returns the seconds it took. Never raises.
        """
        started_s = self._clock()
        try:
            self._turn += 1
            own = view._replace(turn=self._turn, rng=self._rng)
            chosen = self._policy.choose(own)
            assert chosen is not None, "the acting policy has chosen one, so somebody can take the request"
            estimated = estimate(own, chosen.replica_id)
        except Exception:
            self.counters.faults += 1
            if self.counters.faults == 1:
                logger.exception("the shadow policy %s failed; further faults are only counted", self.policy)
        else:
            self._count(view.request.prompt_tokens, chosen, estimated, acting_replica_id, acting)
        spent_s = self._clock() - started_s
        self.counters.decision_s.observe(spent_s)
        return spent_s

    def _count(
        self, prompt_tokens: int, chosen: Candidate, estimated: Estimate, acting_replica_id: str, acting: Estimate
    ) -> None:
        counters = self.counters
        counters.decisions += 1
        counters.agreed += chosen.replica_id == acting_replica_id
        counters.prompt_tokens += prompt_tokens
        counters.cached_tokens += estimated.cached_tokens
        counters.acting_cached_tokens += acting.cached_tokens
        counters.estimated_ttft_s += estimated.estimated_ttft_s
        counters.acting_estimated_ttft_s += acting.estimated_ttft_s
        counters.by_reason[chosen.reason] = counters.by_reason.get(chosen.reason, 0) + 1
