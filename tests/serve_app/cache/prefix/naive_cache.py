"""The oracle: a prefix cache without hashes, reference lists or heaps, too simple to be wrong."""

from dataclasses import dataclass

from router.protocol.block_hash import PrefixScope

Key = tuple[PrefixScope, tuple[int, ...]]


class NaiveCache:
    """Remembers every published prefix as (the block's scope, all tokens up to its end)."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.keys: set[Key] = set()

    def publish(self, scope: PrefixScope, tokens: list[int], first: int, last: int) -> None:
        for i in range(first, last):
            self.keys.add((scope.at(i), tuple(tokens[: (i + 1) * self.block_size])))

    def match(self, scope: PrefixScope, tokens: list[int]) -> int:
        """Return the number of remembered leading blocks, without the last token."""
        blocks = 0
        while (blocks + 1) * self.block_size < len(tokens) and (
            scope.at(blocks),
            tuple(tokens[: (blocks + 1) * self.block_size]),
        ) in self.keys:
            blocks += 1
        return blocks


@dataclass
class NaivePin:
    blocks: list[int]
    ttl: float | None
    ends_s: float
    tenant: str


class NaivePins:
    """Remembers every pin by key, oldest first, and searches all of them each time."""

    def __init__(self, budget: int, shares: dict[str, int]) -> None:
        self.budget, self.shares = budget, shares
        self.pins: dict[bytes, NaivePin] = {}

    def blocks(self, tenant: str | None = None) -> set[int]:
        return {block for pin in self.pins.values() if tenant in (None, pin.tenant) for block in pin.blocks}

    def add(self, key: bytes, blocks: list[int], ttl: float | None, now_s: float, tenant: str) -> str:
        old = self.pins.get(key)
        if old is not None:
            over = old.ends_s <= now_s
            old.ttl = None if ttl is None or old.ttl is None else ttl if over else max(ttl, old.ttl)
            old.ends_s = float("inf") if old.ttl is None else now_s + old.ttl
            return "present"
        if len(self.blocks(tenant) | set(blocks)) <= self.shares[tenant]:
            while len(self.blocks() | set(blocks)) > self.budget:
                furthest = max(self.shares, key=lambda name: len(self.blocks(name)) - self.shares[name])
                del self.pins[[key for key, pin in self.pins.items() if pin.tenant == furthest][-1]]
        if len(self.blocks() | set(blocks)) > self.budget:
            return "over_budget"
        self.pins[key] = NaivePin(list(blocks), ttl, float("inf") if ttl is None else now_s + ttl, tenant)
        return "pinned"

    def read(self, matched: list[int], now_s: float) -> None:
        for pin in self.pins.values():
            if pin.ttl is not None and pin.ends_s > now_s and set(pin.blocks) <= set(matched):
                pin.ends_s = now_s + pin.ttl

    def expire(self, now_s: float) -> None:
        self.pins = {key: pin for key, pin in self.pins.items() if pin.ends_s > now_s}
