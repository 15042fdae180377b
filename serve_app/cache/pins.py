"""Which cached prefixes must stay, and until when.

Owns pins by key inside a budget of blocks, and their TTLs, which every read renews. Knows nothing of hashes,
tokens or pools: whoever keeps it holds a pool reference for each pin, so that a pinned block counts as in use.
A block under several pins counts once. Not thread-safe, except the counts.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

PinOutcome = Literal["pinned", "present", "over_budget"]


@dataclass(slots=True, eq=False)
class Pin:
    """One pinned prefix. ``ttl_s`` None: stays until it is unpinned."""

    key: bytes
    blocks: tuple[int, ...]
    ttl_s: float | None
    expires_s: float


class Pins:
    """Pins by key. The blocks of a pin are a whole prefix, so a read of its last block read all of it."""

    def __init__(self, budget_blocks: int) -> None:
        if budget_blocks < 0:
            raise ValueError("a pin budget must not be negative")
        self.budget_blocks = budget_blocks
        self._pins: dict[bytes, Pin] = {}
        self._counts: Counter[int] = Counter()
        self._tails: dict[int, list[Pin]] = {}
        self._expiries: list[tuple[float, int, Pin]] = []
        self._entries = 0

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

    def counts(self) -> dict[int, int]:
        """Return the pins each pinned block is under (any thread)."""
        return dict(self._counts)

    def holds(self, block: int) -> bool:
        """Return whether a block is pinned."""
        return block in self._counts

    def fits(self, more_blocks: int) -> bool:
        """Return whether that many blocks not pinned yet are within the budget."""
        return len(self._counts) + more_blocks <= self.budget_blocks

    def add(self, key: bytes, blocks: Sequence[int], ttl_s: float | None, now_s: float) -> PinOutcome:
        """Pin a prefix of at least one block; what is pinned under that key already stays as it is, renewed."""
        if self.renew(key, ttl_s, now_s):
            return "present"
        if not self.fits(sum(1 for block in blocks if block not in self._counts)):
            return "over_budget"
        pin = self._pins[key] = Pin(key, tuple(blocks), ttl_s, math.inf if ttl_s is None else now_s + ttl_s)
        self._counts.update(pin.blocks)
        self._tails.setdefault(pin.blocks[-1], []).append(pin)
        self._queue(pin)
        return "pinned"

    def renew(self, key: bytes, ttl_s: float | None, now_s: float) -> bool:
        """Let a pin's time run from now, by the longer of its TTL and ``ttl_s``; False when there is none."""
        pin = self._pins.get(key)
        if pin is None:
            return False
        if pin.ttl_s is not None:
            pin.ttl_s = None if ttl_s is None else max(ttl_s, pin.ttl_s)
            pin.expires_s = math.inf if pin.ttl_s is None else now_s + pin.ttl_s
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
        for block in pin.blocks:
            self._counts[block] -= 1
            if not self._counts[block]:
                del self._counts[block]
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

    def _queue(self, pin: Pin) -> None:
        """Put a pin that will end in the line, once; a read moves only its ``expires_s``, looked at when it is due."""
        if pin.ttl_s is not None:
            self._entries += 1
            heapq.heappush(self._expiries, (pin.expires_s, self._entries, pin))
