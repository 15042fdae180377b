"""What rules of autoscaling cost on the tenants' day, at equal times to the first token: replica hours. Simulated.

Sixteen tenants' arrivals of a day, and conversations of a published trace, made as a file and replayed as by
`warmpath replay --autoscaling`. Each seed is another day of the same tenants.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
from rich.progress import Progress

from benchmarks.common.harness import Findings, Options, benchmark, flag, names_flag
from benchmarks.traffic.tenants import TrafficSettings, tenant_traffic
from serve_app.cli.console import console
from serve_app.replay.search import FIXED, ORACLE, OURS, SCALING_RULES, ScalingGoal
from serve_app.replay.setup import Rates, Setup
from serve_app.replay.simulated import model_traffic, scaled
from serve_app.traffic.reader import read_traffic
from serve_app.traffic.record import TrafficRequest
from serve_app.traffic.workload import Workload


def write_day(path: Path, requests_per_s: float, hours: float, seed: int) -> None:
    """Write the day as Mooncake's lines, with tenants."""
    settings = TrafficSettings(requests_per_s, seconds=3600.0 * hours, system_blocks=6, max_blocks=12, seed=seed)
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        for each in tenant_traffic(settings):
            request = TrafficRequest(
                timestamp=round(each.arrival_s * 1000.0, 3),
                input_length=each.prompt_tokens,
                output_length=each.output_tokens,
                hash_ids=list(each.hash_ids),
                tenant=each.tenant,
            )
            file.write(encode(request) + b"\n")


def day(requests_per_s: float, hours: float, seed: int) -> Workload:
    """Return the day as a file has it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "day.jsonl"
        write_day(path, requests_per_s, hours, seed)
        return read_traffic([path])


def hours_of(options: Options, seed: int, progress: Progress) -> dict[str, Any]:
    """Return one day's rows by rule."""
    workload = day(options.requests_per_s, options.hours, seed)
    traffic = model_traffic(workload, np.ones(len(workload), np.bool_))
    rates = Rates(options.prefill_rate, 0.02, 0.0002, pull_tokens_per_s=60_000.0)
    setup = Setup("day", rates, pool_tokens=options.pool_tokens, start_s=options.start_s)
    goal = ScalingGoal(options.ttft_s, options.part, 1, options.max_replicas, options.first)
    task = progress.add_task(f"seed {seed}", total=None)
    found = scaled(traffic, setup, goal, options.rules, lambda done: progress.update(task, completed=done))
    progress.update(task, total=1, completed=1)
    return {row["name"]: row for row in found.rows}


def ratios(rows: dict[str, Any]) -> dict[str, float]:
    """Return our replica hours over those of the best other rule that meets the goal, and over the oracle's."""
    hours = {name: row["replica_hours"] for name, row in rows.items() if row["meets"]}
    others = [spent for name, spent in hours.items() if name in SCALING_RULES and name not in (OURS, ORACLE)]
    told: dict[str, float] = {}
    if OURS in hours and others:
        told["of the best other rule"] = hours[OURS] / min(others)
    if OURS in hours and ORACLE in hours:
        told["of the oracle"] = hours[OURS] / hours[ORACLE]
    return told


@benchmark(
    __doc__,
    flag("seeds", [0, 1, 2, 3, 4], "each a day", type=int, nargs="+"),
    flag("requests-per-s", 4.0, "the day's mean"),
    flag("hours", 24.0),
    flag("prefill-rate", 5000.0, "tokens/s of a replica"),
    flag("pool-tokens", 409_600),
    flag("start-s", 60.0, "until a new replica takes requests"),
    flag("ttft-s", 2.0, "the target"),
    flag("part", 0.99, "of all requests, within the target"),
    flag("max-replicas", 24),
    flag("first", 6, "replicas at midnight: the best fixed number, which a rule that rarely removes one would have"),
    names_flag("rules", SCALING_RULES),
    simulated=True,
)
def run(options: Options) -> Findings:
    """Let each rule find its cheapest settings on each day."""
    with Progress(console=console) as progress:
        days = {str(seed): hours_of(options, seed, progress) for seed in options.seeds}
    told = [ratios(rows) for rows in days.values()]
    said = []
    for name in ("of the best other rule", "of the oracle"):
        values = [each[name] for each in told if name in each]
        if values:
            said.append(f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f}) {name}'s")
    fixed = [rows[FIXED]["replica_hours"] for rows in days.values() if FIXED in rows]
    ours = [rows[OURS]["replica_hours"] for rows in days.values() if OURS in rows]
    sentence = f"our rule's replica hours are {', '.join(said)}" if said else "our rule met no goal"
    if fixed and ours:
        sentence += f"; median {median(ours):.0f} h, a fixed number {median(fixed):.0f} h"
    return Findings(days, f"{sentence}, where {options.part:.0%} of the requests get a token in {options.ttft_s:g} s.")
