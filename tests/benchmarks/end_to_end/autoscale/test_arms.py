"""The arms: what each tells warmpath and Serve, and others' rules inside Serve's controller."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig as ServeScaling

from benchmarks.end_to_end.autoscale.arms import ARMS, MOST_COMPRESSED, Contest, arm_of
from benchmarks.end_to_end.autoscale.measured_rule import AnswerTimes, MeasuredRule, answer_times
from router.protocol.autoscaling import ReplicaFigures
from serve_app.config.app import AppConfig
from serve_app.replay.client import TimedAnswer
from serve_app.replay.rules import UPSCALE_DELAY_S

FIGURES = ReplicaFigures(0, 0, 0, 1.0, 0, 0, 1, 1, 0, 0, 0, 0).to_floats()


def contest(compressed: float = MOST_COMPRESSED) -> Contest:
    return Contest(least=1, most=5, fixed=3, target_ttft_s=2.0, compressed=compressed, ongoing=2.0)


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("compressed", [1.0, MOST_COMPRESSED])
def test_warmpath_and_serve_take_each_arm(name: str, compressed: float, tmp_path: Path) -> None:
    """Also with the shortest delays; what Serve gets of a policy is JSON."""
    arm = arm_of(name, contest(compressed), tmp_path / "times.json")
    assert AppConfig(model="demo", **arm.settings).first_replicas == (3 if name == "fixed" else 1)
    options = json.loads(json.dumps(arm.replicas))
    if options:
        scaling = ServeScaling(**options["autoscaling_config"])
        assert (scaling.min_replicas, scaling.max_replicas) == (1, 5)
        assert scaling.look_back_period_s > scaling.metrics_interval_s
        if kwargs := options["autoscaling_config"].get("policy", {}).get("policy_kwargs"):
            MeasuredRule(**kwargs)


def answer(ttft_s: float) -> TimedAnswer:
    return TimedAnswer(ttft_s, ttft_s + 1.0, "", 10, 0, 11)


def context(target: int, running: int, ongoing: float = 10.0) -> Any:
    replicas = [SimpleNamespace(unique_id=f"r{number}") for number in range(running)]
    by_name = {
        name: {_Id(one.unique_id): [SimpleNamespace(value=value)] for one in replicas}
        for name, value in FIGURES.items()
    }
    return SimpleNamespace(
        target_num_replicas=target,
        running_replicas=replicas,
        raw_metrics=by_name,
        total_num_requests=ongoing,
        total_queued_requests=0.0,
    )


class _Id(SimpleNamespace):
    def __init__(self, unique_id: str) -> None:
        super().__init__(unique_id=unique_id)

    def __hash__(self) -> int:
        return hash(self.unique_id)


def rule(name: str, times: Path, now_s: list[float]) -> MeasuredRule:
    return MeasuredRule(name, str(times), 60.0, 1, 5, 2.0, clock=lambda: now_s[0])


def test_measured_times_survive_their_way_and_old_ones_go(tmp_path: Path) -> None:
    times = AnswerTimes(tmp_path / "times.json")
    assert answer_times(times.path) == []
    times.add(answer(0.5), 0.75)
    ((ended_s, ttft_s, tpot_s),) = answer_times(times.path)
    assert (ttft_s, tpot_s) == (0.75, pytest.approx(0.1))
    assert ended_s <= time.time()


def test_rays_rule_grows_by_one_after_its_delay_in_compressed_time(tmp_path: Path) -> None:
    """Serve calls it ten times a second; between two periods, and without any replica, nothing changes."""
    times, now_s = AnswerTimes(tmp_path / "times.json"), [100.0]
    asked = rule("ray_ttft", times.path, now_s)
    times.add(answer(9.0), 9.0)
    assert asked(context(2, 0))[0] == 2
    assert asked(context(2, 2))[0] == 2
    now_s[0] += 1.01 * UPSCALE_DELAY_S / 60.0
    times.add(answer(9.0), 9.0)
    assert asked(context(2, 2))[0] == 3
    assert asked(context(3, 2))[0] == 3


def test_llmds_rule_grows_in_proportion(tmp_path: Path) -> None:
    """p90 of 2.2 s over a target of 2 s is twice 0.55: twice as many."""
    times, now_s = AnswerTimes(tmp_path / "times.json"), [100.0]
    times.add(answer(2.2), 2.2)
    assert rule("llmd", times.path, now_s)(context(2, 2))[0] == 4


def test_a_fault_of_a_rule_stops_no_controller(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text("no JSON")
    assert rule("llmd", path, [100.0])(context(2, 2))[0] == 2
