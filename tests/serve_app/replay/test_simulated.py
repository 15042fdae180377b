"""A recorded run simulated again: chance falls as it fell, and a run of few requests is told as a mean."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from serve_app.replay.cluster import ReplayCluster
from serve_app.replay.outcome import figures_of
from serve_app.replay.simulated import AGAIN, AGAIN_RUNS, MEANS, ModelReplay, ReplayPlan, replay_report, shifted
from serve_app.traffic.reader import read_traffic

SIZE = 16
RATES = {"prefill_tokens_per_s": 5000.0, "pool_tokens": 4000, "policy": "estimated_ttft"}


def file_of(path: Path, changes: list[tuple[int, list[str]]], requests: list[dict[str, object]]) -> Path:
    """Write a recording. ``changes``: ms, and the replicas from then on."""
    facts = {"m": {**RATES, "replicas": len(changes[0][1])}}
    header = {
        "warmpath_traffic": 1,
        "recording": "r",
        "started_s": 1e9,
        "block_tokens": SIZE,
        "writer": "w",
        "models": facts,
    }
    lines: list[object] = [header]
    lines += [{"timestamp": at_ms, "replicas": names, "model": "m"} for at_ms, names in changes]
    lines += requests
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def request(at_ms: int, ids: list[int], replica: str, cached: int = 0) -> dict[str, object]:
    return {
        "timestamp": at_ms, "input_length": len(ids) * SIZE + 1, "output_length": 1, "hash_ids": ids, "model": "m",
        "replica": replica, "ttft_ms": 10.0, "cached_tokens": cached,
    }  # fmt: skip


def replay_of(file: Path) -> ModelReplay:
    workload = read_traffic([file])
    return ModelReplay(workload, "m", workload.model == 0, ReplayPlan())


@pytest.mark.parametrize("order", [("b", "a", "b"), ("a", "a", "b")])
def test_ties_fall_as_they_were_recorded(tmp_path: Path, order: tuple[str, ...]) -> None:
    """New prompts at idle replicas go where they went; one that is held goes to its holder, recorded or not."""
    requests = [request(1000 * place, [10 * place + 1, 10 * place + 2], name) for place, name in enumerate(order)]
    requests.append(request(9000, [1, 2, 3], "a" if order[0] == "b" else "b"))
    replay = replay_of(file_of(tmp_path / "t", [(0, ["a", "b"])], requests))
    setup = replay.as_recorded()
    assert setup is not None
    served_by = ReplayCluster(replay.traffic, setup).run().served_by.tolist()
    assert served_by == ["ab".index(name) for name in (*order, order[0])]


def test_a_replica_that_takes_anothers_place_has_its_number(tmp_path: Path) -> None:
    """After a kill as many replicas run as before, so the simulated one is the same."""
    changes = [(0, ["a", "b"]), (2000, ["b", "c"]), (4000, ["b", "c", "d"])]
    requests = [request(500 + 1000 * place, [place], name) for place, name in enumerate(["b", "a", "c", "b", "d"])]
    setup = replay_of(file_of(tmp_path / "t", changes, requests)).as_recorded()
    assert setup is not None and setup.served_by == (1, 0, 0, 1, 2)


def test_a_run_of_few_requests_is_told_as_a_mean(tmp_path: Path) -> None:
    """The row is the mean of the simulations with shifted arrivals, which keep their order."""
    rng = np.random.default_rng(2)
    requests = [request(place, [int(rng.integers(60)), place + 100], "ab"[place % 2]) for place in range(0, 900, 4)]
    file = file_of(tmp_path / "t", [(0, ["a", "b"])], requests)
    replay = replay_of(file)
    setup = replay.as_recorded()
    assert setup is not None and setup.runs == AGAIN_RUNS
    runs = [replay.traffic, *(shifted(replay.traffic, seed) for seed in range(1, AGAIN_RUNS))]
    for each in runs:
        assert (np.diff(each.arrival_s) >= 0.0).all()
        assert np.abs(each.arrival_s - replay.traffic.arrival_s).max() <= 0.005
    rows = [figures_of(each, ReplayCluster(each, setup).run(), 2.0) for each in runs]
    report = replay_report(read_traffic([file]), ReplayPlan(processes=1), lambda *_: None)
    again = next(row for row in report["rows"] if row["name"] == AGAIN)
    assert len({row["ttft_mean_s"] for row in rows}) > 1
    for name in MEANS:
        assert again[name] == pytest.approx(np.mean([row[name] for row in rows]))
