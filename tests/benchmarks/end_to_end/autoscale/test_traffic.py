"""What is sent: fitted into its seconds, in fewer tokens, with the prefixes it had."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.report import BenchmarkError
from benchmarks.end_to_end.autoscale.traffic import (
    AGENTS,
    SHAPES,
    TENANTS,
    OfferedLoad,
    arrivals,
    load_of,
    shots_of,
    shrunk,
)

MOONCAKE = Path(__file__).parents[4] / "benchmarks/traces/mooncake_conversation.jsonl.gz"
SMALL = OfferedLoad("ramp", 20.0, 4.0, 16)


@pytest.mark.parametrize("trace", [TENANTS, AGENTS, *SHAPES, str(MOONCAKE)])
def test_every_traffic_is_fitted_into_its_seconds(trace: str, tmp_path: Path) -> None:
    workload, speed = load_of(replace(SMALL, trace=trace), tmp_path)
    assert 0 < len(workload) <= 2 * SMALL.seconds * SMALL.requests_per_s
    assert workload.arrival_s[-1] <= SMALL.seconds + 1e-6
    assert speed >= 1.0
    again, _ = load_of(replace(SMALL, trace=trace), tmp_path)
    assert np.array_equal(again.arrival_s, workload.arrival_s)


def shared(one: list[int], other: list[int]) -> int:
    """Return the length of the common beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_prompts_have_the_lengths_and_shared_beginnings_of_the_traffic(tmp_path: Path) -> None:
    workload, _ = load_of(SMALL, tmp_path)
    shots = shots_of(workload, "demo", seed=1)
    prompts = [shot.body["prompt"] for shot in shots]
    assert [len(prompt) for prompt in prompts] == workload.prompt_tokens.tolist()
    paths = [workload.paths[a:b].tolist() for a, b in itertools.pairwise(workload.path_start.tolist())]
    for (one, path), (other, other_path) in itertools.combinations(zip(prompts, paths, strict=True), 2):
        common = shared(path, other_path)
        tokens = int(workload.sizes[path[:common]].sum()) * workload.block_tokens
        assert shared(one, other) == min(tokens, len(one), len(other))


def test_a_load_is_as_high_as_its_shape() -> None:
    times = list(arrivals(SHAPES["plateau"], OfferedLoad("plateau", 1000.0, 10.0, 16)))
    busy = [at_s for at_s in times if 200.0 <= at_s < 700.0]
    assert len(busy) == pytest.approx(5000, rel=0.1)
    assert len(times) - len(busy) == pytest.approx(1000, rel=0.2)


def test_blocks_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    workload, _ = load_of(SMALL, tmp_path)
    with pytest.raises(BenchmarkError, match="blocks of 32 tokens cannot be divided by --shrink 5"):
        shrunk(workload, 5)
