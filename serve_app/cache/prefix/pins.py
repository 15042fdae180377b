"""Which cached prefixes must stay, and until when.

Owns pins by key inside a budget of blocks, each tenant's share of it, and TTLs, which every read renews. A block under
several pins counts once, for each tenant once. Not thread-safe, except the counts. Laws: what is within a tenant's
share is never refused nor recalled; what is beyond it is lent until somebody needs their share.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

PinOutcome = Literal["pinned", "present", "over_budget"]


@dataclass(slots=True, eq=False)
class Pin:
    """One pinned prefix. ``ttl_s`` None: stays until it is unpinned."""

    key: bytes
    tenant: str
    blocks: tuple[int, ...]
    ttl_s: float | None
    expires_s: float


@dataclass(slots=True)
class _Account:
    """One tenant's pins, the oldest first, and how many of them each block is under."""

    pins: dict[bytes, Pin] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)


class Pins:
    """Pins by key. The blocks of a pin are a whole prefix, so a read of its last block read all of it.

    ``weights``: of the tenants' shares of the budget. With fewer than two there are no shares, and a tenant that is
    not among several has none: it only borrows.
    """

    def __init__(self, budget_blocks: int, weights: Mapping[str, float] | None = None) -> None:
        if budget_blocks < 0:
            raise ValueError("a pin budget must not be negative")
        self.budget_blocks = budget_blocks
        self.set_weights(weights or {})
        self._accounts: dict[str, _Account] = {}
        self._pins: dict[bytes, Pin] = {}
        self._counts: Counter[int] = Counter()
        self._tails: dict[int, list[Pin]] = {}
        self._expiries: list[tuple[float, int, Pin]] = []
        self._entries = 0
        self.on_end: Callable[[list[int]], None] | None = None
        """Called with the blocks that no pin keeps any more, while they are indexed still."""

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Go by other weights from now on; nothing is recalled before somebody needs the room."""
        total = sum(weights.values())
        self._shares = {name: int(self.budget_blocks * weight / total) for name, weight in weights.items()}

    def of_others(self, tenants: Collection[str]) -> list[bytes]:
        """Return the keys of all pins that are none of these tenants'."""
        return [key for key, pin in self._pins.items() if pin.tenant not in tenants]

    def __len__(self) -> int:
        """How many prefixes are pinned."""
        return len(self._pins)

    def __iter__(self) -> Iterator[bytes]:
        """The keys."""
        return iter(tuple(self._pins))

    @property
    def blocks(self) -> int:
        """Distinct pinned blocks."""
        return len(self._counts)

    @property
    def next_expiry_s(self) -> float | None:
        """A time at or before the next pin's end; None when no pin will end."""
        return self._expiries[0][0] if self._expiries else None

    def soonest_first(self) -> list[Pin]:
        """Return all pins by their ends."""
        return sorted(self._pins.values(), key=lambda pin: pin.expires_s)

    def counts(self) -> dict[int, int]:
        """Return the pins each pinned block is under (any thread)."""
        return dict(self._counts)

    def holdings(self) -> dict[str, int]:
        """Return the distinct blocks each tenant has pinned (any thread)."""
        return {tenant: len(account.counts) for tenant, account in self._accounts.copy().items()}

    def of_tenant(self, tenant: str) -> int:
        """Return how many prefixes a tenant has pinned."""
        account = self._accounts.get(tenant)
        return len(account.pins) if account is not None else 0

    def pinned_leading(self, blocks: Iterable[int], tenant: str | None = None) -> int:
        """Return how many leading blocks of a prefix are pinned, by anybody or by one tenant."""
        account = self._accounts.get(tenant) if tenant is not None else None
        counts = self._counts if tenant is None else account.counts if account is not None else {}
        return sum(1 for _ in takewhile(counts.__contains__, blocks))

    def room(self, tenant: str) -> tuple[int, int]:
        """Return how many distinct blocks a tenant has pinned, and how many it may have whatever others do."""
        account = self._accounts.get(tenant)
        budget_blocks = self.budget_blocks if len(self._shares) < 2 else self._shares.get(tenant, 0)
        return len(account.counts) if account is not None else 0, budget_blocks

    def fits(self, more_blocks: int, tenant: str, more_of_tenant: int) -> bool:
        """Return whether that many blocks not pinned yet, or not by the tenant, are within the budget.

        Within the tenant's share they are whatever others have borrowed: see ``recall``.
        """
        return len(self._counts) + more_blocks <= self.budget_blocks or self._within_share(tenant, more_of_tenant)

    def add(
        self, key: bytes, blocks: Sequence[int], ttl_s: float | None, now_s: float, tenant: str = "default"
    ) -> PinOutcome:
        """Pin a prefix of at least one block; what is pinned under that key already stays as it is, renewed."""
        if self.renew(key, ttl_s, now_s):
            return "present"
        if len(self._counts) + len(blocks) - self.pinned_leading(blocks) > self.budget_blocks:
            return "over_budget"
        pin = self._pins[key] = Pin(key, tenant, tuple(blocks), ttl_s, math.inf if ttl_s is None else now_s + ttl_s)
        account = self._accounts.setdefault(tenant, _Account())
        account.pins[key] = pin
        account.counts.update(pin.blocks)
        self._counts.update(pin.blocks)
        self._tails.setdefault(pin.blocks[-1], []).append(pin)
        self._queue(pin)
        return "pinned"

    def recall(self, blocks: Sequence[int], tenant: str) -> bytes | None:
        """Return the pin to remove so that a prefix within the tenant's share fits; None when nothing is lent.

        It is the last one of whoever is furthest beyond their share: what was pinned first is what the share is for.
        The caller removes it, and asks again while ``add`` finds no room.
        """
        if not self._within_share(tenant, len(blocks) - self.pinned_leading(blocks, tenant)):
            return None
        beyond = {name: len(one.counts) - self._shares.get(name, 0) for name, one in self._accounts.items()}
        furthest = max(beyond, key=beyond.__getitem__, default=None)
        if furthest is None or beyond[furthest] <= 0:
            return None
        return next(reversed(self._accounts[furthest].pins))

    def renew(self, key: bytes, ttl_s: float | None, now_s: float) -> bool:
        """Let a pin's time run from now, by the longer of its TTL and ``ttl_s``; False when there is none."""
        pin = self._pins.get(key)
        if pin is None:
            return False
        if pin.ttl_s is not None:
            pin.ttl_s = None if ttl_s is None else max(ttl_s, pin.ttl_s)
            pin.expires_s = math.inf if pin.ttl_s is None else max(pin.expires_s, now_s + pin.ttl_s)
        return True

    def read(self, blocks: Iterable[int], now_s: float) -> None:
        """Renew the pins that lie wholly within a prefix that is read."""
        if not self._expiries:
            return
        for block in blocks:
            for pin in self._tails.get(block, ()):
                if pin.ttl_s is not None:
                    pin.expires_s = now_s + pin.ttl_s

    def remove(self, key: bytes) -> tuple[int, ...]:
        """Drop a pin and return its blocks; () when there is none of that key."""
        pin = self._pins.pop(key, None)
        if pin is None:
            return ()
        account = self._accounts[pin.tenant]
        del account.pins[key]
        for counts in (self._counts, account.counts):
            for block in pin.blocks:
                counts[block] -= 1
                if not counts[block]:
                    del counts[block]
        if self.on_end is not None:
            self.on_end([block for block in pin.blocks if block not in self._counts])
        if not account.pins:
            del self._accounts[pin.tenant]
        tails = self._tails[pin.blocks[-1]]
        tails.remove(pin)
        if not tails:
            del self._tails[pin.blocks[-1]]
        return pin.blocks

    def expired(self, now_s: float) -> list[bytes]:
        """Return the keys whose time is over; the caller removes them. O(log n) for each entry that is due."""
        keys: list[bytes] = []
        while self._expiries and self._expiries[0][0] <= now_s:
            _, _, pin = heapq.heappop(self._expiries)
            if self._pins.get(pin.key) is not pin:
                continue
            if pin.expires_s > now_s:
                self._queue(pin)
            else:
                keys.append(pin.key)
        return keys

    def _within_share(self, tenant: str, more_blocks: int) -> bool:
        held_blocks, budget_blocks = self.room(tenant)
        return len(self._shares) >= 2 and held_blocks + more_blocks <= budget_blocks

    def _queue(self, pin: Pin) -> None:
        """Put a pin that will end in the line, once; a read moves only its ``expires_s``, looked at when it is due."""
        if pin.ttl_s is not None:
            self._entries += 1
            heapq.heappush(self._expiries, (pin.expires_s, self._entries, pin))
            if len(self._expiries) > 2 * len(self._pins) + 64:
                self._expiries = [entry for entry in self._expiries if self._pins.get(entry[2].key) is entry[2]]
                heapq.heapify(self._expiries)
