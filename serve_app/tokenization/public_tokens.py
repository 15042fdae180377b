"""Which leading tokens of a prompt are public: those that a registered prompt begins with too.

Never changes: whoever remembers what followed from one index keeps it apart by ``generation``.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from router.protocol.block_hash import TokenArray


class PublicTokens:
    """The token ids of all registered prompts. ``generation``: another number for every index of a process."""

    def __init__(self, prompts: Iterable[TokenArray] = (), generation: int = 0) -> None:
        self._prompts = [np.array(ids, dtype=np.int32) for ids in prompts]
        self.generation = generation

    def count(self, token_ids: TokenArray) -> int:
        """Return how many leading tokens are public. O(prompts), of which there are a few hundred at most."""
        return max((common_tokens(token_ids, prompt) for prompt in self._prompts), default=0)


def common_tokens(one: TokenArray, other: TokenArray) -> int:
    """Return how many leading tokens two sequences have in common."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
