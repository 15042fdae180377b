"""Rules of autoscaling on real Ray Serve, under replayed traffic: what is lost, what hits, TTFT and replicas become.

A cluster for each arm, over loopback, with the same requests: the rule of ours, Ray Serve's own, Ray's for TTFT,
llm-d's, and a fixed number. Simulated engines have a card's speed, with tokens divided by `--shrink` so that two cores
carry them; all delays are divided by `--compress`. `--kills` kills replicas while others come or go; every answer is
compared with that of an engine to which nothing happens. `--truth` records runs and simulates them again;
`--recommended` runs the settings that `warmpath replay` recommends for a recorded run.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common.harness import Findings, FlagError, Options, benchmark, engine_flag, flag, names_flag
from benchmarks.end_to_end.autoscale.arms import ARMS, arm_of
from benchmarks.end_to_end.autoscale.contest import compare, contest_of
from benchmarks.end_to_end.autoscale.recorded import recommended, truth, truth_sentence
from benchmarks.end_to_end.autoscale.traffic import AGENTS, SHAPES, TENANTS, OfferedLoad, load_of
from serve_app.replay.page import write_page
from serve_app.replay.rates import CARDS


@benchmark(
    __doc__,
    flag("trace", "ramp", f"a file of traffic, or {TENANTS}, {AGENTS}, {', '.join(SHAPES)}"),
    names_flag("arms", ARMS),
    flag("seconds", 180.0, "of each arm; the traffic is fitted into them"),
    flag("requests-per-s", 8.0, "of a shape at its peak, else the mean"),
    flag("shrink", 16, "what tokens are divided by, answers by half of it; 1: as they are"),
    flag("compress", 0.0, "what delays are divided by; default: as the traffic's time, at most 60, or 20"),
    flag("target-ttft", 2.0, "seconds"),
    flag("min-replicas", 1),
    flag("max-replicas", 5),
    flag("fixed", 0, "replicas of the arm fixed; default: between both bounds"),
    flag("ongoing", 2.0, "Serve's target_ongoing_requests; 2 is its default"),
    flag("kills", 0, "SIGKILLs while replicas come or go, in each arm"),
    flag("no-check", False, "do not compare the answers"),
    engine_flag("simulated", "copies"),
    flag("card", "l40s", "of the simulated engine, with an 8B model", choices=sorted(CARDS)),
    flag("truth", False, "record three traffics, and simulate them again"),
    flag("recommended", False, "record the traffic, and run what a replay recommends for it"),
    flag("part", 0.95, "with --recommended: of the requests, within the target"),
    flag("runs", 5, "with --recommended"),
    flag("start-s", 6.0, "with --recommended: until a new replica takes requests, for the simulation"),
    flag("seed", 0),
    flag("html", None, "write a page with charts here", type=Path),
    model="demo",
)
def run(options: Options) -> Findings:
    """Run what was asked for."""
    if options.kills and options.max_replicas < 2:
        raise FlagError("--kills needs two replicas or more: --max-replicas")
    with TemporaryDirectory(prefix="warmpath-autoscale-") as name:
        folder = Path(name)
        if options.truth:
            rows = truth(options, contest_of(options, 1.0), folder)
            return Findings(rows, " ".join(truth_sentence(*row) for row in rows.items()))
        load = OfferedLoad(options.trace, options.seconds, options.requests_per_s, options.shrink, options.seed)
        workload, speed = load_of(load, folder)
        contest = contest_of(options, speed)
        if options.recommended:
            found = recommended(options, contest, workload, folder)
            told = f"What a replay recommends meets the target in {found['met']} of {len(found['rows'])} runs."
            return Findings(found, told)
        arms = {arm: arm_of(arm, contest, folder / "times.json") for arm in options.arms}
        report = compare(options, workload, contest, arms, folder / "times.json")
    if options.html is not None:
        write_page(report, options.html)
    results = {name: report[name] for name in ("rows", "warnings", "rates")}
    return Findings(results, " ".join(report["verdict"]))
