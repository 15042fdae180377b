"""How many requests of each tenant wait at one engine, and where its line ends for a tenant. Not thread-safe."""

from __future__ import annotations

from collections import Counter

from serve_app.engine.protocol import QueueFull
from serve_app.fairness.shares import UNBORROWED_PART


class WaitingByTenant:
    """Waiting requests. ``tenants``: how many there can be."""

    def __init__(self, most: int, tenants: int) -> None:
        self.tenants = tenants
        self._most = most
        self._waiting: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Requests that wait, of all tenants."""
        return self._waiting.total()

    def check(self, tenant: str, retry_after_s: float) -> None:
        """Raise QueueFull where the line is full for a tenant.

        Among several tenants the last eighth is for those that do not fill more than their part of the line.
        """
        most = self._most
        others = sum(1 for other in self._waiting if other != tenant)
        if self.tenants > 1 and self._waiting[tenant] >= max(1, most // (others + 2)):
            most -= most // UNBORROWED_PART
        if self.count >= most:
            raise QueueFull(f"{self.count} requests are waiting", retry_after_s)

    def add(self, tenant: str) -> None:
        """Count one more."""
        self._waiting[tenant] += 1

    def remove(self, tenant: str) -> None:
        """Count one less."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
