"""The requests of one model in a file, ready to be simulated: numbers, paths of segments, and what answers add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from serve_app.replay.replica import NOTHING, ReplayJob

FEWEST_TELLING = 10
"""Prompts that follow an answer; fewer do not tell whether they hold it."""
FOUND_PART = 0.2
"""Of those prompts; some answers may be evicted before."""


@dataclass(frozen=True, slots=True)
class ModelTraffic:
    """Columns, one entry a request in order of arrival. ``sizes``: blocks by segment.

    ``grown_segment``, ``grown_blocks``: the part of the next segment that the answer's KV fills, -1 and 0 for none.
    """

    block_tokens: int
    arrival_s: npt.NDArray[np.float64]
    prompt_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    tenant: npt.NDArray[Any]
    paths: npt.NDArray[np.int32]
    path_start: npt.NDArray[np.int64]
    sizes: Sequence[int]
    grown_segment: npt.NDArray[np.int32]
    grown_blocks: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.arrival_s)

    def path(self, number: int) -> list[int]:
        """Return a prompt's segments."""
        path: list[int] = self.paths[self.path_start[number] : self.path_start[number + 1]].tolist()
        return path

    def job(self, number: int, *, grows: bool) -> ReplayJob:
        """Return a request. ``grows``: its answer's KV is kept, too."""
        prompt_tokens = int(self.prompt_tokens[number])
        grown = (int(self.grown_segment[number]), int(self.grown_blocks[number])) if grows else NOTHING
        return ReplayJob(
            number,
            float(self.arrival_s[number]),
            prompt_tokens,
            max(int(self.output_tokens[number]), 1),
            int(self.tenant[number]),
            self.path(number),
            max(prompt_tokens - 1, 0) // self.block_tokens,
            grown,
        )


def answers_of(
    prompt_tokens: npt.NDArray[np.int32],
    output_tokens: npt.NDArray[np.int32],
    paths: npt.NDArray[np.int32],
    path_start: npt.NDArray[np.int64],
    sizes: Sequence[int],
    block_tokens: int,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return, by request, the segment that continues its prompt in the first later one, and the blocks of its answer.

    The later prompt has the answer's text behind the earlier prompt, so those blocks are the answer's.
    """
    count = len(prompt_tokens)
    segments, blocks = np.full(count, -1, np.int32), np.zeros(count, np.int32)
    last: dict[int, int] = {}
    flat, starts = paths.tolist(), path_start.tolist()
    for number in range(count):
        path = flat[starts[number] : starts[number + 1]]
        for place in range(len(path) - 2, -1, -1):
            earlier = last.get(path[place])
            if earlier is not None:
                if segments[earlier] < 0:
                    prompt = int(prompt_tokens[earlier])
                    whole = (prompt + int(output_tokens[earlier]) - 1) // block_tokens
                    fills = whole - prompt // block_tokens
                    segments[earlier], blocks[earlier] = path[place + 1], min(fills, sizes[path[place + 1]])
                break
        if path:
            last[path[-1]] = number
    blocks[blocks <= 0] = 0
    segments[blocks == 0] = -1
    return segments, blocks


def answers_found(traffic: ModelTraffic, cached_tokens: npt.NDArray[Any]) -> bool:
    """Return whether the recorded hits of later prompts reach into earlier answers; True where nothing tells.

    They do not if clients leave out what a model has thought, or send made prompts. ``cached_tokens``: by request.
    """
    grown = np.unique(traffic.grown_segment[traffic.grown_segment >= 0])
    used, firsts = np.unique(traffic.paths, return_index=True)
    places = firsts[np.searchsorted(used, grown)]
    later = np.searchsorted(traffic.path_start, places, side="right") - 1
    blocks = np.concatenate(([0], np.cumsum(np.asarray(traffic.sizes, np.int64)[traffic.paths])))
    before = (blocks[places] - blocks[traffic.path_start[later]]) * traffic.block_tokens
    cached = cached_tokens[later].astype(np.int64)
    telling = (cached >= before) & (before > 0)
    if telling.sum() < FEWEST_TELLING:
        return True
    return bool(np.mean(cached[telling] > before[telling]) >= FOUND_PART)
