"""The tenants' day: a file that replays, and ratios of the rules that meet the goal."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulation.day import day, ratios, run, write_day
from serve_app.traffic.reader import read_traffic


def test_a_day_is_a_file_of_all_tenants(tmp_path: Path) -> None:
    write_day(tmp_path / "day.jsonl", 0.5, 0.5, seed=1)
    workload = read_traffic([tmp_path / "day.jsonl"])
    assert 700 < len(workload) < 1100
    assert 10 <= len(workload.tenants) <= 16
    assert (workload.arrival_s == day(0.5, 0.5, seed=1).arrival_s).all()


def test_only_rules_that_meet_the_goal_are_compared() -> None:
    def row(hours: float, *, meets: bool = True) -> dict[str, Any]:
        return {"replica_hours": hours, "meets": meets}

    rows = {
        "ours": row(9.0), "serve": row(20.0), "fixed": row(10.0), "llmd": row(1.0, meets=False), "oracle": row(8.0),
        "ours, no copies": row(9.5),
    }  # fmt: skip
    assert ratios(rows) == {"of the best other rule": 0.9, "of the oracle": 1.125}
    assert ratios({**rows, "ours": row(9.0, meets=False)}) == {}


def test_a_short_day_runs() -> None:
    findings = run.measure(
        run.parse(["--seeds", "1", "--hours", "0.2", "--requests-per-s", "1", "--rules", "ours,fixed", "--part", "0.9"])
    )
    assert set(findings.results["1"]) == {"ours", "fixed", "ours, no copies"}
    assert "replica hours" in findings.summary or findings.summary.startswith("our rule met no goal")


@pytest.mark.parametrize("seed", [0, 1])
def test_seeds_are_other_days(seed: int) -> None:
    assert (
        len(day(0.5, 0.1, seed)) != len(day(0.5, 0.1, seed + 7))
        or (day(0.5, 0.1, seed).arrival_s[:5] != day(0.5, 0.1, seed + 7).arrival_s[:5]).any()
    )
