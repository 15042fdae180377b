"""Deficit round robin over tenants: whose prompt tokens are computed next; the turns of who used most lately are short.

Owns the order of tenants, their credit in uncached prompt tokens, and what each used in recent steps, decodes too: they
are not held back, but lengthen every step. Bound: a tenant that gets work is served before the others had more than
one quantum each, so with n tenants at work it waits for at most (n - 1) quanta. Without work nobody has credit.
Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), counts generated tokens as service too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping

from serve_app.engine.scheduling.step_size import LEAST_STEP_TOKENS

QUANTUM_TOKENS = LEAST_STEP_TOKENS // 4
"""Tokens a turn, at most a quarter of a step: small enough that a step serves several tenants."""

DECODE_TOKENS = 8
"""Prompt tokens that a decode counts as: about what its part of a step could prefill."""

RECENT_STEPS = 100
"""What was used counts e times less after so many steps: some seconds."""

SHORTEST_TURN_PART = 16
"""A turn is at least one part in this many of a quantum: who uses most is slower beside others, and never stopped."""


def quantum_tokens(max_num_batched_tokens: int) -> int:
    """Return the tokens of a turn in steps of up to ``max_num_batched_tokens``."""
    return max(1, min(QUANTUM_TOKENS, max_num_batched_tokens // 4))


class FairQueue:
    """The ring of tenants with prefill work. The first one has the turn until its credit is spent."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.quantum_tokens = quantum_tokens(max_num_batched_tokens)
        self._credit: OrderedDict[str, int] = OrderedDict()
        self._used: dict[str, float] = {}
        self._mean_used = 0.0
        self._awaited: Collection[str] = ()

    @property
    def begun(self) -> dict[str, int]:
        """The tokens that are left of turns which have begun, by tenant: of at most one, the first."""
        return {tenant: credit for tenant, credit in self._credit.items() if credit > 0}

    def begin(self, tenants: Iterable[str], decodes: Mapping[str, int], awaited: Collection[str] = ()) -> None:
        """Start a step with so many ``decodes``, by tenant: who has work now keeps its place; who is new comes last.

        ``awaited``: tenants whose work others wait for; their turns are not shortened.
        """
        self._awaited = awaited
        before, self._credit = self._credit, OrderedDict()
        at_work = dict.fromkeys(tenants)
        self._credit.update((tenant, credit) for tenant, credit in before.items() if tenant in at_work)
        for tenant in at_work:
            self._credit.setdefault(tenant, 0)
        kept = 1 - 1 / RECENT_STEPS
        self._used = {tenant: kept * used for tenant, used in self._used.items() if used >= 1}
        for tenant, count in decodes.items():
            self._used[tenant] = self._used.get(tenant, 0.0) + DECODE_TOKENS * count
        self._mean_used = sum(self._used.values()) / len(self._used) if self._used else 0.0

    def head(self) -> tuple[str, int] | None:
        """Return the tenant whose turn it is and the tokens it may use; None when nobody is left."""
        if not self._credit:
            return None
        tenant, credit = next(iter(self._credit.items()))
        if credit <= 0:
            credit = self._credit[tenant] = self._turn_tokens(tenant)
        return tenant, credit

    def charge(self, tenant: str, tokens: int) -> None:
        """Take tokens from a tenant's credit; without any left its turn is over."""
        self._used[tenant] = self._used.get(tenant, 0.0) + tokens
        self._credit[tenant] -= tokens
        if self._credit[tenant] <= 0:
            self._credit.move_to_end(tenant)

    def leave(self, tenant: str) -> None:
        """Take a tenant out that has nothing more to compute in this step; its credit is lost."""
        del self._credit[tenant]

    def _turn_tokens(self, tenant: str) -> int:
        used, mean = self._used.get(tenant, 0.0), self._mean_used
        if used <= mean or not mean or tenant in self._awaited:
            return self.quantum_tokens
        # Squared: who used twice the mean gets a quarter, so that the others come to theirs within some steps.
        part = max((mean / used) ** 2, 1 / SHORTEST_TURN_PART)
        return max(1, int(self.quantum_tokens * part))
