"""Which leading tokens of a prompt are public: those that a registered prompt begins with too.

Never changes: whoever remembers what followed from one index keeps it apart by ``generation``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import numpy as np

from router.protocol.block_hash import TokenArray


class PublicTokens:
    """The token ids of all registered prompts. ``generation``: another number for every index of a process."""

    def __init__(self, prompts: Iterable[TokenArray] = (), generation: int = 0) -> None:
        # Bytes of big-endian ids sort as the ids do, and of all prompts a neighbour in that order has the longest
        # common beginning with what is looked up.
        by_key = {_sort_key(ids): np.array(ids, dtype=np.int32) for ids in prompts}
        self._keys = sorted(by_key)
        self._prompts = [by_key[key] for key in self._keys]
        self._longest = max(map(len, self._prompts), default=0)
        self.generation = generation

    def count(self, token_ids: TokenArray) -> int:
        """Return how many leading tokens are public. O(log prompts + public tokens)."""
        if not self._prompts:
            return 0
        head = token_ids[: self._longest]
        place = bisect_left(self._keys, _sort_key(head))
        return max(common_tokens(head, prompt) for prompt in self._prompts[max(0, place - 1) : place + 1])


def _sort_key(ids: TokenArray) -> bytes:
    return ids.astype(">i4").tobytes()


def common_tokens(one: TokenArray, other: TokenArray) -> int:
    """Return how many leading tokens two sequences have in common."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
