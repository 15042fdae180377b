"""`python -m benchmarks models`: its arithmetic, and a control that takes the CPU it should, without servers."""

import asyncio
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from random import Random
from typing import Any

import pytest

from benchmarks.end_to_end import models
from benchmarks.end_to_end.models import (
    CHANGES,
    NOTHING,
    children_cpu_s,
    control_of,
    extra_cpu_s,
    processes,
    ratios,
    shots,
)
from serve_app.replay.client import TimedAnswer
from serve_app.replay.open_loop import Result, Shot


def test_ratios_are_medians_of_quotients_within_a_run() -> None:
    """Each run is compared with itself: a run on a slower machine changes nothing."""

    def run(speed: float, slowed: float) -> dict[str, Any]:
        p99_s = {NOTHING: 0.5, **dict.fromkeys(CHANGES, slowed), **{control_of(change): 0.6 for change in CHANGES}}
        return {phase: {"answer_s": {"p99": speed * value}} for phase, value in p99_s.items()}

    found = ratios([run(1.0, 0.6), run(7.0, 0.9), run(2.0, 0.75)])
    assert found == {change: {"nothing": pytest.approx(1.5), "control": pytest.approx(1.25)} for change in CHANGES}


@pytest.mark.parametrize(("busy_s", "extra_s"), [(14.0, 8.0), (3.0, 0.0)])
def test_a_changes_cpu_is_what_requests_alone_would_not_have_taken(busy_s: float, extra_s: float) -> None:
    nothing = {"busy_cpu_s": 4.0, "seconds": 10.0}
    assert extra_cpu_s({"busy_cpu_s": busy_s, "seconds": 15.0}, nothing) == extra_s


def test_the_control_starts_processes_until_they_took_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "IMPORTS", [sys.executable, "-c", "sum(range(2_000_000))"])
    before_s = children_cpu_s()
    asyncio.run(processes(0.2))
    assert children_cpu_s() - before_s >= 0.2


def test_failures_are_told_and_do_not_count_as_times() -> None:
    shot, answer = Shot(0.0, "/", {}), TimedAnswer(0.1, 0.4, "", 1, 0, 1)
    found = models.figures_of([Result(shot, 0.0, answer), Result(shot, 0.0, None, 503, "busy " + "x" * 900)])
    assert (found["requests"], len(found["failed"]), len(found["failed"][0])) == (2, 1, 200)
    assert found["answer_s"]["p99"] == pytest.approx(0.4) and found["ttft_s"]["p99"] == pytest.approx(0.1)


def test_requests_of_five_seconds_come_at_the_asked_rate() -> None:
    planned = [len(shots(Namespace(requests_per_s=12.0), Random(seed))) for seed in range(40)]
    assert sum(planned) / len(planned) == pytest.approx(60, rel=0.05)


def test_each_change_is_followed_by_its_control(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole benchmark over a deployment that changes at once: phases, their CPU, and the summary."""
    changed: list[str] = []

    async def change(name: str) -> None:
        changed.append(name)

    async def fire(url: str, planned: Sequence[Shot], *_: Any) -> list[Result]:
        await asyncio.sleep(0.01)
        return [Result(shot, 0.0, TimedAnswer(0.1, 0.4, "", 1, 0, 1)) for shot in planned]

    async def measured(cluster: Any, arguments: Namespace) -> list[dict[str, Any]]:
        deployment: Any = Namespace(cluster=Namespace(url=""), change=change)
        return [await models.measure(deployment, arguments, run) for run in range(arguments.runs)]

    monkeypatch.setattr(models, "fire", fire)
    monkeypatch.setattr(models, "measured", measured)
    monkeypatch.setattr(models, "LocalCluster", lambda nodes: nullcontext())
    monkeypatch.setattr(models, "IMPORTS", [sys.executable, "-c", ""])
    models.run(["--runs", "2", "--seconds", "0", "--pause-s", "0"])
    out = json.loads(capsys.readouterr().out)
    assert changed == [*CHANGES, *CHANGES]
    phases = [NOTHING, *(phase for name in CHANGES for phase in (name, control_of(name)))]
    assert [list(run) for run in out["results"]["runs"]] == [phases, phases]
    assert "Simulated: 0 of " in out["summary"]
    assert "cannot start 1.00 (1.00 of processes with equal CPU); added 1.00" in out["summary"]
