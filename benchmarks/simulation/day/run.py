"""What a rule of scaling costs over a day of many tenants, and what it does to the time to first token. Simulated.

`--model router`: the product's routers, cache index and policy on a virtual clock, a cost model for a forward.
`--model queues`: the policy over plain queues, for large pools. Requests are as coarse as `--requests` a day makes
them: replicas are slowed down until the peak needs `--replicas` of them, and every time inside a replica is stretched
alike; starts, delays and windows are not.
"""

from __future__ import annotations

import argparse
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from benchmarks.common.plots import plot_lines
from benchmarks.common.report import parser_of, percentile, write
from benchmarks.common.trace import TRACE_BLOCK_TOKENS
from benchmarks.simulation.cluster import uncached_by_all
from benchmarks.simulation.day.pool import ElasticPool
from benchmarks.simulation.day.queues import QueuePool
from benchmarks.simulation.day.rules import Ours, ServeDefault, Steps, Threshold
from benchmarks.simulation.day.view import DayOutcome, Rule
from benchmarks.simulation.settings import ClusterSettings, Contender, SimulatedRequest, prepare
from benchmarks.traffic.tenants import TrafficSettings, tenant_traffic
from router.settings import DEFAULT_POLICY

OURS = Contender(DEFAULT_POLICY, shortest_first=True, pull=True)
POWER_OF_TWO = Contender("power_of_two")
WINDOW_S, LOAD_S = 600.0, (120.0, 300.0)
FULL = 0.75
"""How busy the peak keeps `--replicas` of them."""
REPORT_S = 0.25
"""Between two load reports: rarer than the product's, for the time it takes to simulate them."""
NATURAL_RATE = 5000.0
"""Uncached tokens/s of a replica that is not slowed down."""


@dataclass(frozen=True, slots=True)
class Run:
    """A contender and the rule that sizes its pool."""

    name: str
    contender: Contender
    rule: Callable[[], Rule]


@dataclass(frozen=True, slots=True)
class Day:
    """Traffic on replicas slowed to it. ``times_s``, ``own_s``: arrivals, and prefill behind an unlimited cache.

    ``requests``: prepared for routers and caches; ``first``: replicas that everybody starts with.
    """

    times_s: list[float]
    own_s: list[float]
    requests: list[SimulatedRequest]
    settings: ClusterSettings
    first: int
    most: int

    @property
    def own_p90_s(self) -> float:
        """The p90 that no number of replicas undercuts."""
        return percentile(self.own_s, 90)

    def run(self, run: Run) -> tuple[Rule, DayOutcome]:
        """Let one contender have the day."""
        rule = run.rule()
        if self.requests:
            pool = ElasticPool(self.settings, run.contender, rule, first=self.first, most=self.most)
            return rule, pool.run(self.requests)
        queues = QueuePool(rule, first=self.first, most=self.most)
        return rule, queues.run(list(zip(self.times_s, self.own_s, strict=True)))


def make_day(requests: int, replicas: int, seed: int, seconds: float, *, routers: bool) -> Day:
    """Make the day's traffic, and replicas slow enough for it to need ``replicas`` of them at its peak."""
    traffic = TrafficSettings(requests / seconds, seconds=seconds, system_blocks=6, max_blocks=12, seed=seed)
    trace = list(tenant_traffic(traffic))
    prompts = ((request.prompt_tokens, request.hash_ids) for request in trace)
    own = list(uncached_by_all(prompts, TRACE_BLOCK_TOKENS))
    work = [0.0] * (int(seconds // WINDOW_S) + 1)
    for request, tokens in zip(trace, own, strict=True):
        work[int(request.arrival_s // WINDOW_S)] += tokens
    rate = max(work) / WINDOW_S / (FULL * replicas)
    stretch = NATURAL_RATE / rate
    natural = ClusterSettings(blocks=800, report_interval_s=REPORT_S, seed=seed)
    settings = replace(
        natural,
        prefill_tokens_per_s=rate,
        decode_token_s=natural.decode_token_s * stretch,
        report_interval_s=natural.report_interval_s * stretch,
        resend_s=natural.resend_s * stretch,
        pull_tokens_per_s=natural.pull_tokens_per_s / stretch,
    )
    return Day(
        times_s=[request.arrival_s for request in trace],
        own_s=[tokens / rate for tokens in own],
        requests=prepare(trace) if routers else [],
        settings=settings,
        first=max(1, round(work[0] / WINDOW_S / rate / FULL)),
        most=2 * replicas,
    )


def runs(day: Day, chosen: Sequence[str]) -> list[Run]:
    """Return who contends: every rule at several of its settings."""
    rules: list[tuple[str, Contender, Callable[[float], Rule], tuple[float, ...]]] = [
        ("ours", OURS, lambda factor: Ours(factor * day.own_p90_s, day.most), (1.2, 1.5, 2.0, 3.0)),
        ("default", OURS, ServeDefault, (1, 1.5, 2, 3, 4, 6)),
        ("threshold", OURS, Threshold, (0.25, 0.5, 1, 2, 3)),
        ("steps", OURS, Steps, (0.25, 0.5, 1, 2, 3)),
    ]
    if day.requests:
        rules.append(("p2c default", POWER_OF_TWO, ServeDefault, (1, 1.5, 2, 3, 4, 6)))
    found = [
        Run(f"{name} {setting:g}", contender, partial(rule, setting))
        for name, contender, rule, settings in rules
        for setting in settings
    ]
    if not chosen:
        return found
    return [run for name in chosen for run in found if name in (run.name, run.name.rpartition(" ")[0])]


def flaps(outcome: DayOutcome, day: Day, delay_s: float) -> int:
    """Count decisions that were undone within the next delay although the load did not turn.

    It turned where the work of the last two or five minutes (behind an unlimited cache) changed by 5 % in the later
    decision's direction.
    """
    work_s = [0.0, *accumulate(day.own_s)]

    def load(at_s: float, span_s: float) -> float:
        return work_s[bisect_left(day.times_s, at_s)] - work_s[bisect_left(day.times_s, at_s - span_s)]

    changes = [(at_s, after - before) for (_, before), (at_s, after) in pairwise(outcome.sizes)]
    found = 0
    for (first_s, first), (second_s, second) in pairwise(changes):
        if (first > 0) != (second > 0) and second_s - first_s < delay_s:
            loads = [(load(first_s, span_s), load(second_s, span_s)) for span_s in LOAD_S]
            up = second > 0
            found += not any(after > 1.05 * before if up else after < before / 1.05 for before, after in loads)
    return found


def figures(rule: Rule, outcome: DayOutcome, day: Day) -> dict[str, float]:
    """Return a run's row."""
    times = outcome.ttft_s
    gone_s = outcome.smallest_s - outcome.gone_s if outcome.smallest_s else float("nan")
    return {
        "replica_hours": outcome.replica_s / 3600.0,
        "ttft_p50_s": percentile(times, 50),
        "ttft_p90_s": percentile(times, 90),
        "ttft_p99_s": percentile(times, 99),
        "hit_rate": outcome.cached_tokens / outcome.prompt_tokens if outcome.prompt_tokens else float("nan"),
        "changes": len(outcome.sizes) - 1,
        "flaps": flaps(outcome, day, rule.delay_s),
        "most_replicas": max(size for _, size in outcome.sizes),
        "to_smallest_s": gone_s,
        "periods_beyond_delay": (gone_s - rule.delay_s) / rule.interval_s,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=("router", "queues"), default="router")
    parser.add_argument("--replicas", type=int, default=8, help="that the peak needs")
    parser.add_argument("--requests", type=int, default=30_000, help="in a day")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="rules, or rules with a setting")
    return parser.parse_args(arguments)


def main() -> None:
    """Run everybody through the same day."""
    options = parse()
    seconds = options.hours * 3600.0
    day = make_day(options.requests, options.replicas, options.seed, seconds, routers=options.model == "router")
    told = {"requests": len(day.own_s), "own_p90_s": day.own_p90_s, "first": day.first, "most": day.most}
    print(told, file=sys.stderr)
    results: dict[str, Any] = {}
    sizes: dict[str, list[tuple[float, float]]] = {}
    for run in runs(day, options.only):
        started_s = time.perf_counter()
        rule, outcome = day.run(run)
        row = results[run.name] = figures(rule, outcome, day)
        sizes[run.name] = [(at_s / 3600.0, float(size)) for at_s, size in outcome.sizes]
        said = "  ".join(f"{name} {value:.2f}" for name, value in row.items())
        print(f"{run.name:16} {said}  ({time.perf_counter() - started_s:.0f} s)", file=sys.stderr, flush=True)
    each = ", ".join(f"{name} {row['replica_hours']:.0f} ({row['ttft_p90_s']:.0f} s)" for name, row in results.items())
    said = f"Simulated replica-hours of a day, and p90 of TTFT: {each}."
    write(options.json, {**asdict(day.settings), **vars(options), **told}, results, said)
    if options.json is not None:
        title = f"Simulated ({options.model}): replicas wanted through the day"
        plot_lines(options.json.with_suffix(".png"), sizes, title, "hours", "replicas")


if __name__ == "__main__":
    main()
