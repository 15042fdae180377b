"""Time to first token and hit rate of routing policies on a simulated cluster that replays a trace.

The routers and the replicas' cache index are the real code; a forward is a cost model. Baselines run on replicas that
serve first come, first served. Then every policy runs with and without our replica order and pulls. `--trace agents`
runs sessions of coding agents in a closed loop, by job time (best with `--replicas 2`), `--trace long_and_short` those
of one tenant, 20 long and 100 short ones.
"""

import argparse
import sys
import time
from dataclasses import asdict
from itertools import product

from benchmarks.common.report import parser_of, write
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
    found = {}
    for policy in policies:
        ours = policy == DEFAULT_POLICY
        found[policy] = Contender(policy, shortest_first=ours, pull=ours and pull, admission=ours)
    if parts:
        for policy, shortest_first, pulls in product(policies, (False, True), (False, True)):
            contender = Contender(policy, shortest_first, pulls, admission=policy == DEFAULT_POLICY)
            if contender not in found.values():
                order = "shortest_first" if shortest_first else "first_come"
                found[f"{policy}/{order}{'+pull' * pulls}"] = contender
    return found


def simulate(
    trace: list[TraceRequest], settings: ClusterSettings, runs: dict[str, Contender]
) -> dict[str, dict[str, float]]:
    """Run every contender from cold caches; return figures by row name."""
    requests = prepare(trace, settings.block_size)
    results = {}
    for name, contender in runs.items():
        started_s = time.perf_counter()
        results[name] = Cluster(settings, contender).run(requests).summary()
        print(f"{_line(name, results[name])}  ({time.perf_counter() - started_s:.1f} s)", file=sys.stderr, flush=True)
    results[UNLIMITED] = unlimited(requests, settings).summary()
    print(_line(UNLIMITED, results[UNLIMITED]), file=sys.stderr)
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
    sentence = f"Simulated: mean TTFT {ours:.2f} s with {DEFAULT_POLICY}{ratios}."
    parts = [f"{DEFAULT_POLICY}/{part}" for part in ("first_come", "shortest_first", "first_come+pull")]
    if all(part in means for part in parts):
        alone, order, pull = (means[part] for part in parts)
        sentence += (
            f" Routing alone {alone:.2f} s; and our replica order {order:.2f}, and pulls {pull:.2f}, all {ours:.2f}."
        )
    return sentence


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    add_trace_flags(parser, requests=6000)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=1500, help="blocks of 512 tokens per replica")
    parser.add_argument("--prefill-rate", type=float, nargs="+", default=[5000.0], help="tokens/s; several: in turn")
    parser.add_argument("--speed", type=float, default=1.0, help="divides the trace's timestamps")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--feed-delay-ms", type=float, default=0.0)
    parser.add_argument("--pull", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--parts", action=argparse.BooleanOptionalAction, default=True, help="add rows for each part's share"
    )
    parser.add_argument("--policies", nargs="+", choices=CONTENDING, default=list(CONTENDING))
    parser.add_argument("--sessions", type=int, default=120, help=f"with --trace {AGENTS}: number of sessions, of 200")
    parser.add_argument("--running", type=float, default=32, help="with agents: concurrent sessions without a queue")
    parser.add_argument(
        "--pools", type=float, nargs="+", default=[2, 1, 0.5, 0.25], help="with agents: fractions of the working set"
    )
    parser.add_argument("--tenants", type=int, default=4, help="with agents")
    return parser.parse_args(arguments)


def main() -> None:
    """Replay the trace with every policy."""
    options = parse()
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
    if options.trace in (AGENTS, LONG_AND_SHORT):
        if options.trace == AGENTS:
            found = simulate_agents(settings, options.pools, options.sessions, options.running, options.tenants)
        else:
            found = simulate_long_and_short(settings, options.pools)
        write(options.json, vars(options), found, agents_summary(found))
        return
    runs = contenders(options.policies, pull=options.pull, parts=options.parts)
    results = simulate(chosen_trace(options), settings, runs)
    replayed = {"pull": options.pull, "trace": options.trace, "skip": options.skip, "requests": options.requests}
    write(options.json, {**asdict(settings), **replayed}, results, summary(results))


if __name__ == "__main__":
    main()
