"""Recorded traffic -> Mooncake's lines, which other tools read, aiperf among them."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from serve_app.request_files import TraceError
from serve_app.traffic.reader import MOONCAKE_BLOCK_TOKENS, recorded_lines
from serve_app.traffic.record import TrafficRequest

WINDOW = 1 << 16
"""Lines that wait for an earlier one: a recording has them in the order of their ends."""


class TraceLine(msgspec.Struct):
    """A line of Mooncake. ``timestamp``: ms since the first."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


def mooncake_lines(
    paths: Sequence[Path],
    block_tokens: int | None,
    notes: Counter[str],
    on_line: Callable[[int], object] = lambda _: None,
) -> Iterator[TraceLine]:
    """Yield the answered requests of files in one order. Raises TraceError.

    ``block_tokens``: of an id, a multiple of the files'; None: theirs. ``notes``: what was left out, with its count.
    """
    ids: dict[tuple[int, int], int] = {}
    recordings: dict[str, int] = {}
    fresh = 0
    first_ms: float | None = None
    last_ms = 0.0
    for at_ms, recording, size, request in _ordered(paths, on_line):
        wanted = block_tokens or size
        if wanted % size:
            raise TraceError(f"the ids are of {size} tokens, and {wanted} is no multiple: give --block-tokens")
        if request.status >= 400 and not request.ttft_ms:
            notes["requests were refused, and are left out"] += 1
            continue
        first_ms = at_ms if first_ms is None else first_ms
        last_ms = max(last_ms, at_ms - first_ms)
        if last_ms > at_ms - first_ms:
            notes["requests are far behind later ones: they are moved to those"] += 1
        scope = recordings.setdefault(recording, len(recordings))
        tokens = request.input_length
        coarser = wanted // size
        kept = request.hash_ids[coarser - 1 :: coarser][: -(-tokens // wanted)]
        hash_ids = [ids.setdefault((scope, each), len(ids) + fresh) for each in kept]
        lacking = -(-tokens // wanted) - len(hash_ids)
        hash_ids += range(len(ids) + fresh, len(ids) + fresh + lacking)
        fresh += lacking
        yield TraceLine(round(last_ms), tokens, max(1, request.output_length), hash_ids)


def _ordered(
    paths: Sequence[Path], on_line: Callable[[int], object]
) -> Iterator[tuple[float, str, int, TrafficRequest]]:
    """Yield requests by time, as far as the window reaches: its time in ms, its recording and its block size."""
    waiting: list[tuple[float, int, str, int, TrafficRequest]] = []
    for number, (header, started_s, request) in enumerate(recorded_lines(paths, on_line)):
        name, size = (header.recording, header.block_tokens) if header else ("", MOONCAKE_BLOCK_TOKENS)
        item = started_s * 1e3 + request.timestamp, number, name, size, request
        if len(waiting) < WINDOW:
            heapq.heappush(waiting, item)
            continue
        at_ms, _, *rest = heapq.heappushpop(waiting, item)
        yield at_ms, *rest  # type: ignore[misc]
    while waiting:
        at_ms, _, *rest = heapq.heappop(waiting)
        yield at_ms, *rest  # type: ignore[misc]
