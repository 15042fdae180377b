"""Figures of a run: each from its own window, and what a run has nothing for is None."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.common.client import Answer
from benchmarks.common.open_loop import Result, Shot
from benchmarks.end_to_end.autoscale.figures import (
    curves,
    figures_of,
    joined,
    new_replica_hit_ratio,
    replica_seconds,
    resumes,
    shrunk,
)
from benchmarks.end_to_end.autoscale.plots import plot_curves
from benchmarks.end_to_end.autoscale.scenarios import SCENARIOS, timeline
from benchmarks.end_to_end.autoscale.stage import Run, Sample

SPANS = timeline({name: SCENARIOS[name] for name in ("plateau", "scale_up", "scale_down", "kill")}, 40.0)


def result(at_s: float, ttft_s: float = 0.1, cached: int = 50, text: str = "x", **gap: float) -> Result:
    return Result(Shot(at_s, "/v1/completions", {}), 0.0, Answer(ttft_s, ttft_s + 1, text, 100, cached, 10, **gap))  # type: ignore[arg-type]


def sample(at_s: float, states: dict[str, int], **replicas: Sequence[float]) -> Sample:
    names = ("prompt_tokens", "cached_tokens", "requests")
    return Sample(at_s, states, {name: dict(zip(names, of, strict=True)) for name, of in replicas.items()})


def right(text: str = "x", cached: int = 50) -> Answer:
    return Answer(0.1, 1.1, text, 100, cached, 10)


def figures(run: Run, undisturbed: Sequence[Answer] | None = None) -> dict[str, object]:
    given = [right()] * len(run.results) if undisturbed is None else undisturbed
    return figures_of(run, given, SPANS, 40.0, prefill_tokens_per_s=1000.0, step_s=0.01)


def test_what_other_prompts_do_to_hits_is_not_the_scale_downs() -> None:
    """Prompts of which an unlimited cache has three quarters of what it had of those before."""
    at_s = SPANS[2].start_s
    before, after = range(1, 40), range(1, 40)
    run = Run(
        [result(at_s - number, cached=80) for number in before]
        + [result(at_s + number, cached=57) for number in after],
        [sample(0.0, {"RUNNING": 2}, old=(1, 1, 1), other=(1, 1, 1))],
        [(at_s, "shrink")],
    )
    found = figures(run, [right(cached=100)] * len(before) + [right(cached=75)] * len(after))
    assert found["hit_rate_after_scale_down_ratio"] == pytest.approx(57 / 80)
    assert found["hit_rate_after_scale_down_of_unlimited_ratio"] == pytest.approx(0.95)


def test_what_is_unanswered_or_altered_is_lost() -> None:
    run = Run([result(1.0), result(2.0, text="y"), Result(Shot(3.0, "", {}), 0.0, None, 500, "broken")])
    found = figures(run)
    assert (found["requests_lost"], found["unanswered"], found["altered"]) == (2, 1, 1)
    assert found["reasons"] == ["broken"]
    assert figures(run, [right(), right("y"), right()])["requests_lost"] == 1


def test_hits_around_a_scale_down_and_times_after_a_scale_up() -> None:
    """The 40 s before and after; a replica that joins after a kill is a replacement and no scale-up."""
    shrunk_s = SPANS[2].start_s
    run = Run(
        [result(number, 0.1) for number in range(40)]
        + [result(40 + number, 0.3 if number < 45 else 0.1) for number in range(50)]
        + [result(shrunk_s - 1 - number, cached=80) for number in range(39)]
        + [result(shrunk_s + 1 + number, cached=60) for number in range(39)],
        [
            sample(0.0, {"RUNNING": 1}, old=(100, 50, 1)),
            sample(45.0, {"RUNNING": 2}, old=(1000, 500, 10), new=(0, 0, 0)),
            sample(60.0, {"RUNNING": 2}, old=(3000, 1500, 30), new=(1000, 200, 25)),
            sample(SPANS[3].start_s + 20.0, {"RUNNING": 2}, old=(9000, 1500, 90), other=(0, 0, 0)),
        ],
        [(40.0, "grow"), (shrunk_s, "shrink"), (SPANS[3].start_s + 4.0, "kill")],
    )
    found = figures(run)
    assert found["hit_rate_after_scale_down_ratio"] == pytest.approx(0.75)
    assert found["hit_rate_after_scale_down_of_unlimited_ratio"] == pytest.approx(0.75)
    assert found["ttft_p99_after_scale_up_ratio"] == pytest.approx(3.0)
    assert found["new_replica_hit_ratio"] == pytest.approx(0.2 / 0.5)
    assert (found["scale_ups"], found["scale_downs"], found["replacement_hit_ratio"]) == (1, 1, None)


def test_a_run_without_events_has_no_ratios() -> None:
    found = figures(Run([result(float(number)) for number in range(50)]))
    ratios = [name for name in found if name.endswith("_ratio")]
    assert len(ratios) == 6 and all(found[name] is None for name in ratios)
    assert found["hit_rate"] == 0.5 and found["replica_seconds"] == 0.0


def test_replicas_cost_while_they_start_and_stop() -> None:
    samples = [sample(0.0, {"RUNNING": 2}), sample(1.0, {"RUNNING": 2, "STARTING": 1}), sample(3.0, {})]
    assert replica_seconds(samples) == pytest.approx(2 * 1 + 3 * 2)


def test_joins_and_leaves_are_seen() -> None:
    """A sample that could not be taken is no leave, and a replica that was there from the start no join."""
    samples = [
        sample(0.0, {"RUNNING": 1}, a=(0, 0, 0)),
        sample(1.0, {"RUNNING": 1}),
        sample(2.0, {"RUNNING": 2}, a=(0, 0, 0), b=(0, 0, 0)),
        sample(3.0, {"RUNNING": 1, "STOPPING": 1}, a=(0, 0, 0)),
        sample(4.0, {"RUNNING": 1, "STOPPING": 1}, a=(0, 0, 0)),
    ]
    assert joined(samples) == [(2.0, "b")]
    assert shrunk(samples) == [3.0]


def test_a_new_replicas_first_hundred_requests_count() -> None:
    """Up to the sample in which it has them; too few say nothing."""
    samples = [
        sample(0.0, {}, old=(0, 0, 0), new=(0, 0, 0)),
        sample(1.0, {}, old=(1000, 800, 10), new=(1000, 400, 19)),
        sample(2.0, {}, old=(2000, 1600, 20), new=(10_000, 4000, 100)),
        sample(3.0, {}, old=(9000, 1600, 90), new=(90_000, 90_000, 900)),
    ]
    assert new_replica_hit_ratio(samples, 0.0, "new") == pytest.approx(0.4 / 0.8)
    assert new_replica_hit_ratio(samples[:2], 0.0, "new") is None
    assert new_replica_hit_ratio(samples, 0.0, "nobody") is None


def test_interrupted_streams_are_those_silent_around_the_kill() -> None:
    """Their silence, from the kill on, over a cold TTFT of their prompt: 100 tokens at 1,000/s and a step of 10 ms."""
    interrupted = result(9.0, gap_at_s=0.9, gap_s=0.6)
    elsewhere = result(9.0, gap_at_s=0.99, gap_s=0.02)
    later = result(9.0, gap_at_s=1.5, gap_s=0.6)
    assert resumes([interrupted, elsewhere, later], 10.0, 1000.0, 0.01) == pytest.approx([0.5 / 0.11])


def test_curves_are_by_window() -> None:
    """Ten seconds each; a window without answers has no times; replicas are as they were sampled."""
    run = Run([result(1.0), result(2.0, cached=70), result(25.0)], [sample(0.5, {"RUNNING": 2})], [(3.0, "kill")])
    found = curves(run, 35.0)
    assert [window["at_s"] for window in found["windows"]] == [5.0, 15.0, 25.0]
    assert [window["offered_per_s"] for window in found["windows"]] == [0.2, 0.0, 0.1]
    assert found["windows"][0]["hit_rate"] == pytest.approx(0.6) and "ttft_p50_s" not in found["windows"][1]
    assert found["replicas"] == [{"at_s": 0.5, "RUNNING": 2}] and found["actions"] == [(3.0, "kill")]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    run = Run(
        [result(float(number)) for number in range(60)], [sample(0.5, {"RUNNING": 2}), sample(9.0, {"STOPPING": 1})]
    )
    plot_curves(
        tmp_path / "deep" / "found.png", {"ours": curves(run, 60.0), "other": curves(Run(), 60.0)}, SPANS, "title"
    )
    assert (tmp_path / "deep" / "found.png").stat().st_size > 10_000
