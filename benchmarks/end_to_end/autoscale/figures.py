"""From a run's results to the row and the curves that a simulated run has, so that both are read alike. Pure."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.end_to_end.autoscale.stage import RUNNING, STARTING, STOPPING, ScalingRun
from serve_app.replay.cluster import Replayed
from serve_app.replay.outcome import figures_of
from serve_app.replay.prompts import ModelTraffic
from serve_app.replay.simulated import model_traffic
from serve_app.traffic.workload import Workload


def traffic_of(workload: Workload) -> ModelTraffic:
    """Return the requests as figures are made of them, all as of one model."""
    return model_traffic(workload, np.ones(len(workload), np.bool_))


def replayed(run: ScalingRun, traffic: ModelTraffic) -> Replayed:
    """Return a run in the form of a simulated one."""
    count = len(traffic)
    ttft_s, cached = np.full(count, np.nan), np.zeros(count, np.int64)
    ended_s = [0.0]
    for number, result in run.results.items():
        if result.answer is not None:
            ttft_s[number], cached[number] = result.ttft_s, result.answer.cached_tokens
            ended_s.append(result.shot.at_s + result.late_s + result.answer.total_s)
    made = Replayed(ttft_s, np.zeros(count), cached, np.zeros(count, np.int64), np.full(count, -1, np.int32))
    first_s = traffic.arrival_s + np.nan_to_num(ttft_s, nan=0.0)
    for (at_s, states), until_s in zip(run.states, [at for at, _ in run.states[1:]] + [None], strict=True):
        wanted = states.total() - states[STOPPING]
        if not made.sizes or made.sizes[-1][1] != wanted:
            made.sizes.append((at_s, wanted))
        waiting = int(np.count_nonzero((traffic.arrival_s <= at_s) & (first_s > at_s)))
        made.samples.append((at_s, states[RUNNING], states[STARTING], waiting))
        if until_s is not None:
            made.replica_s += states.total() * (until_s - at_s)
    made.end_s = max(ended_s)
    return made


def row_of(
    name: str, run: ScalingRun, traffic: ModelTraffic, right: Mapping[int, set[str]], target_ttft_s: float
) -> tuple[dict[str, Any], Replayed]:
    """Return an arm's row, and its run. ``right``: the undisturbed answers; none are compared without any.

    ``changes``: scale events, each of one or more replicas that join or leave.
    """
    made = replayed(run, traffic)
    altered = [
        number
        for number, result in run.results.items()
        if right and result.answer is not None and result.answer.text not in right[number]
    ]
    reasons = sorted({result.reason[:200] for result in run.results.values() if result.reason})
    late_s = max((result.late_s for result in run.results.values()), default=0.0)
    return {
        "name": name,
        **figures_of(traffic, made, target_ttft_s),
        "replica_seconds": made.replica_s,
        "kills": len(run.kills),
        "altered": len(altered),
        "reasons": reasons[:5],
        "late_max_s": late_s,
    }, made
