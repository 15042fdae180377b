"""The blocks that an engine keeps in host memory below its pool, by its events of that medium.

These name blocks and say nothing else about them, so they tell of blocks that the pool holds or held lately. A prompt
continues from the pool's blocks into these: one is served while the pool or host memory serves its parent.
"""

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable

from router.protocol.block_hash import block_word
from router.vllm_events.batches import BlockHash, HeldBlock


class HostBlocks:
    """``told``: the blocks that are served, by this project's hashes; ``xor``: of their words.

    ``in_pool``: the blocks that the pool serves; ``most``: how many copies are known; ``most_left``: how many blocks
    that the pool lost are remembered.
    """

    def __init__(self, in_pool: Container[bytes], most: int, most_left: int) -> None:
        self.reported: dict[bytes, None] = {}
        self.xor = 0
        self.used = False
        self._in_pool = in_pool
        self._most = most
        self._most_left = most_left
        self._left: OrderedDict[BlockHash, tuple[bytes, HeldBlock]] = OrderedDict()
        self._copies: Counter[BlockHash] = Counter()
        self._ours: dict[BlockHash, bytes] = {}
        self._entries: dict[bytes, tuple[HeldBlock, set[BlockHash]]] = {}
        self._children: dict[bytes, set[bytes]] = {}
        self._touched: list[bytes] = []

    def get(self, block: bytes) -> HeldBlock | None:
        """Return a held block."""
        entry = self._entries.get(block)
        return None if entry is None else entry[0]

    def left(self, theirs: BlockHash, block: bytes, entry: HeldBlock) -> None:
        """Remember a block that the pool lost: vLLM may still report its copy."""
        if self.used:
            self._left[theirs] = block, entry
            if len(self._left) > self._most_left:
                self._left.popitem(last=False)

    def add(self, theirs: BlockHash, block: bytes | None, entry: HeldBlock | None) -> bool:
        """Add a copy of a block; None for one that the pool does not hold. Return whether it is known now."""
        self.used = True
        if theirs not in self._ours and len(self._ours) >= self._most:
            return False
        if block is None or entry is None:
            ours = self._ours.get(theirs)
            block, entry = self._left.pop(theirs, (ours, None if ours is None else self.get(ours)))
            if block is None or entry is None:
                return False
        self._copies[theirs] += 1
        self._ours[theirs] = block
        if block not in self._entries:
            self._entries[block] = entry, set()
            self._children.setdefault(entry.under, set()).add(block)
            self._touched.append(block)
        self._entries[block][1].add(theirs)
        return True

    def drop(self, theirs: BlockHash) -> None:
        """Remove one copy of a block. Unknown ones are ignored."""
        if theirs not in self._ours:
            return
        self._copies[theirs] -= 1
        if self._copies[theirs] > 0:
            return
        del self._copies[theirs]
        block = self._ours.pop(theirs)
        entry, names = self._entries[block]
        names.discard(theirs)
        if not names:
            del self._entries[block]
            self._children[entry.under].discard(block)
            if not self._children[entry.under]:
                del self._children[entry.under]
            self._touched.append(block)

    def clear(self) -> None:
        """Forget all blocks."""
        memory = self.reported, self._left, self._copies, self._ours, self._entries, self._children, self._touched
        for each in memory:
            each.clear()
        self.xor = 0

    def changes(self, pool_changed: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Return the blocks that are newly served, parents first, and those that no longer are.

        ``pool_changed``: those that the pool began or ceased to serve.
        """
        stored, removed = dict[bytes, None](), dict[bytes, None]()
        queue, self._touched = self._touched, []
        for block in pool_changed:
            queue += self._children.get(block, ())
        for block in queue:
            entry = self.get(block)
            served = entry is not None and (
                entry.under == entry.root or entry.under in self._in_pool or entry.under in self.reported
            )
            if served == (block in self.reported):
                continue
            self.xor ^= block_word(block)
            if served:
                self.reported[block] = None
            else:
                del self.reported[block]
            gained, lost = (stored, removed) if served else (removed, stored)
            if block in lost:
                del lost[block]
            else:
                gained[block] = None
            queue += self._children.get(block, ())
        return list(stored), list(removed)
