"""The requests of recorded traffic as columns, and their prompts as paths of segments.

A segment is a run of blocks that all requests have together or not at all, so a path is short however long its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from serve_app.traffic.record import RecordedModel

Column = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ReplicasAt:
    """The replicas of a model that took requests from ``at_s`` on, by their places in ``Workload.replicas``."""

    at_s: float
    model: str
    replicas: tuple[int, ...]


@dataclass(slots=True)
class ShadowTold:
    """What a file tells of a model's shadow policy: sums over the requests that it was asked about.

    ``same``: those for which it chose the same replica; ``acting_tokens``, ``predicted_tokens``: cached tokens as
    predicted of the acting policy's choice and of the shadow's.
    """

    policy: str
    requests: int = 0
    same: int = 0
    prompt_tokens: int = 0
    acting_tokens: int = 0
    predicted_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Columns have one entry a request, in order of arrival; ``arrival_s`` from the first one's, at ``started_s``.

    ``tenant``, ``model``, ``adapter``, ``replica``: places in the lists of names, -1 for none. ``cached_tokens``,
    ``predicted_tokens``: -1, and ``ttft_s``, ``duration_s``: nan, where the file does not tell. ``paths``: the segments
    of all prompts, one after the other, each from its ``path_start``; ``sizes``: blocks by segment. ``refused``:
    requests that got no answer, and are no rows.
    """

    block_tokens: int
    started_s: float
    arrival_s: Column
    prompt_tokens: Column
    output_tokens: Column
    tenant: Column
    model: Column
    replica: Column
    cached_tokens: Column
    predicted_tokens: Column
    ttft_s: Column
    duration_s: Column
    paths: Column
    path_start: Column
    sizes: Column
    tenants: Sequence[str]
    models: Sequence[str]
    replicas: Sequence[str]
    facts: Mapping[str, RecordedModel]
    changes: Sequence[ReplicasAt] = ()
    warnings: Sequence[str] = ()
    refused: int = 0
    adapter: Column | None = None
    adapters: Sequence[str] = ()
    shadows: Mapping[str, ShadowTold] = field(default_factory=dict)
    """By model."""

    def __len__(self) -> int:
        return len(self.arrival_s)


def segments(ids: npt.NDArray[np.uint64], starts: npt.NDArray[np.int64]) -> tuple[Column, Column, Column]:
    """Return paths, their starts and the segments' sizes. ``ids``: of all prompts; ``starts``: of each, and the end.

    Two blocks that follow each other belong to one segment if as many prompts have the one as the other: an id stands
    for its whole beginning, so those are the same prompts. Raises ValueError if ids do not: if one stands twice in a
    prompt, or behind different ones.
    """
    count = len(ids)
    if not count:
        return np.zeros(0, np.int32), np.zeros(len(starts), np.int64), np.zeros(0, np.int32)
    dense, known = _dense(ids)
    uses = np.bincount(dense, minlength=known).astype(np.int32)
    opens = np.zeros(count, np.bool_)
    opens[starts[:-1][starts[:-1] < starts[1:]]] = True
    before = np.empty(count, np.int32)
    before[0] = -1
    before[1:] = dense[:-1]
    before[opens] = -1
    predecessor = np.empty(known, np.int32)
    predecessor[dense] = before
    wrong = np.flatnonzero(predecessor[dense] != before)
    if len(wrong):
        request = int(np.searchsorted(starts, wrong[0], side="right")) - 1
        raise ValueError(
            f"the id {int(ids[wrong[0]])} of request {request + 1} stands behind different ids, though an id means a "
            "whole beginning of a prompt"
        )
    mine = uses[dense]
    opens[1:] |= mine[1:] != mine[:-1]
    places = np.flatnonzero(opens)
    lengths = np.diff(np.append(places, count)).astype(np.int32)
    heads, paths = np.unique(dense[places], return_inverse=True)
    sizes = np.zeros(len(heads), np.int32)
    sizes[paths] = lengths
    return paths.astype(np.int32), np.searchsorted(places, starts).astype(np.int64), sizes


def _dense(ids: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int32], int]:
    """Return a number for each id, from 0, equal for equal ones, and how many there are.

    As ``np.unique``, with half of its memory.
    """
    order = np.argsort(ids)
    ordered = ids[order]
    changes = ordered[1:] != ordered[:-1]
    del ordered
    numbers = np.zeros(len(ids), np.int32)
    np.cumsum(changes, out=numbers[1:])
    dense = np.empty(len(ids), np.int32)
    dense[order] = numbers
    return dense, int(numbers[-1]) + 1


def chained(ids: npt.NDArray[np.uint64], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return ids that stand for whole beginnings, of ids of single blocks, or that two blocks have by mistake."""
    made = np.empty_like(ids)
    lengths = np.diff(starts)
    rows = np.flatnonzero(lengths)
    before = np.zeros(len(rows), np.uint64)
    depth = 0
    while len(rows):
        at = starts[rows] + depth
        mixed = before * np.uint64(0xD1342543DE82EF95) + ids[at] + np.uint64(0x9E3779B97F4A7C15)  # splitmix64
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        before = mixed ^ (mixed >> np.uint64(31))
        made[at] = before
        depth += 1
        longer = lengths[rows] > depth
        rows, before = rows[longer], before[longer]
    return made


def shared_tokens(paths: Column, path_start: Column, sizes: Column, block_tokens: int) -> npt.NDArray[np.int64]:
    """Return, by request, the tokens of whole blocks that its prompt shares with the beginning of an earlier one."""
    earlier = np.ones(len(paths), np.bool_)
    earlier[np.unique(paths, return_index=True)[1]] = False
    blocks = np.where(earlier, sizes[paths], 0).astype(np.int64)
    ends = np.concatenate(([0], np.cumsum(blocks)))[path_start]
    found: npt.NDArray[np.int64] = np.diff(ends) * block_tokens
    return found


def reusable_tokens(
    prompt_tokens: Column, paths: Column, path_start: Column, sizes: Column, block_tokens: int
) -> npt.NDArray[np.int64]:
    """Return what an unlimited cache would find of them: the last token is always computed."""
    most = np.maximum(prompt_tokens.astype(np.int64) - 1, 0) // block_tokens * block_tokens
    found: npt.NDArray[np.int64] = np.minimum(shared_tokens(paths, path_start, sizes, block_tokens), most)
    return found
