"""Single flight: a block that one sequence is computing is waited for by the others that want it, not computed twice.

Owns who computes which block, and who waits for which. In: a sequence's start, progress and end; out: whether
another has to wait.
"""

from __future__ import annotations

from router.protocol.block_hash import hash_at
from serve_app.engine.scheduling.sequence import SequenceState


class PendingBlocks:
    """Blocks being computed, by hash."""

    def __init__(self) -> None:
        self._computing: dict[bytes, SequenceState] = {}
        self._parked: dict[bytes, list[SequenceState]] = {}

    def begin(self, sequence: SequenceState, first: int, last: int) -> None:
        """Note that ``sequence`` is about to compute its blocks ``first`` to ``last`` - 1.

        Nobody waits for one that stores nothing: its blocks will never be theirs.
        """
        sequence.resolved = first
        if not sequence.request.store_kv:
            return
        for i in range(first, last):
            self._computing.setdefault(hash_at(sequence.chain, i), sequence)

    def has(self, block_hash: bytes) -> bool:
        """Return whether somebody computes that block (any thread)."""
        return block_hash in self._computing

    def park(self, sequence: SequenceState, block_hash: bytes) -> bool:
        """Let ``sequence`` wait for a block if somebody computes it; return whether it does."""
        if block_hash not in self._computing:
            return False
        self._parked.setdefault(block_hash, []).append(sequence)
        return True

    def parked(self) -> set[int]:
        """Return the ids (``id``) of the sequences that wait for a block."""
        return {id(sequence) for line in self._parked.values() for sequence in line}

    def awaited_tenants(self) -> set[str]:
        """Return the tenants whose sequences compute a block that another tenant's sequence waits for."""
        computing = ((self._computing[block_hash].request.tenant, line) for block_hash, line in self._parked.items())
        return {tenant for tenant, line in computing if any(waiter.request.tenant != tenant for waiter in line)}

    def resolve(self, sequence: SequenceState, last: int) -> None:
        """Wake whoever waits for a sequence's blocks before ``last``: they are computed, or will not be."""
        for i in range(sequence.resolved, last):
            block_hash = hash_at(sequence.chain, i)
            if self._computing.get(block_hash) is sequence:
                del self._computing[block_hash]
                self._parked.pop(block_hash, None)
        sequence.resolved = max(sequence.resolved, last)
