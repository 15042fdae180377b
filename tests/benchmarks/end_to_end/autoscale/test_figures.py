"""Figures of a run, made by hand."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.end_to_end.autoscale.contest import sentence_of
from benchmarks.end_to_end.autoscale.figures import row_of, traffic_of
from benchmarks.end_to_end.autoscale.stage import ScalingRun
from benchmarks.end_to_end.autoscale.traffic import OfferedLoad, load_of
from serve_app.replay.client import TimedAnswer
from serve_app.replay.open_loop import Result, Shot


def test_a_row_counts_what_is_lost_altered_and_paid_for(tmp_path: Path) -> None:
    """A replica costs until it is gone; an event is a change of those that shall be there."""
    traffic = traffic_of(load_of(OfferedLoad("plateau", 20.0, 2.0, 16), tmp_path)[0])
    run = ScalingRun(kills=[6.0])
    for number, arrival_s in enumerate(traffic.arrival_s):
        tokens = int(traffic.prompt_tokens[number])
        answer = TimedAnswer(0.5, 1.0, f"text {number}", tokens, tokens // 2, 4)
        run.results[number] = Result(Shot(float(arrival_s), "", {}, number=number), 0.25, answer)
    run.results[0] = Result(run.results[0].shot, 0.0, None, 503, "no replica")
    run.states = [
        (0.0, Counter(RUNNING=1)),
        (5.0, Counter(RUNNING=1, STARTING=2)),
        (10.0, Counter(RUNNING=3)),
        (15.0, Counter(RUNNING=2, STOPPING=1)),
        (20.0, Counter(RUNNING=2)),
    ]
    right = {number: f"text {number}" for number in range(len(traffic))} | {1: "another text"}
    row, made = row_of("ours", run, traffic, right, 0.7)
    assert (row["lost"], row["altered"], row["changes"], row["kills"]) == (1, 1, 2, 1)
    assert row["replica_seconds"] == 5 * (1 + 3 + 3 + 3)
    assert made.sizes == [(0.0, 1), (5.0, 3), (15.0, 2)]
    assert row["within_target"] == 0.0  # a late request counts from when it was due
    assert row["ttft_p50_s"] == pytest.approx(0.75)
    assert row["hit_rate"] == pytest.approx(0.5, abs=0.05)
    assert sentence_of(row).startswith(f"ours: 1 of {len(traffic)} requests lost, 1 altered, 2 scale events, 1 killed")
