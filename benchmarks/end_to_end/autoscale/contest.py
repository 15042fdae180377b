"""A comparison of arms on real Serve: their common settings, and one report of all, in the form of a replay's."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.common.harness import Options, note
from benchmarks.end_to_end.autoscale.arms import MOST_COMPRESSED, Contest, ScalingArm
from benchmarks.end_to_end.autoscale.figures import row_of, traffic_of
from benchmarks.end_to_end.autoscale.stage import ALONE, TOGETHER, play, undisturbed
from benchmarks.end_to_end.autoscale.traffic import shots_of
from serve_app.config.engine import ENGINES
from serve_app.replay.open_loop import Shot
from serve_app.replay.outcome import curves_of
from serve_app.replay.rates import card_rates
from serve_app.traffic.workload import Workload

BLOCK_TOKENS = 16
WEIGHTS_BYTES, DTYPE_BYTES, BYTES_PER_TOKEN = 16_060_000_000, 2, 131_072
"""Of the model whose speed is simulated: Llama 3.1 8B in bfloat16."""
USUAL_COMPRESSED = 20.0
"""Of a shape's delays; a shape has no time of its own."""
_ENDLESS_POOL_BLOCKS = 100_000
_FAST = {"simulated_prefill_tokens_per_s": 1e6, "simulated_decode_step_s": 0.001, "num_blocks": _ENDLESS_POOL_BLOCKS}
"""A simulated engine's rates do not change its answers."""


def settings_of(options: Options) -> dict[str, Any]:
    """Return the application's settings that all arms have."""
    settings: dict[str, Any] = {"model": options.model, "engine": options.engine, "block_size": BLOCK_TOKENS}
    if not ENGINES[options.engine].simulated:
        # In bfloat16 what is computed at once and what comes from the cache may round differently.
        return settings | {"dtype": "float32", "num_threads": 1}
    rates, pool_tokens = card_rates(options.card, WEIGHTS_BYTES, DTYPE_BYTES, BYTES_PER_TOKEN)
    return settings | {
        "num_blocks": pool_tokens // options.shrink // BLOCK_TOKENS,
        "simulated_prefill_tokens_per_s": round(rates.prefill_tokens_per_s / options.shrink, 1),
        "simulated_decode_step_s": round(rates.decode_step_s, 5),
    }


def contest_of(options: Options, speed: float) -> Contest:
    """Return what all arms have. ``speed``: how many times as fast as its own time the traffic is."""
    usual = min(speed, MOST_COMPRESSED) if speed > 1.0 else USUAL_COMPRESSED
    return Contest(
        least=options.min_replicas,
        most=options.max_replicas,
        fixed=options.fixed or -(-(options.min_replicas + options.max_replicas) // 2),
        target_ttft_s=options.target_ttft,
        compressed=options.compress or usual,
        ongoing=options.ongoing,
    )


@contextmanager
def bars() -> Iterator[Callable[[str, int], Callable[[], object]]]:
    """Yield a function that makes a progress bar of a name and a number, and returns what moves it on."""
    with Progress(console=Console(stderr=True)) as progress:

        def bar(name: str, total: int) -> Callable[[], object]:
            task = progress.add_task(name, total=total)
            return lambda: progress.advance(task)

        yield bar


def compare(
    options: Options, workload: Workload, contest: Contest, arms: dict[str, ScalingArm], times: Path
) -> dict[str, Any]:
    """Return a report of all arms, in the form of a replay's."""
    base, traffic = settings_of(options), traffic_of(workload)
    shots = shots_of(workload, options.model, options.seed)
    kills = [options.seconds * (number + 0.5) / options.kills for number in range(options.kills)]
    rows, curves = [], {}
    with bars() as bar:
        right = _right(base, shots, bar) if not options.no_check else {}
        for name, arm in arms.items():
            times.unlink(missing_ok=True)
            run = play(arm, base, shots, times, bar(name, len(shots)), kills)
            row, made = row_of(name, run, traffic, right, contest.target_ttft_s)
            note(f"{name}: {json.dumps(row)}")  # in case a later one fails
            rows.append(row)
            curves[name] = curves_of(traffic, made)
    return {
        "title": "Autoscaling on Ray Serve",
        "simulated": False,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "file": str(options.trace),
        "warnings": _warnings(options, contest),
        "target_ttft_s": contest.target_ttft_s,
        "rows": rows,
        "curves": curves,
        "verdict": [sentence_of(row) for row in rows],
        "rates": {name: value for name, value in base.items() if name.startswith("simulated_") or name == "num_blocks"},
    }


def _right(
    base: dict[str, Any], shots: list[Shot], bar: Callable[[str, int], Callable[[], object]]
) -> dict[int, set[str]]:
    simulated = ENGINES[base["engine"]].simulated
    clients = (TOGETHER,) if simulated else (ALONE, TOGETHER)
    told = bar("undisturbed", len(shots) * len(clients))
    return undisturbed({**base, **(_FAST if simulated else {})}, shots, clients, told)


def _warnings(options: Options, contest: Contest) -> list[str]:
    said = [f"All rules' delays are divided by {contest.compressed:.3g}."]
    if ENGINES[options.engine].simulated:
        said.append(f"Engines are simulated: {options.card} with an 8B model, tokens divided by {options.shrink}.")
    return said


def sentence_of(row: dict[str, Any]) -> str:
    """Return what an arm did."""
    hits = row["hit_rate_after_changes"]
    after = "" if hits is None else f", {hits:.3f} in the minute after a change"
    killed = f", {row['kills']} killed" if row["kills"] else ""
    return (
        f"{row['name']}: {row['lost']} of {row['requests']} requests lost, {row['altered']} altered, "
        f"{row['changes']} scale events{killed}, {row['replica_seconds']:.0f} replica seconds, "
        f"{row['within_target']:.1%} within the target, p99 {row['ttft_p99_s']:.2f} s, hit rate {row['hit_rate']:.3f}"
        f"{after}."
    )
