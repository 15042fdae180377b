"""Deficit round robin over tenants: whose prompt tokens are computed next.

Owns the order of tenants and their credit, in uncached prompt tokens. Bound: a tenant that gets work is served before
the others had more than one quantum each, so with n tenants at work it waits for at most (n - 1) quanta. A tenant
without work has no credit: nobody saves up. Decodes are not held back, but they lengthen every step: a tenant's turn
is the shorter, the more of them it has.
Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), counts generated tokens as service too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from serve_app.engine.scheduling.step_size import LEAST_STEP_TOKENS

QUANTUM_TOKENS = LEAST_STEP_TOKENS // 4
"""Tokens a turn, at most a quarter of a step: small enough that a step serves several tenants."""

DECODE_TOKENS = 8
"""Tokens by which a running decode shortens its tenant's turns: about what its part of a step could prefill."""

SHORTEST_TURN_PART = 8
"""A turn is at least one part in this many of a quantum: decodes make a tenant slower, and never stop it."""


def quantum_tokens(max_num_batched_tokens: int) -> int:
    """Return the tokens of a turn in steps of up to ``max_num_batched_tokens``."""
    return max(1, min(QUANTUM_TOKENS, max_num_batched_tokens // 4))


class FairQueue:
    """The ring of tenants with prefill work. The first one has the turn until its credit is spent."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.quantum_tokens = quantum_tokens(max_num_batched_tokens)
        self._credit: OrderedDict[str, int] = OrderedDict()
        self._decodes: Mapping[str, int] = {}

    @property
    def begun(self) -> dict[str, int]:
        """The tokens that are left of turns which have begun, by tenant: of at most one, the first."""
        return {tenant: credit for tenant, credit in self._credit.items() if credit > 0}

    def begin(self, tenants: Iterable[str], decodes: Mapping[str, int]) -> None:
        """Start a step with so many ``decodes``, by tenant: who has work now keeps its place; who is new comes last."""
        self._decodes = decodes
        before, self._credit = self._credit, OrderedDict()
        at_work = dict.fromkeys(tenants)
        self._credit.update((tenant, credit) for tenant, credit in before.items() if tenant in at_work)
        for tenant in at_work:
            self._credit.setdefault(tenant, 0)

    def head(self) -> tuple[str, int] | None:
        """Return the tenant whose turn it is and the tokens it may use; None when nobody is left."""
        if not self._credit:
            return None
        tenant, credit = next(iter(self._credit.items()))
        if credit <= 0:
            shorter = self.quantum_tokens - DECODE_TOKENS * self._decodes.get(tenant, 0)
            credit = self._credit[tenant] = max(1, self.quantum_tokens // SHORTEST_TURN_PART, shorter)
        return tenant, credit

    def charge(self, tenant: str, tokens: int) -> None:
        """Take tokens from a tenant's credit; without any left its turn is over."""
        self._credit[tenant] -= tokens
        if self._credit[tenant] <= 0:
            self._credit.move_to_end(tenant)

    def leave(self, tenant: str) -> None:
        """Take a tenant out that has nothing more to compute in this step; its credit is lost."""
        del self._credit[tenant]
