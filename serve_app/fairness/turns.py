"""Deficit round robin: whose turn it is among tenants that have work, whatever the cost of each piece of it.

With n tenants at work one waits for at most a turn of each other, and what it took beyond its turn. Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection


class Turns:
    """The ring of tenants with work, and each one's ``credit``. ``turn``: the credit of a tenant's next turn."""

    def __init__(self, turn: Callable[[str], int]) -> None:
        self.credit: OrderedDict[str, int] = OrderedDict()
        self._turn = turn

    def join(self, tenant: str) -> None:
        """Put a tenant that has work at the ring's end, unless it is in it."""
        self.credit.setdefault(tenant, 0)

    def leave(self, tenant: str) -> None:
        """Take out a tenant without work: it has neither credit nor debt."""
        del self.credit[tenant]

    def next(self, able: Collection[str]) -> str:
        """Return whose turn it is of some tenants, given in the ring's order.

        Who comes to a turn gets the credit for it; who is in debt still is passed over.
        """
        credit = self.credit
        # The rounds in which nobody comes out of debt, at once.
        rounds = min(-credit[tenant] // self._turn(tenant) for tenant in able)
        if rounds > 0:
            for tenant in able:
                credit[tenant] += rounds * self._turn(tenant)
        for tenant in tuple(able):
            if credit[tenant] <= 0:
                credit[tenant] += self._turn(tenant)
            if credit[tenant] > 0:
                break
            credit.move_to_end(tenant)
        return tenant

    def charge(self, tenant: str, cost: int) -> None:
        """Take the cost of what was begun from a tenant's credit; without any left its turn is over."""
        self.credit[tenant] -= cost
        if self.credit[tenant] <= 0:
            self.credit.move_to_end(tenant)
