"""KV that is copied when simulated replicas come and go: one that joins takes what is hot, one that leaves gives.

Knows pools and segments, not replicas nor time: callers say how many blocks may be copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.replay.pool import Holders, SegmentPool


def hottest(pools: Sequence[SegmentPool]) -> list[int]:
    """Return the pools' segments, those in use and the last used first, so that a parent comes before its child."""
    found: dict[int, None] = {}
    for pool in pools:
        found.update(dict.fromkeys(pool.refs))
    for pool in pools:
        found.update(dict.fromkeys(reversed(pool.idle)))
    return [segment for segment in found if any(segment in pool.held for pool in pools)]


def warm(pool: SegmentPool, others: Sequence[SegmentPool], most_blocks: int) -> int:
    """Copy what the others used last into free blocks; return how many. The hottest is evicted last."""
    left = min(most_blocks, pool.free)
    chosen: list[tuple[int, int]] = []
    for segment in hottest(others):
        blocks = max(other.held.get(segment, 0) for other in others)
        more = blocks - pool.held.get(segment, 0)
        if more > left:
            break
        left -= max(more, 0)
        chosen.append((segment, blocks))
    return sum(_copy(pool, segment, blocks) for segment, blocks in reversed(chosen))


def hand_over(
    leaving: SegmentPool,
    receivers: Sequence[SegmentPool],
    holders: Holders,
    parents: Sequence[int],
    sizes: Sequence[int],
    most_blocks: int,
) -> int:
    """Copy whole segments that no receiver has into their free blocks, hottest first; return how many blocks.

    A segment goes where its parent is, to the one with most room of those. ``parents``: by segment, -1 for none.
    """
    staying = sum(pool.bit for pool in receivers)
    places: dict[int, int] = {}
    room = {pool.bit: pool.free for pool in receivers}
    chosen: list[tuple[SegmentPool, int]] = []
    by_bit = {pool.bit: pool for pool in receivers}
    for segment in hottest([leaving]):
        blocks, parent = leaving.held[segment], parents[segment]
        there = holders.whole.get(segment, 0) & staying
        if there or blocks < sizes[segment]:
            continue
        able = staying if parent < 0 else (holders.whole.get(parent, 0) & staying) | places.get(parent, 0)
        fitting = [bit for bit in by_bit if bit & able and room[bit] >= blocks]
        if blocks > most_blocks or not fitting:
            continue
        bit = max(fitting, key=room.__getitem__)
        most_blocks -= blocks
        room[bit] -= blocks
        places[segment] = bit
        chosen.append((by_bit[bit], segment))
    return sum(_copy(pool, segment, sizes[segment]) for pool, segment in reversed(chosen))


def _copy(pool: SegmentPool, segment: int, blocks: int) -> int:
    more = max(blocks - pool.held.get(segment, 0), 0)
    taken = pool.take(more)
    assert taken, "copies fit into free blocks"
    return pool.grow(segment, blocks)
