"""Slots: the bit positions by which the directory names a replica's tiers in holder sets."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ReplicaSlots:
    """One replica's slots: a bit for each tier that it named. ``home`` stands for the replica in folded masks."""

    epoch: str = ""
    slot_of_tier: dict[str, int] = field(default_factory=dict)
    blocks_of_tier: dict[str, int] = field(default_factory=dict)

    @property
    def home(self) -> int:
        """The first tier's slot."""
        return next(iter(self.slot_of_tier.values()))


def bits(mask: int) -> list[int]:
    """Return the positions of the set bits, lowest first."""
    positions = []
    while mask:
        low = mask & -mask
        positions.append(low.bit_length() - 1)
        mask ^= low
    return positions
