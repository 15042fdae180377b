"""The order in which tenants prefill: a ``TenantQueue`` with turns that are shorter for tenants with high recent use.

Owns each tenant's use in recent steps, decodes included: they lengthen every step.
Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), counts generated tokens as service too.
"""

from collections import deque
from collections.abc import Collection, Mapping

from serve_app.fairness.queue import TenantQueue, W

LEAST_STEP_TOKENS = 512
"""A step prefills at least this many tokens. Smaller steps cost more per token, as each step reads all weights."""

QUANTUM_TOKENS = LEAST_STEP_TOKENS // 4
"""Tokens of a turn, at most a quarter of a step: small enough that a step serves several tenants."""

DECODE_TOKENS = 8
"""Prompt tokens that a decode counts as: roughly the prefill that fits in its part of a step."""

RECENT_STEPS = 100
"""After this many steps (some seconds) past use counts for 1/e."""

SHORTEST_TURN_PART = 16
"""A turn is at least this fraction (1/n) of a quantum: the heaviest tenant is slowed down, but never stopped."""


class FairQueue(TenantQueue[W]):
    """The tenants with prefill work in steps of up to ``max_num_batched_tokens``."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.quantum_tokens = max(1, min(QUANTUM_TOKENS, max_num_batched_tokens // 4))
        super().__init__(self._turn_tokens)
        self._used: dict[str, float] = {}
        self._mean_used = 0.0
        self._awaited: Collection[str] = ()

    def coming(self, tenants: Collection[str], decodes: Mapping[str, int]) -> dict[str, int]:
        """Return the tokens of each tenant's next turn if a new tenant comes, with that many ``decodes`` in the step.

        For a turn that has begun (at most one has), this is the rest of it.
        """
        used = self._recent(decodes)
        mean = _mean(used, newcomer=True)
        return {
            tenant: max(0, self.credit.get(tenant, 0)) or self._quantum(used.get(tenant, 0.0), mean)
            for tenant in tenants
        }

    def begin(self, lines: dict[str, deque[W]], decodes: Mapping[str, int], awaited: Collection[str] = ()) -> None:
        """Start a step with these ``decodes`` by tenant. Known tenants keep their place; new ones join at the end.

        ``awaited``: tenants that others wait for; their turns are not shortened.
        """
        self._awaited = awaited
        for tenant in self.credit.keys() - lines.keys():
            self.leave(tenant)
        for tenant in lines:
            self.join(tenant)
        self.lines = lines
        self._used = self._recent(decodes)
        self._mean_used = _mean(self._used, newcomer=any(tenant not in self._used for tenant in lines))

    def is_heavy(self, tenant: str) -> bool:
        """Return whether a tenant's turns are short now because its recent use exceeds the mean."""
        return self._turn_tokens(tenant) < self.quantum_tokens

    def next_turn(self, tenant: str) -> int:
        """Return the tokens of a tenant's next turn, or the rest of the one that has begun."""
        return max(0, self.credit.get(tenant, 0)) or self._turn_tokens(tenant)

    def charge(self, tenant: str, cost: int) -> None:
        """Take tokens from a tenant's credit."""
        self._used[tenant] = self._used.get(tenant, 0.0) + cost
        super().charge(tenant, cost)

    def _recent(self, decodes: Mapping[str, int]) -> dict[str, float]:
        kept = 1 - 1 / RECENT_STEPS
        recent = {tenant: kept * used for tenant, used in self._used.items() if used >= 1}
        for tenant, count in decodes.items():
            recent[tenant] = recent.get(tenant, 0.0) + DECODE_TOKENS * count
        return recent

    def _turn_tokens(self, tenant: str) -> int:
        if tenant in self._awaited:
            return self.quantum_tokens
        return self._quantum(self._used.get(tenant, 0.0), self._mean_used)

    def _quantum(self, used: float, mean: float) -> int:
        if used <= mean or not mean:
            return self.quantum_tokens
        # Squared: a tenant with twice the mean use gets a quarter, so the others catch up within some steps.
        part = max((mean / used) ** 2, 1 / SHORTEST_TURN_PART)
        return max(1, int(self.quantum_tokens * part))


def _mean(used: Mapping[str, float], *, newcomer: bool) -> float:
    """Return the mean recent use; of one tenant alone half of its own, if a ``newcomer`` begins beside it."""
    return sum(used.values()) / max(1 + newcomer, len(used))
