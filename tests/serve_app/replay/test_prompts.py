"""Prompts of a file: whether they hold earlier answers, told by what was found of them."""

import numpy as np
import pytest

from serve_app.replay.prompts import FEWEST_TELLING, ModelTraffic, answers_found, answers_of
from serve_app.traffic.workload import segments

BLOCK = 16


def conversations(count: int) -> ModelTraffic:
    """Return so many conversations of two turns: 4 blocks, answered by 2, then 8 blocks."""
    ids = [number * 100 + place for number in range(count) for turn in (4, 8) for place in range(turn)]
    starts = np.cumsum([0, *[4, 8] * count])
    paths, path_start, sizes = segments(np.array(ids, np.uint64), starts)
    prompts = np.array([4 * BLOCK, 8 * BLOCK] * count, np.int32)
    outputs = np.full(2 * count, 2 * BLOCK + 1, np.int32)
    grown = answers_of(prompts, outputs, paths, path_start, sizes.tolist(), BLOCK)
    return ModelTraffic(
        BLOCK, np.arange(2.0 * count), prompts, outputs, np.zeros(2 * count), paths, path_start, sizes.tolist(), *grown
    )


@pytest.mark.parametrize(
    ("cached_blocks", "expected"),
    [
        (6, True),
        (4, False),  # as far as the first prompt, not further
        (3, True),  # evicted: tells nothing
        (-1, True),  # not recorded
    ],
)
def test_answers_are_cached_where_recorded_hits_reach_into_them(cached_blocks: int, expected: bool) -> None:
    traffic = conversations(FEWEST_TELLING)
    cached = np.array([0, max(cached_blocks * BLOCK, -1)] * FEWEST_TELLING, np.int32)
    assert answers_found(traffic, cached) is expected


def test_a_few_prompts_tell_nothing() -> None:
    traffic = conversations(FEWEST_TELLING - 1)
    assert answers_found(traffic, np.array([0, 4 * BLOCK] * (FEWEST_TELLING - 1), np.int32))
    nothing = conversations(1)
    assert answers_found(nothing, np.zeros(2, np.int32))
