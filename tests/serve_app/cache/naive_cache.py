"""The oracle: a prefix cache without hashes, reference lists or heaps, too simple to be wrong."""

from __future__ import annotations

from router.block_hash import PrefixScope

Key = tuple[PrefixScope, tuple[int, ...]]


class NaiveCache:
    """Remembers every published prefix as (scope, all tokens up to the block's end)."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.keys: set[Key] = set()

    def publish(self, scope: PrefixScope, tokens: list[int], first: int, last: int) -> None:
        for i in range(first, last):
            self.keys.add((scope, tuple(tokens[: (i + 1) * self.block_size])))

    def match(self, scope: PrefixScope, tokens: list[int]) -> int:
        """How many leading blocks, without the last token, are remembered."""
        blocks = 0
        while (blocks + 1) * self.block_size < len(tokens) and (
            scope,
            tuple(tokens[: (blocks + 1) * self.block_size]),
        ) in self.keys:
            blocks += 1
        return blocks


class NaivePins:
    """Remembers (blocks, ttl, end) by key and looks through all of them each time."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.pins: dict[bytes, tuple[list[int], float | None, float]] = {}

    def all_blocks(self) -> list[int]:
        """Every pin's blocks, one after the other."""
        return [block for blocks, _, _ in self.pins.values() for block in blocks]

    def blocks(self) -> set[int]:
        return set(self.all_blocks())

    def add(self, key: bytes, blocks: list[int], ttl: float | None, now_s: float) -> str:
        if key in self.pins:
            old, old_ttl, _ = self.pins[key]
            longest = None if ttl is None or old_ttl is None else max(ttl, old_ttl)
            self.pins[key] = (old, longest, float("inf") if longest is None else now_s + longest)
            return "present"
        if len(self.blocks() | set(blocks)) > self.budget:
            return "over_budget"
        self.pins[key] = (list(blocks), ttl, float("inf") if ttl is None else now_s + ttl)
        return "pinned"

    def read(self, matched: list[int], now_s: float) -> None:
        for key, (blocks, ttl, _) in self.pins.items():
            if ttl is not None and set(blocks) <= set(matched):
                self.pins[key] = (blocks, ttl, now_s + ttl)

    def remove(self, key: bytes) -> bool:
        return self.pins.pop(key, None) is not None

    def expire(self, now_s: float) -> None:
        self.pins = {key: pin for key, pin in self.pins.items() if pin[2] > now_s}

    def clear(self) -> None:
        self.pins = {}
