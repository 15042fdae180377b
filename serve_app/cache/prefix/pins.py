"""Pinned prefixes, which stay cached until their pins end.

It owns pins by key within a budget of blocks, each tenant's share of it, and TTLs, which every read renews. A block
under several pins counts once in all, and once for each tenant. Not thread-safe, except the counts. Invariants: pins
within a tenant's share are never refused or recalled; pins beyond it are lent until another tenant needs its share.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from serve_app.fairness.shares import Shares

PinOutcome = Literal["pinned", "present", "over_budget"]


@dataclass(slots=True, eq=False)
class Pin:
    """One pinned prefix. ``ttl_s`` None: it stays until it is unpinned."""

    key: bytes
    tenant: str
    blocks: tuple[int, ...]
    ttl_s: float | None
    expires_s: float

    def unread_s(self, now_s: float) -> float:
        """Return the seconds since its last read, or 0.0 without a TTL."""
        return 0.0 if self.ttl_s is None else max(0.0, self.ttl_s - (self.expires_s - now_s))


class Pins:
    """Pins by key. ``weights``: of tenants' shares. A tenant without one only borrows. Below two weights: no shares."""

    def __init__(self, budget_blocks: int, weights: Mapping[str, float] | None = None) -> None:
        if budget_blocks < 0:
            raise ValueError("a pin budget must not be negative")
        self.budget_blocks = budget_blocks
        self.set_weights(weights or {})
        self._pins: dict[bytes, Pin] = {}
        """Oldest first."""
        self._counts: Counter[int] = Counter()
        """The number of pins on each block."""
        self._tenants_counts: dict[str, Counter[int]] = {}
        self._soonest_s = math.inf
        self.on_end: Callable[[list[int]], None] | None = None
        """Called with the blocks that are no longer pinned, while they are still indexed."""

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Use new weights from now on. No pin is recalled before another tenant needs the space."""
        shares = Shares(weights)
        self._shares = {name: int(self.budget_blocks * shares.fraction(name, among=weights)) for name in weights}

    def of_others(self, tenants: Collection[str]) -> list[bytes]:
        """Return the keys of all pins of other tenants."""
        return [key for key, pin in self._pins.items() if pin.tenant not in tenants]

    def __len__(self) -> int:
        """The number of pinned prefixes."""
        return len(self._pins)

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the keys."""
        return iter(tuple(self._pins))

    @property
    def blocks(self) -> int:
        """The number of distinct pinned blocks."""
        return len(self._counts)

    @property
    def next_expiry_s(self) -> float | None:
        """A time at or before the next pin's end, or None when no pin will end."""
        return self._soonest_s if self._soonest_s < math.inf else None

    def soonest_first(self) -> list[Pin]:
        """Return all pins, sorted by expiry."""
        return sorted(self._pins.values(), key=lambda pin: pin.expires_s)

    def counts(self) -> dict[int, int]:
        """Return the number of pins on each pinned block (any thread)."""
        return dict(self._counts)

    def holdings(self) -> dict[str, int]:
        """Return the number of distinct pinned blocks by tenant (any thread)."""
        return {tenant: len(counts) for tenant, counts in self._tenants_counts.copy().items()}

    def of_tenant(self, tenant: str) -> int:
        """Return the number of a tenant's pinned prefixes."""
        return sum(1 for pin in self._pins.values() if pin.tenant == tenant)

    def pinned_leading(self, blocks: Iterable[int], tenant: str | None = None) -> int:
        """Return the number of a prefix's leading pinned blocks, by any tenant or by one."""
        counts = self._counts if tenant is None else self._tenants_counts.get(tenant) or Counter()
        return sum(1 for _ in takewhile(counts.__contains__, blocks))

    def room(self, tenant: str) -> tuple[int, int]:
        """Return the number of a tenant's distinct pinned blocks, and its guaranteed number."""
        budget_blocks = self.budget_blocks if len(self._shares) < 2 else self._shares.get(tenant, 0)
        return len(self._tenants_counts.get(tenant, ())), budget_blocks

    def add(
        self, key: bytes, blocks: Sequence[int], ttl_s: float | None, now_s: float, tenant: str = "default"
    ) -> PinOutcome:
        """Pin a prefix of at least one block. An existing pin of that key keeps its blocks and is renewed."""
        if self.renew(key, ttl_s, now_s):
            return "present"
        if len(self._counts) + len(blocks) - self.pinned_leading(blocks) > self.budget_blocks:
            return "over_budget"
        pin = self._pins[key] = Pin(key, tenant, tuple(blocks), ttl_s, math.inf if ttl_s is None else now_s + ttl_s)
        self._tenants_counts.setdefault(tenant, Counter()).update(pin.blocks)
        self._counts.update(pin.blocks)
        self._soonest_s = min(self._soonest_s, pin.expires_s)
        return "pinned"

    def recall(self, blocks: Sequence[int], tenant: str) -> bytes | None:
        """Return the pin to remove next, the last of the tenant most over its share, or None if no pin is lent."""
        own_blocks, share_blocks = self.room(tenant)
        more_blocks = len(blocks) - self.pinned_leading(blocks, tenant)
        if len(self._shares) < 2 or own_blocks + more_blocks > share_blocks:
            return None
        beyond = {name: len(counts) - self._shares.get(name, 0) for name, counts in self._tenants_counts.items()}
        furthest = max(beyond, key=beyond.__getitem__, default=tenant)
        if beyond.get(furthest, 0) <= 0:
            return None
        return next(key for key, pin in reversed(self._pins.items()) if pin.tenant == furthest)

    def renew(self, key: bytes, ttl_s: float | None, now_s: float) -> bool:
        """Restart a pin's time with the longer of its TTL and ``ttl_s``. Return False when there is no such pin.

        Of one whose time is over, and that nobody has removed yet, the TTL counts no more.
        """
        pin = self._pins.get(key)
        if pin is None:
            return False
        if pin.ttl_s is not None:
            pin.ttl_s = None if ttl_s is None else ttl_s if pin.expires_s <= now_s else max(ttl_s, pin.ttl_s)
            pin.expires_s = math.inf if pin.ttl_s is None else max(pin.expires_s, now_s + pin.ttl_s)
        return True

    def read(self, blocks: Iterable[int], now_s: float) -> None:
        """Renew the pins that a read prefix contains in full, unless their time is over."""
        if self._soonest_s == math.inf:
            return
        within = set(blocks)
        for pin in self._pins.values():
            if pin.ttl_s is not None and pin.expires_s > now_s and pin.blocks[-1] in within:
                pin.expires_s = now_s + pin.ttl_s

    def remove(self, key: bytes) -> tuple[int, ...]:
        """Remove a pin and return its blocks, or () when there is none of that key."""
        pin = self._pins.pop(key, None)
        if pin is None:
            return ()
        for counts in (self._counts, self._tenants_counts[pin.tenant]):
            for block in pin.blocks:
                counts[block] -= 1
                if not counts[block]:
                    del counts[block]
        if not self._tenants_counts[pin.tenant]:
            del self._tenants_counts[pin.tenant]
        if self.on_end is not None:
            self.on_end([block for block in pin.blocks if block not in self._counts])
        return pin.blocks

    def expired(self, now_s: float) -> list[bytes]:
        """Return the keys of expired pins, for the caller to remove. O(pins) when the first one is due."""
        if now_s < self._soonest_s:
            return []
        self._soonest_s = min((pin.expires_s for pin in self._pins.values() if pin.expires_s > now_s), default=math.inf)
        return [pin.key for pin in self._pins.values() if pin.expires_s <= now_s]
