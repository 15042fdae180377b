"""The receipt of a joining or leaving replica, and counters of the blocks that replicas took over."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from router.protocol.samples import Labels, Sample
from serve_app.cache.prefix.hot_prefixes import HotPrefixKind

Skipped = Literal["no_peers", "held_by_peer", "no_room", "peer_lost", "refused", "gone", "parent_missing", "time"]
"""Why a block was not moved, in order: there are no peers; a peer has it; it does not fit (nothing colder, a full pool,
a full pin budget); all possible receivers were lost; the part was not the requested one; it was evicted meanwhile; a
block before it did not arrive; the time was over."""


@dataclass(slots=True)
class Receipt:
    """One pre-warm or hand-over. ``blocks``: moved ones, by kind; ``skipped``: the others, by reason.

    ``peers``: number of peers that took part; ``lost``: those that did not answer, at its beginning or later.
    """

    peers: int = 0
    lost: set[str] = field(default_factory=set)
    prefixes: int = 0
    saves: int = 0
    saves_lost: int = 0
    adapters: int = 0
    bytes: int = 0
    seconds: float = 0.0
    state: Literal["running", "done", "returned"] = "running"
    blocks: Counter[HotPrefixKind] = field(default_factory=Counter)
    skipped: Counter[Skipped] = field(default_factory=Counter)

    def moved(self, kind: HotPrefixKind, blocks: int, block_bytes: int) -> None:
        """Count blocks that arrived."""
        if blocks:
            self.blocks[kind] += blocks
            self.bytes += blocks * block_bytes

    def to_json(self) -> dict[str, Any]:
        """Return it in the form of a notice."""
        return {
            "state": self.state,
            "peers": self.peers,
            "peers_lost": len(self.lost),
            "prefixes": self.prefixes,
            "saves": self.saves,
            "saves_lost": self.saves_lost,
            "adapters": self.adapters,
            "blocks": self.blocks.total(),
            "blocks_by_kind": dict(self.blocks),
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "skipped_blocks": dict(self.skipped),
        }


@dataclass(slots=True)
class MoveMeters:
    """Counters of one replica: ``joined`` is its own pre-warm's receipt; the rest counts hand-overs from peers."""

    joined: Receipt | None = None
    taken_blocks: Counter[HotPrefixKind] = field(default_factory=Counter)
    taken_bytes: int = 0
    refused_blocks: int = 0
    taken_saves: Counter[str] = field(default_factory=Counter)

    def samples(self, labels: Labels = ()) -> Iterable[Sample]:
        """Yield all counters."""
        if self.joined is not None:
            for kind, blocks in self.joined.blocks.items():
                yield "warmpath_prewarm_blocks_total", (*labels, ("kind", kind)), float(blocks)
            for reason, blocks in self.joined.skipped.items():
                yield "warmpath_prewarm_skipped_blocks_total", (*labels, ("reason", reason)), float(blocks)
            yield "warmpath_prewarm_bytes_total", labels, float(self.joined.bytes)
            yield "warmpath_prewarm_seconds", labels, self.joined.seconds
        for kind, blocks in self.taken_blocks.items():
            yield "warmpath_handover_blocks_total", (*labels, ("kind", kind)), float(blocks)
        for outcome, saves in self.taken_saves.items():
            yield "warmpath_handover_saves_total", (*labels, ("outcome", outcome)), float(saves)
        yield "warmpath_handover_bytes_total", labels, float(self.taken_bytes)
        yield "warmpath_handover_refused_blocks_total", labels, float(self.refused_blocks)
