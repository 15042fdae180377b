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
        public = 0
        for prompt in self._prompts:
            if public < min(len(prompt), len(token_ids)) and prompt[public] == token_ids[public]:
                public = max(public, common_tokens(token_ids, prompt))
        return public


def common_tokens(left: TokenArray, right: TokenArray) -> int:
    """Return how many leading tokens two sequences have in common."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
