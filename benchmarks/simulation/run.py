"""Time to first token and hit rate of routing policies on a simulated cluster that replays a trace.

The routers and the replicas' cache index are the real code; a forward is a cost model. Baselines run on replicas that
serve first come, first served. Then every policy runs with and without our replica order and pulls. `--trace agents`
runs sessions of coding agents in a closed loop, by job time (best with `--replicas 2`), `--trace long_and_short` those
of one tenant, 20 long and 100 short ones.
"""

import time
from argparse import BooleanOptionalAction
from dataclasses import asdict
from functools import partial
from itertools import product

from benchmarks.common.harness import Findings, Options, benchmark, flag, note
from benchmarks.common.trace import add_trace_flags, chosen_trace
from benchmarks.simulation.agents import agents_summary, simulate_agents, simulate_long_and_short
from benchmarks.simulation.cluster import Cluster, unlimited
from benchmarks.simulation.front_door import RAY_PREFIX
from benchmarks.simulation.settings import ClusterSettings, Contender, prepare
from router.settings import DEFAULT_POLICY, POLICY_NAMES
from serve_app.checkpoints.reuse import TraceRequest

CONTENDING = (*POLICY_NAMES, RAY_PREFIX)
UNLIMITED = "unlimited_cache"
AGENTS, LONG_AND_SHORT = "agents", "long_and_short"


def contenders(policies: list[str], *, pull: bool, parts: bool) -> dict[str, Contender]:
    """Return contenders by row name: each policy as its own system runs it, then with other parts.

    ``pull``: whether the default policy pulls. ``parts``: add rows such as ``lmetric/shortest_first+pull``.
    """
    rows = {}
    for policy in policies:
        ours = policy == DEFAULT_POLICY
        rows[policy] = Contender(policy, shortest_first=ours, pull=ours and pull, admission=ours)
    if parts:
        for policy, shortest_first, pulls in product(policies, (False, True), (False, True)):
            contender = Contender(policy, shortest_first, pulls, admission=policy == DEFAULT_POLICY)
            if contender not in rows.values():
                order = "shortest_first" if shortest_first else "first_come"
                rows[f"{policy}/{order}{'+pull' * pulls}"] = contender
    return rows


def simulate(
    trace: list[TraceRequest], settings: ClusterSettings, runs: dict[str, Contender]
) -> dict[str, dict[str, float]]:
    """Run every contender from cold caches; return figures by row name."""
    requests = prepare(trace, settings.block_size)
    results = {}
    for name, contender in runs.items():
        started_s = time.perf_counter()
        results[name] = Cluster(settings, contender).run(requests).summary()
        note(f"{_line(name, results[name])}  ({time.perf_counter() - started_s:.1f} s)")
    results[UNLIMITED] = unlimited(requests, settings).summary()
    note(_line(UNLIMITED, results[UNLIMITED]))
    return results


def _line(name: str, row: dict[str, float]) -> str:
    times = " ".join(f"{figure} {row[f'ttft_{figure}_s']:7.3f}" for figure in ("mean", "p50", "p90", "p99"))
    rates = f"hit rate {row['hit_rate']:.3f}  pulled {row['pulled_rate']:.3f}  sent back {row['rerouted_rate']:.2f}"
    return f"{name:36} {rates}  TTFT {times} s"


def summary(results: dict[str, dict[str, float]]) -> str:
    """Return a sentence with the ratio of our mean TTFT to the baselines', and the parts' shares, if measured."""
    means = {name: row["ttft_mean_s"] for name, row in results.items()}
    ours = means.get(DEFAULT_POLICY)
    if ours is None:
        return "Simulated mean TTFT: " + ", ".join(f"{name} {mean:.2f} s" for name, mean in means.items()) + "."
    baselines = [name for name in CONTENDING if name in means and name != DEFAULT_POLICY]
    ratios = "".join(f", {ours / means[name]:.2f} of {name}'s" for name in baselines)
    sentence = f"mean TTFT {ours:.2f} s with {DEFAULT_POLICY}{ratios}."
    parts = [f"{DEFAULT_POLICY}/{part}" for part in ("first_come", "shortest_first", "first_come+pull")]
    if all(part in means for part in parts):
        alone, order, pull = (means[part] for part in parts)
        sentence += (
            f" Routing alone {alone:.2f} s; and our replica order {order:.2f}, and pulls {pull:.2f}, all {ours:.2f}."
        )
    return sentence


@benchmark(
    __doc__,
    partial(add_trace_flags, requests=6000),
    flag("replicas", 16),
    flag("blocks", 1500, "blocks of 512 tokens per replica"),
    flag("prefill-rate", [5000.0], "tokens/s; several: in turn", type=float, nargs="+"),
    flag("speed", 1.0, "divides the trace's timestamps"),
    flag("routers", 1),
    flag("feed-delay-ms", 0.0),
    flag("pull", True, action=BooleanOptionalAction),
    flag("parts", True, "add rows for each part's share", action=BooleanOptionalAction),
    flag("policies", list(CONTENDING), nargs="+", choices=CONTENDING),
    flag("sessions", 120, f"with --trace {AGENTS}: number of sessions, of 200"),
    flag("running", 32.0, "with agents: concurrent sessions without a queue"),
    flag("pools", [2, 1, 0.5, 0.25], "with agents: fractions of the working set", type=float, nargs="+"),
    flag("tenants", 4, "with agents"),
    simulated=True,
)
def run(options: Options) -> Findings:
    """Replay the trace with every policy."""
    settings = ClusterSettings(
        replicas=options.replicas,
        blocks=options.blocks,
        prefill_tokens_per_s=options.prefill_rate[0],
        prefill_rates=tuple(options.prefill_rate),
        routers=options.routers,
        feed_delay_s=options.feed_delay_ms / 1000.0,
        speed=options.speed,
        seed=options.seed,
    )
    if options.trace == AGENTS:
        rows = simulate_agents(settings, options.pools, options.sessions, options.running, options.tenants)
        return Findings(rows, agents_summary(rows))
    if options.trace == LONG_AND_SHORT:
        rows = simulate_long_and_short(settings, options.pools)
        return Findings(rows, agents_summary(rows))
    rows = simulate(
        chosen_trace(options), settings, contenders(options.policies, pull=options.pull, parts=options.parts)
    )
    replayed = {"pull": options.pull, "trace": options.trace, "skip": options.skip, "requests": options.requests}
    return Findings(rows, summary(rows), {**asdict(settings), **replayed})
