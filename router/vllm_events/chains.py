"""The blocks of the group that leads, by our hashes, each under its parent; and how many are held in a row.

A layer with full attention goes on from a block whose whole chain is held: where tenants evict by themselves, a public
or shared parent may go before what hangs under it. One with a window goes on from any block that ends a row as long as
the window: what is before that may be gone.
"""

import math
from dataclasses import dataclass

from router.vllm_events.batches import BlockHash


@dataclass(slots=True)
class HeldBlock:
    """``under``: the parent's hash, of a chain's first block the root. ``root``: what begins here, b"" for nothing.

    ``row``: blocks held in a row up to this one, no more than needed; a chain's beginning counts as enough.
    ``hits``: requests that used a prefix that ends here, as of ``used_s``: older ones count less.
    """

    under: bytes
    root: bytes
    token_bytes: bytes
    used_s: float
    theirs: BlockHash
    row: float = 0
    hits: float = 0.0


class Chains(dict[bytes, HeldBlock]):
    """``needed``: blocks of a window, all up to a beginning where there is none. ``touched``: rows or presence changed.

    ``add`` and ``drop`` alone change it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needed = math.inf
        self.touched: dict[bytes, None] = {}
        self._children: dict[bytes, set[bytes]] = {}

    def add(self, block: bytes, held: HeldBlock) -> None:
        """Take a block that was not held."""
        above = self.get(held.under)
        held.row = min(self.needed, self.needed if above is None else above.row + 1)
        self[block] = held
        self.touched[block] = None
        self._children.setdefault(held.under, set()).add(block)
        self._recount(block, held.row)

    def drop(self, block: bytes) -> None:
        """Let a held block go."""
        under = self.pop(block).under
        self.touched[block] = None
        self._children[under].discard(block)
        if not self._children[under]:
            del self._children[under]
        self._recount(block, 0)

    def clear(self) -> None:
        """Hold nothing any more."""
        super().clear()
        self.touched.clear()
        self._children.clear()

    def _recount(self, block: bytes, row: float) -> None:
        """Count rows anew below a block that ends one of ``row``."""
        below = [(block, row)]
        for parent, above in below:
            for child in self._children.get(parent, ()):
                held, longer = self[child], min(self.needed, above + 1)
                if held.row != longer:
                    held.row = longer
                    self.touched[child] = None
                    below.append((child, longer))
