"""What a replay means, in plain sentences, and the settings to paste."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from router.settings import DEFAULT_POLICY
from serve_app.replay.search import FIXED, ORACLE, OURS, Tried
from serve_app.traffic.workload import ShadowTold

Figures = Mapping[str, Any]


def of_setups(rows: Sequence[Figures], unlimited: float, ttft_s: float, part: float) -> list[str]:
    """Return sentences on setups side by side."""
    said = [f"One cache without a limit would serve {unlimited:.1%} of the prompt tokens."]
    ours = [row for row in rows if row["policy"] == DEFAULT_POLICY]
    others = [row for row in rows if row["policy"] != DEFAULT_POLICY]
    if ours and others:
        best = max(ours, key=lambda row: row["hit_rate"])
        like = [
            row for row in others if row["replicas"] == best["replicas"] and row["pool_tokens"] == best["pool_tokens"]
        ]
        for row in like:
            saved = 1.0 - (1.0 - best["hit_rate"]) / (1.0 - row["hit_rate"]) if row["hit_rate"] < 1.0 else 0.0
            said.append(
                f"{best['name']} serves {best['hit_rate']:.1%} from caches, {row['name']} {row['hit_rate']:.1%}: "
                f"{saved:.0%} less to compute. Mean TTFT {seconds(best['ttft_mean_s'])} against "
                f"{seconds(row['ttft_mean_s'])}, p99 {seconds(best['ttft_p99_s'])} against "
                f"{seconds(row['ttft_p99_s'])}."
            )
    meets = [row for row in rows if row["within_target"] >= part]
    goal = f"{part:.1%} of the requests within {seconds(ttft_s)}"
    if meets:
        cheapest = min(meets, key=lambda row: (row["replica_hours"], row["ttft_mean_s"]))
        said.append(
            f"The cheapest that gives {goal} is {cheapest['name']}: {cheapest['replica_hours']:.1f} replica hours."
        )
    else:
        near = max(rows, key=lambda row: row["within_target"])
        said.append(
            f"None gives {goal}; {near['name']} comes nearest, with {near['within_target']:.1%}: take more replicas."
        )
    lost = sum(row["lost"] for row in rows)
    if lost:
        said.append(f"{lost} requests got no first token: they are longer than a pool, or no replica ran.")
    return said


def of_truth(recorded: Figures, again: Figures) -> list[str]:
    """Return how far the simulation of the recorded run is from what was recorded."""
    parts = [f"hit rate {again['hit_rate']:.1%} for {recorded['hit_rate']:.1%}"]
    for name, words in (("ttft_mean_s", "mean TTFT"), ("ttft_p90_s", "p90")):
        parts.append(f"{words} {seconds(again[name])} for {seconds(recorded[name])}")
    return [f"The recorded run, simulated: {', '.join(parts)}."]


def of_shadow(told: ShadowTold, rows: Sequence[Figures]) -> list[str]:
    """Return what a shadow policy told while it was recorded, and what it does with caches of its own."""
    if not told.requests or not told.prompt_tokens:
        return []
    said = (
        f"The shadow {told.policy} would have chosen another replica for {1 - told.same / told.requests:.0%} of "
        f"{told.requests:,} requests, and found {told.predicted_tokens / told.prompt_tokens:.1%} of their tokens in "
        f"caches, where {told.acting_tokens / told.prompt_tokens:.1%} were predicted of the choice."
    )
    own = next((row for row in rows if row["policy"] == told.policy), None)
    if own is None:
        return [said]
    return [said, f"With caches of its own, simulated, it finds {own['hit_rate']:.1%}."]


def of_rules(best: Mapping[str, Tried], ttft_s: float, part: float, price: float | None) -> list[str]:
    """Return sentences on rules of autoscaling."""
    goal = f"{part:.1%} of the requests within {seconds(ttft_s)}"
    meets = {name: tried for name, tried in best.items() if tried.figures["within_target"] >= part}
    said: list[str] = []
    for name, tried in best.items():
        if name not in meets:
            said.append(f"{name} does not reach {goal}: {tried.figures['within_target']:.1%} at best.")
    hours = {name: tried.figures["replica_hours"] for name, tried in meets.items()}
    ours = hours.get(OURS)
    if ours is None:
        said.append("Raise max_replicas, the target, or the rates: our rule does not reach the goal.")
        return said
    cost = f", {price * ours:,.2f} at {price:g} an hour" if price else ""
    within = best[OURS].figures["within_target"]
    said.append(
        f"Our rule gives {within:.1%} of the requests within {seconds(ttft_s)} for {ours:.1f} replica hours{cost}."
    )
    peers = {name: spent for name, spent in hours.items() if name not in (OURS, ORACLE)}
    for name, spent in sorted(peers.items(), key=lambda item: item[1]):
        what = f"{best[name].settings.get('replicas')} replicas all the time" if name == FIXED else f"the rule {name}"
        said.append(f"That is {ours / spent:.0%} of what {what} takes ({spent:.1f} h).")
    if ORACLE in hours:
        said.append(
            f"A plan that knows the future takes {hours[ORACLE]:.1f} h: ours is {ours / hours[ORACLE]:.2f} times that."
        )
    figures = best[OURS].figures
    if figures["hit_rate_after_changes"] is not None:
        said.append(
            f"In the minute after a change of replicas {figures['hit_rate_after_changes']:.1%} of the prompt tokens "
            f"come from caches, before it {figures['hit_rate_before_changes']:.1%}."
        )
    return said


def settings_of(tried: Tried | None, row: Figures | None) -> str:
    """Return YAML for a settings file: of our rule's best run, or of a row."""
    if tried is not None:
        values = dict(tried.settings["autoscaling"])
        values["max_replicas"] = max(tried.figures["most_replicas"] + 1, values["min_replicas"])
        return str(yaml.safe_dump({"autoscaling": values}, sort_keys=False))
    if row is None:
        return ""
    return str(yaml.safe_dump({"replicas": row["replicas"], "policy": row["policy"]}, sort_keys=False))


def seconds(value: float) -> str:
    """Return a time for people."""
    return f"{value * 1000:.0f} ms" if value < 1.0 else f"{value:.2f} s"
