"""A fixed pool of KV block ids with reference counts. Invariant: free + idle (only in the cache) + used = total."""


class PoolExhausted(Exception):
    """More blocks were requested than are free."""


class BlockPool:
    """Block ids 0 to ``num_blocks`` - 1. All operations are O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.total_blocks = num_blocks
        self._references = [0] * num_blocks
        # A stack with ascending pops, so that a prompt's blocks tend to be adjacent in memory and KV reads are views.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: set[int] = set()

    @property
    def free_blocks(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    @property
    def idle_blocks(self) -> int:
        """The number of blocks held only by the prefix cache."""
        return len(self._idle)

    @property
    def used_blocks(self) -> int:
        """The number of blocks held by at least one sequence."""
        return len(self._references) - len(self._free) - len(self._idle)

    def references(self, block: int) -> int:
        """Return the number of sequences that hold ``block``."""
        return self._references[block]

    def is_idle(self, block: int) -> bool:
        """Return whether only the prefix cache holds ``block``."""
        return block in self._idle

    def take(self, count: int) -> list[int]:
        """Take ``count`` free blocks with one reference each. Raises PoolExhausted, and takes none, if too few."""
        if count > len(self._free):
            raise PoolExhausted(f"{count} blocks asked for, {len(self._free)} free")
        if count == 0:
            return []
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for block in taken:
            self._references[block] = 1
        return taken

    def retain(self, block: int) -> bool:
        """Add a reference to a block that is idle or in use, and return whether it was idle."""
        was_idle = self._references[block] == 0
        if was_idle:
            self._idle.remove(block)
        self._references[block] += 1
        return was_idle

    def release(self, block: int, *, keep: bool) -> bool:
        """Drop a reference, and return whether it was the last. The block is then idle (``keep``) or free."""
        left = self._references[block] - 1
        if left < 0:
            raise ValueError(f"block {block} is not in use")
        self._references[block] = left
        if left:
            return False
        if keep:
            self._idle.add(block)
        else:
            self._free.append(block)
        return True

    def free_idle(self, block: int) -> None:
        """Turn an idle block into a free one. Raises KeyError if it is not idle."""
        self._idle.remove(block)
        self._free.append(block)
