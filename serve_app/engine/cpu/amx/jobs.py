"""A step as jobs for the AMX kernel: which rows attend to which keys, laid out as the words that the kernel reads.

A common beginning is read once for all sequences that share it. Work is split among threads; rows with several jobs
get a place for each partial result, and are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from serve_app.engine.attention.step_layout import block_table
from serve_app.engine.step import Segment, ceil_div

SHARED_TOKENS = 64
"""From this many tokens on a common beginning is a job of its own: merging costs a little, too."""

LEAST_LANES = 256
"""A chunk is split into jobs of at least this many queries, one beside the other: each turns the values again."""

SPLIT_TOKENS = 512
"""Keys are split next, into parts of at least this many."""

TASKS_A_THREAD = 4

_HEADER_WORDS = 10

Words = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class Job:
    """``rows`` of the packed step attend to ``keys`` keys in ``blocks``, the first one at position ``first_key``."""

    blocks: Words
    keys: int
    first_key: int
    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class JobPlan:
    """``words``: the plan as the kernel reads it. ``places``: how many partial results need room."""

    words: Words
    places: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """What jobs depend on: the pool's block size, the kernel's lanes, heads, and the number of threads.

    A job of up to ``few`` queries is one task for all heads; in a larger one every head is a task.
    """

    block: int
    lanes: int
    few: int
    kv_heads: int
    group: int
    threads: int

    def is_few(self, job: Job) -> bool:
        """Return whether a job is one task."""
        return len(job.rows) * self.group <= self.few


def plan_jobs(segments: Sequence[Segment], padded_rows: int, sizes: Sizes) -> JobPlan:
    """Plan ``segments`` in the packed step's order, single tokens first, of ``padded_rows`` rows in all."""
    tables = [block_table(segment, segment.end, sizes.block) for segment in segments]
    singles = [i for i, segment in enumerate(segments) if len(segment.token_ids) == 1]
    jobs: list[Job] = []
    _share(segments, tables, singles, 0, sizes, jobs)
    row = len(singles)
    for segment, table in zip(segments[row:], tables[row:], strict=True):
        _prefill(segment, table, row, sizes, jobs)
        row += len(segment.token_ids)
    jobs = _split(jobs, sizes)
    jobs.sort(key=lambda job: (sizes.is_few(job), -job.keys * len(job.rows)))
    many = sum(not sizes.is_few(job) for job in jobs)
    return _words(jobs, many, row, padded_rows)


def _share(
    segments: Sequence[Segment],
    tables: Sequence[Words],
    members: Sequence[int],
    start: int,
    sizes: Sizes,
    jobs: list[Job],
) -> None:
    """Add the jobs of single-token rows ``members``, whose first ``start`` blocks are the same and have their jobs."""
    # The block that a row writes to is its own.
    whole = {i: (segments[i].end - 1) // sizes.block for i in members}
    groups: dict[int, list[int]] = {}
    for i in members:
        groups.setdefault(int(tables[i][start]) if start < whole[i] else -1 - i, []).append(i)
    for group in groups.values():
        common = start
        if len(group) > 1:
            common = _common(tables, group, start, min(whole[i] for i in group))
        if (common - start) * sizes.block < SHARED_TOKENS:
            for i in group:
                keys = segments[i].end - start * sizes.block
                jobs.append(Job(tables[i][start:], keys, start * sizes.block, (i,)))
            continue
        most = sizes.lanes // sizes.group
        blocks = tables[group[0]][start:common]
        for first in range(0, len(group), most):
            rows = group[first : first + most]
            jobs.append(Job(blocks, len(blocks) * sizes.block, start * sizes.block, rows))
        _share(segments, tables, group, common, sizes, jobs)


def _common(tables: Sequence[Words], group: Sequence[int], start: int, end: int) -> int:
    """Return up to which block number the tables of a group are equal."""
    first = tables[group[0]][start:end]
    for i in group[1:]:
        differs = np.flatnonzero(tables[i][start : start + len(first)] != first)
        if len(differs):
            first = first[: differs[0]]
    return start + len(first)


def _prefill(segment: Segment, table: Words, row: int, sizes: Sizes, jobs: list[Job]) -> None:
    """Add the jobs of a chunk: as many rows each as there are lanes for, or as keep all threads at work."""
    count = len(segment.token_ids)
    even = ceil_div(count * sizes.kv_heads, TASKS_A_THREAD * sizes.threads)
    most = max(1, min(sizes.lanes // sizes.group, max(even, LEAST_LANES // sizes.group)))
    for first in range(0, count, most):
        last = min(first + most, count)
        jobs.append(Job(table, segment.start + last, 0, range(row + first, row + last)))


def _split(jobs: list[Job], sizes: Sizes) -> list[Job]:
    """Return the jobs, long ones in parts where there are too few to keep all threads at work."""
    tasks = sum(1 if sizes.is_few(job) else sizes.kv_heads for job in jobs)
    wanted = ceil_div(TASKS_A_THREAD * sizes.threads, tasks)
    if wanted == 1:
        return jobs
    parts: list[Job] = []
    for job in jobs:
        count = min(wanted, job.keys // SPLIT_TOKENS)
        if count < 2:
            parts.append(job)
            continue
        length = ceil_div(job.keys, count * sizes.block) * sizes.block
        for first in range(0, job.keys, length):
            keys = min(length, job.keys - first)
            blocks = job.blocks[first // sizes.block :]
            parts.append(replace(job, blocks=blocks, keys=keys, first_key=job.first_key + first))
    return parts


def _words(jobs: Sequence[Job], many: int, rows: int, padded_rows: int) -> JobPlan:
    """Lay the jobs out; rows that several have get places for partial results, one after the other."""
    counts = [0] * rows
    for job in jobs:
        for row in job.rows:
            counts[row] += 1
    used, places = 0, [-1] * rows
    merges: list[int] = []
    for row, count in enumerate(counts):
        if count > 1:
            merges += (row, used, count)
            places[row] = used
            used += count
    described: list[int] = []
    all_rows: list[int] = []
    all_places: list[int] = []
    table_at = 0
    for job in jobs:
        described += (table_at, job.keys, job.first_key, len(all_rows), len(job.rows))
        table_at += len(job.blocks)
        all_rows += job.rows
        for row in job.rows:
            all_places.append(places[row])
            places[row] += places[row] >= 0
    tables = [job.blocks for job in jobs]
    counts_before = (_HEADER_WORDS, len(described), table_at, len(all_rows), len(all_places))
    header = (len(jobs), many, len(merges) // 3, padded_rows, rows, *accumulate(counts_before))
    parts = (np.array(one, dtype=np.int32) for one in (all_rows, all_places, merges))
    return JobPlan(np.concatenate((np.array((*header, *described), dtype=np.int32), *tables, *parts)), used)
