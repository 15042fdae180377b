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
