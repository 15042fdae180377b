"""Runs that are recorded: simulated again and compared with what happened, or asked which settings they need."""

from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.harness import Options, note
from benchmarks.end_to_end.autoscale.arms import Contest, ScalingArm, arm_of
from benchmarks.end_to_end.autoscale.contest import bars, settings_of
from benchmarks.end_to_end.autoscale.figures import row_of, traffic_of
from benchmarks.end_to_end.autoscale.stage import play
from benchmarks.end_to_end.autoscale.traffic import AGENTS, OfferedLoad, load_of, shots_of
from serve_app.replay.search import FIXED, OURS
from serve_app.replay.simulated import AGAIN, ReplayPlan, replay_report
from serve_app.traffic.reader import read_traffic
from serve_app.traffic.workload import Workload

TRUTHS = (("plateau", FIXED, 1.0), (AGENTS, FIXED, 0.2), ("ramp", OURS, 1.0))
"""Traffic, the arm that serves it, and its part of the load: conversations, agents, and with scale events."""
BARS = {"hit_rate": 0.01, "ttft_mean_s": 0.10, "ttft_p90_s": 0.15}
"""By figure: how far the simulated run may be from the recorded one."""


def recorded_run(
    options: Options, workload: Workload, arm: ScalingArm, name: str, folder: Path
) -> tuple[Workload, dict[str, Any]]:
    """Return what an arm's run has recorded, and its row as the clients saw it."""
    file = folder / f"{name}.jsonl"
    shots = shots_of(workload, options.model, options.seed)
    base = {**settings_of(options), "traffic_log": {"path": str(file)}}
    with bars() as bar:
        run = play(arm, base, shots, folder / "times.json", bar(name, len(shots)))
    row, _ = row_of(name, run, traffic_of(workload), {}, options.target_ttft)
    return read_traffic([file]), row


def truth(options: Options, contest: Contest, folder: Path) -> dict[str, Any]:
    """Return, for each traffic, the recorded run's figures, the simulated one's, and their ratios."""
    rows = {}
    for trace, arm, part in TRUTHS:
        load = OfferedLoad(trace, options.seconds, part * options.requests_per_s, options.shrink, options.seed)
        workload, _ = load_of(load, folder)
        name = f"{trace}, {arm}"
        found, clients = recorded_run(options, workload, arm_of(arm, contest, folder / "times.json"), name, folder)
        report = replay_report(found, ReplayPlan(ttft_s=options.target_ttft), lambda *_: None)
        again = next(row for row in report["rows"] if row["name"] == AGAIN)
        (recorded,) = report["recorded"]
        ratios = {figure: again[figure] / recorded[figure] for figure in BARS}
        rows[name] = {"recorded": recorded, "simulated": again, "clients": clients, "simulated_over_recorded": ratios}
        note(f"{name}: {truth_sentence(name, rows[name])}")
    return rows


def truth_sentence(name: str, row: dict[str, Any]) -> str:
    """Return how far a simulated run is from the recorded one."""
    told = [
        f"{figure.removesuffix('_s')} {row['simulated'][figure]:.3f} for {row['recorded'][figure]:.3f} "
        f"({row['simulated_over_recorded'][figure]:.3f})"
        for figure in BARS
    ]
    met = all(abs(ratio - 1.0) <= BARS[figure] for figure, ratio in row["simulated_over_recorded"].items())
    return f"{name}, simulated for recorded: {', '.join(told)}: {'within' if met else 'not within'} the bars."


def recommended(options: Options, contest: Contest, workload: Workload, folder: Path) -> dict[str, Any]:
    """Record a run, let a replay find settings for it, and run those; return all rows and the settings."""
    first = arm_of(FIXED, contest, folder / "times.json")
    found, row = recorded_run(options, workload, first, "recorded", folder)
    plan = ReplayPlan(
        autoscaling=True, ttft_s=options.target_ttft, part=options.part, rules=(OURS,), least=contest.least,
        most=contest.most, first=contest.least, start_s=options.start_s,
    )  # fmt: skip
    report = replay_report(found, plan, lambda *_: None)
    note(" ".join(report["verdict"]) + "\n" + report["settings"])
    arm = ScalingArm(yaml.safe_load(report["settings"]))
    shots, traffic = shots_of(workload, options.model, options.seed), traffic_of(workload)
    rows = []
    with bars() as bar:
        for number in range(options.runs):
            name = f"recommended {number + 1}"
            run = play(arm, settings_of(options), shots, folder / "times.json", bar(name, len(shots)))
            rows.append(row_of(name, run, traffic, {}, options.target_ttft)[0])
            note(f"{name}: {rows[-1]}")
    met = sum(each["within_target"] >= options.part for each in rows)
    return {"recorded": row, "simulated": report["rows"], "settings": report["settings"], "rows": rows, "met": met}
