"""Replicas that come, go, die and are updated under tenants' traffic: what is lost, and what hits and TTFT become.

Real Ray Serve, one cluster an arm; every answer is compared with that of an engine to which nothing happens. Simulated
engines have about an H200's rates for a model of 70 B parameters, with tokens divided by 16 so that two cores carry it.
`python -m benchmarks autoscale [--arms ours,neither] [--scenarios ramp,plateau,scale_up] [--seconds 30] --json FILE`
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.common.report import names_of, parser_of, write
from benchmarks.end_to_end.autoscale.arms import ARMS
from benchmarks.end_to_end.autoscale.figures import curves, figures_of
from benchmarks.end_to_end.autoscale.plots import plot_curves
from benchmarks.end_to_end.autoscale.scenarios import SCENARIOS, TWO_PHASE, Span, timeline
from benchmarks.end_to_end.autoscale.stage import play
from benchmarks.end_to_end.autoscale.traffic import TrafficShape, shots_of, undisturbed
from benchmarks.end_to_end.recorder import beside

TWO_PHASE_NAME = "two_phase"
_SHRINK = 16
"""What prompts, prefill rate and pool are divided by, and answers by half of it; times stay what they are."""
_PREFILL_TOKENS_PER_S = 6_000.0 / _SHRINK
_DECODE_STEP_S = 0.04
_POOL_BLOCKS = 360_000 // _SHRINK // 16
_TORCH_TOKENS_PER_S = 1500.0
"""About what the demo model prefills on a core that others use too: the measure of a cold TTFT there."""
_LONG_STREAM_S, _DRAIN_S = 25.0, 10.0
_RATIOS = {
    "hit_rate_after_scale_down_ratio": "hit rate after the scale-down / before",
    "hit_rate_after_scale_down_of_unlimited_ratio": "the same, each over what an unlimited cache has of those prompts",
    "ttft_p99_after_scale_up_ratio": "p99 TTFT after the scale-up / steady",
    "new_replica_hit_ratio": "hit rate of the new replica's first requests / the others'",
    "resume_p99_ratio": "p99 pause of interrupted streams / a prefill of their prompt",
}
_OFF = {
    "hit_rate_after_scale_down_ratio": ("no_handover", "neither", "power_of_two"),
    "hit_rate_after_scale_down_of_unlimited_ratio": ("no_handover", "neither", "power_of_two"),
    "ttft_p99_after_scale_up_ratio": ("no_prewarm", "neither", "power_of_two"),
    "new_replica_hit_ratio": ("no_prewarm", "neither", "power_of_two"),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__, "demo")
    parser.add_argument("--engine", choices=["simulated", "torch"], default="simulated")
    parser.add_argument("--arms", type=names_of(ARMS), default=",".join(ARMS))
    known = (*SCENARIOS, TWO_PHASE_NAME)
    parser.add_argument("--scenarios", type=names_of(known), default=",".join(known))
    parser.add_argument("--seconds", type=float, default=60.0, help="the unit of scenarios' lengths, and the windows")
    parser.add_argument("--requests-per-s", type=float, default=2.5, help="at the peak")
    parser.add_argument("--replicas", type=int, default=3, help="at the start, where no rule decides")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, metavar="FILE", help="events for the page; a file an arm")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the application's settings that all arms have."""
    settings = {
        "model": options.model,
        "engine": options.engine,
        "replicas": options.replicas,
        "block_size": 16,
        "num_blocks": _POOL_BLOCKS,
    }
    if options.engine == "simulated":
        return settings | {
            "simulated_prefill_tokens_per_s": _PREFILL_TOKENS_PER_S,
            "simulated_decode_step_s": _DECODE_STEP_S,
        }
    # In bfloat16 what is computed at once and what comes from the cache may round differently.
    return settings | {"dtype": "float32", "num_threads": 1}


def spans_of(scenarios: Sequence[str], seconds: float) -> list[Span]:
    """Return one run's scenarios, in their own order."""
    every = TWO_PHASE if TWO_PHASE_NAME in scenarios else SCENARIOS
    return timeline({name: every[name] for name in every if name in scenarios or every is TWO_PHASE}, seconds)


def compare(
    options: argparse.Namespace, spans: Sequence[Span], progress: Progress, drain_s: float = 0.0
) -> dict[str, dict[str, Any]]:
    """Run every arm through one run's scenarios; return figures by arm.

    ``drain_s``: how long a replica has to leave, where that is over 0; every fourth stream then takes longer.
    """
    simulated = options.engine == "simulated"
    long_tokens = int(_LONG_STREAM_S / _DECODE_STEP_S) if drain_s else 0
    shape = TrafficShape(512 // _SHRINK, _SHRINK // 2, max_blocks=20, long_tokens=long_tokens)
    shots = shots_of(spans, options.requests_per_s, options.model, shape, options.seed)
    base = settings_of(options)
    bar = progress.add_task("undisturbed", total=len(shots))
    right = undisturbed(shots, base, partial(progress.advance, bar))
    if drain_s:
        base["graceful_shutdown_timeout_s"] = drain_s
    found: dict[str, dict[str, Any]] = {}
    two_phase = f".{TWO_PHASE_NAME}" * bool(drain_s)
    for name in options.arms:
        bar = progress.add_task(name, total=len(shots))
        record = beside(options.record, f"{name}{two_phase}", len(options.arms) + bool(drain_s))
        run = play(ARMS[name], base, spans, options.seconds, shots, partial(progress.advance, bar), record)
        rate = _PREFILL_TOKENS_PER_S if simulated else _TORCH_TOKENS_PER_S
        figures = figures_of(run, right, spans, options.seconds, rate, _DECODE_STEP_S)
        found[name] = {"label": ARMS[name].label, **figures, "notices": run.notices}
        found[name]["curves"] = curves(run, spans[-1].end_s)
        progress.console.print(f"{name}: {_line(figures)}")
    return found


def _line(figures: dict[str, Any]) -> str:
    shown = ("requests_lost", "hit_rate", "ttft_p50_s", "ttft_p99_s", "replica_seconds", *_RATIOS)
    told = ((name, figures.get(name)) for name in shown)
    return ", ".join(f"{name} {value:.3g}" if isinstance(value, (int, float)) else f"{name} -" for name, value in told)


def contract(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the benchmark contract's figures: with the feature on, and with it off, by the arms that have it off."""
    ours = found.get("ours", {})
    said: dict[str, Any] = {"requests_lost": {name: figures["requests_lost"] for name, figures in found.items()}}
    for ratio in _RATIOS:
        off = {name: found[name][ratio] for name in _OFF.get(ratio, ()) if name in found}
        said[ratio] = {"on": ours.get(ratio), "off": off}
    rule = found.get("autoscaling")
    said["replica_seconds_ratio"] = {
        name: rule["replica_seconds"] / figures["replica_seconds"]
        for name, figures in found.items()
        if rule is not None and ARMS[name].rule and name != "autoscaling"
    }
    return said


def sentences_of(results: dict[str, Any]) -> str:
    """Return what was found, in a sentence for each run."""
    sentences = []
    for name, run in (("One phase", results), ("Two phases", results.get(TWO_PHASE_NAME, {}))):
        each = [
            f"{arm} {figures['requests_lost']} lost or altered, {figures['replica_seconds']:.0f} replica-seconds"
            + "".join(f", {words} {figures[ratio]:.3g}" for ratio, words in _RATIOS.items() if figures.get(ratio))
            for arm, figures in run.get("arms", {}).items()
        ]
        if each:
            sentences.append(f"{name}: {'; '.join(each)}.")
    return " ".join(sentences) or "Nothing was asked for."


def main() -> None:
    """Run what was asked for; two phases are a run of their own."""
    options = parse()
    kind = (
        f"simulated engines, an H200's rates / {_SHRINK}" if options.engine == "simulated" else "the demo model, torch"
    )
    title = f"Ray Serve, {options.requests_per_s:g} requests/s at the peak; {kind}"
    single = [name for name in options.scenarios if name != TWO_PHASE_NAME]
    results: dict[str, Any] = {}
    with Progress(console=Console(stderr=True)) as progress:
        for scenarios in (single, [name for name in options.scenarios if name == TWO_PHASE_NAME]):
            if not scenarios:
                continue
            two_phase = scenarios != single
            spans = spans_of(scenarios, options.seconds)
            found = compare(options, spans, progress, _DRAIN_S if two_phase else 0.0)
            said = {**contract(found), "arms": found}
            results |= {TWO_PHASE_NAME: said} if two_phase else said
            if options.json is not None:
                pictured = {figures["label"]: figures["curves"] for figures in found.values()}
                suffix = f".{TWO_PHASE_NAME}.png" if two_phase else ".png"
                plot_curves(options.json.with_suffix(suffix), pictured, spans, title)
    write(options.json, vars(options), results, sentences_of(results))


if __name__ == "__main__":
    main()
