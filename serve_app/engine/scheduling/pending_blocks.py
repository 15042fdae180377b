"""Blocks that a running sequence is computing and others want too: they wait for it instead of computing them again.

Owns who computes which block, and who waits for which. Knows nothing of admission or of the cache's contents. In: a
sequence's start, progress and end; out: whether another has to wait.
"""

from __future__ import annotations

from router.protocol.block_hash import HASH_BYTES
from serve_app.engine.scheduling.sequence import SequenceState


class Flights:
    """Blocks in flight by hash."""

    def __init__(self) -> None:
        self._in_flight: dict[bytes, SequenceState] = {}
        self._parked: dict[bytes, list[SequenceState]] = {}

    def begin(self, sequence: SequenceState, first: int, last: int) -> None:
        """Note that ``sequence`` is about to compute its blocks ``first`` to ``last`` - 1."""
        sequence.landed = first
        for i in range(first, last):
            self._in_flight.setdefault(sequence.chain[HASH_BYTES * i : HASH_BYTES * (i + 1)], sequence)

    def has(self, block_hash: bytes) -> bool:
        """Return whether somebody computes that block (any thread)."""
        return block_hash in self._in_flight

    def park(self, sequence: SequenceState, block_hash: bytes) -> bool:
        """Let ``sequence`` wait for a block if somebody computes it; return whether it does."""
        if block_hash not in self._in_flight:
            return False
        self._parked.setdefault(block_hash, []).append(sequence)
        return True

    def parked(self) -> set[int]:
        """Return the ids (``id``) of the sequences that wait for a block."""
        return {id(sequence) for line in self._parked.values() for sequence in line}

    def land(self, sequence: SequenceState, last: int) -> None:
        """End the flight of a sequence's blocks before ``last`` and wake who waited for them."""
        for i in range(sequence.landed, last):
            block_hash = sequence.chain[HASH_BYTES * i : HASH_BYTES * (i + 1)]
            if self._in_flight.get(block_hash) is sequence:
                del self._in_flight[block_hash]
                self._parked.pop(block_hash, None)
        sequence.landed = max(sequence.landed, last)
