"""The blocks of the leading group by this project's hashes, each with its parent and the length of its held row.

A full-attention layer can continue from a block only if its whole chain is held. With eviction by tenant, a public or
shared parent may be evicted before its children. A sliding-window layer can continue from any block that ends a row as
long as the window, even if earlier blocks are gone.
"""

import math
from dataclasses import dataclass

from router.vllm_events.batches import BlockHash


@dataclass(slots=True)
class HeldBlock:
    """``under``: the parent's hash, or the root for a first block. ``root``: of a scope that begins here, or b"".

    ``row``: consecutive held blocks up to this one, capped at the needed number, which a chain's first block satisfies.
    ``hits``: requests that used a prefix that ends here, as of ``used_s``. Older requests count less.
    """

    under: bytes
    root: bytes
    token_bytes: bytes
    used_s: float
    theirs: BlockHash
    row: float = 0
    hits: float = 0.0


class Chains(dict[bytes, HeldBlock]):
    """Held blocks by hash. ``needed``: the blocks of a window, or infinity without one: all back to the beginning.

    ``touched``: blocks with a changed row or presence. Change the mapping only by ``add``, ``drop`` and ``clear``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needed = math.inf
        self.touched: dict[bytes, None] = {}
        self._children: dict[bytes, set[bytes]] = {}

    def add(self, block: bytes, held: HeldBlock) -> None:
        """Add a block that was not held."""
        above = self.get(held.under)
        held.row = min(self.needed, self.needed if above is None else above.row + 1)
        self[block] = held
        self.touched[block] = None
        self._children.setdefault(held.under, set()).add(block)
        self._recount(block, held.row)

    def drop(self, block: bytes) -> None:
        """Remove a held block."""
        under = self.pop(block).under
        self.touched[block] = None
        self._children[under].discard(block)
        if not self._children[under]:
            del self._children[under]
        self._recount(block, 0)

    def clear(self) -> None:
        """Remove all blocks."""
        super().clear()
        self.touched.clear()
        self._children.clear()

    def _recount(self, block: bytes, row: float) -> None:
        """Update the rows of the descendants of a block with the row length ``row``."""
        below = [(block, row)]
        for parent, above in below:
            for child in self._children.get(parent, ()):
                held, longer = self[child], min(self.needed, above + 1)
                if held.row != longer:
                    held.row = longer
                    self.touched[child] = None
                    below.append((child, longer))
