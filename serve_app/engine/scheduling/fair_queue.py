"""Whose prompt tokens are computed next: turns of tenants (``fairness.Turns``), short for who used most lately.

Owns what each tenant used in recent steps, decodes too: they are not held back, but lengthen every step.
Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), counts generated tokens as service too.
"""

from collections.abc import Collection, Mapping

from serve_app.fairness.shares import Turns

LEAST_STEP_TOKENS = 512
"""A step prefills at least so much: smaller ones make prefill dearer, for weights are read once a step."""

QUANTUM_TOKENS = LEAST_STEP_TOKENS // 4
"""Tokens a turn, at most a quarter of a step: small enough that a step serves several tenants."""

DECODE_TOKENS = 8
"""Prompt tokens that a decode counts as: about what its part of a step could prefill."""

RECENT_STEPS = 100
"""What was used counts e times less after so many steps: some seconds."""

SHORTEST_TURN_PART = 16
"""A turn is at least one part in this many of a quantum: who uses most is slower beside others, and never stopped."""


class FairQueue(Turns):
    """The tenants with prefill work in steps of up to ``max_num_batched_tokens``."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.quantum_tokens = max(1, min(QUANTUM_TOKENS, max_num_batched_tokens // 4))
        super().__init__(self._turn_tokens)
        self._used: dict[str, float] = {}
        self._mean_used = 0.0
        self._awaited: Collection[str] = ()

    def coming(self, tenants: Collection[str], decodes: Mapping[str, int]) -> dict[str, int]:
        """Return the tokens of each tenant's next turn, where the next step has so many ``decodes``.

        Of a turn that has begun, which is one at most, what is left of it.
        """
        used = self._recent(decodes)
        mean = _mean(used)
        return {
            tenant: max(0, self.credit.get(tenant, 0)) or self._quantum(used.get(tenant, 0.0), mean)
            for tenant in tenants
        }

    def begin(self, tenants: Collection[str], decodes: Mapping[str, int], awaited: Collection[str] = ()) -> None:
        """Start a step with so many ``decodes``, by tenant: who has work now keeps its place; who is new comes last.

        ``awaited``: tenants whose work others wait for; their turns are not shortened.
        """
        self._awaited = awaited
        for tenant in self.credit.keys() - set(tenants):
            self.leave(tenant)
        for tenant in tenants:
            self.join(tenant)
        self._used = self._recent(decodes)
        self._mean_used = _mean(self._used)

    def head(self) -> tuple[str, int] | None:
        """Return the tenant whose turn it is and the tokens it may use; None when nobody is left."""
        if not self.credit:
            return None
        tenant = self.next(self.credit)
        return tenant, self.credit[tenant]

    def is_heavy(self, tenant: str) -> bool:
        """Whether a tenant's turns are short now, for it used more than the mean lately."""
        return self._turn_tokens(tenant) < self.quantum_tokens

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
        # Squared: who used twice the mean gets a quarter, so that the others come to theirs within some steps.
        part = max((mean / used) ** 2, 1 / SHORTEST_TURN_PART)
        return max(1, int(self.quantum_tokens * part))


def _mean(used: Mapping[str, float]) -> float:
    return sum(used.values()) / len(used) if used else 0.0
