"""The picture of a run: replicas, offered load, hit rate and TTFT over time, an arm a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.plots import figure_of, save
from benchmarks.end_to_end.autoscale.scenarios import Span

_COLOURS = {"RUNNING": "C0", "UPDATING": "C9", "STARTING": "C2", "STOPPING": "C3"}


def plot_curves(path: Path, curves: Mapping[str, Mapping[str, Any]], spans: Sequence[Span], title: str) -> None:
    """Draw ``figures.curves`` of the arms side by side, on one scale; scenarios and actions are marked."""
    figure = figure_of(max(7.0, 3.4 * len(curves)), 8.5)
    rows = figure.subplots(4, len(curves), sharex=True, sharey="row", squeeze=False)
    for column, (name, curve) in enumerate(curves.items()):
        panels = [rows[row][column] for row in range(4)]
        panels[0].set_title(name, fontsize="medium")
        _replicas(panels[0], curve["replicas"])
        _line(panels[1], curve["windows"], "offered_per_s", "C7")
        _line(panels[2], curve["windows"], "hit_rate", "C4")
        _line(panels[3], curve["windows"], "ttft_p50_s", "C0")
        _line(panels[3], curve["windows"], "ttft_p99_s", "C1")
        for panel in panels:
            for span in spans[1:]:
                panel.axvline(span.start_s, color="0.8", linewidth=0.8, zorder=0)
            for at_s, action in curve["actions"]:
                panel.axvline(at_s, color="C3" if action == "kill" else "0.4", linewidth=0.8, linestyle=":")
            panel.set_xlim(0, spans[-1].end_s)
            panel.grid(visible=True, axis="y", alpha=0.3)
        for span in spans:
            panels[1].text(span.start_s, 0, f" {span.name.replace('_', ' ')}", rotation=90, fontsize=7, va="bottom")
        panels[3].set_xlabel("s")
    for row, label in zip(rows, ("replicas", "requests offered /s", "token hit rate", "TTFT, s"), strict=True):
        row[0].set_ylabel(label)
        row[0].set_ylim(bottom=0)
    rows[2][0].set_ylim(0, 1)
    rows[0][0].legend(loc="lower left", fontsize=7)
    rows[3][0].legend(loc="upper left", fontsize=7)
    figure.suptitle(title)
    save(figure, path)


def _replicas(panel: Any, samples: Sequence[Mapping[str, float]]) -> None:
    states = [state for state in _COLOURS if any(state in sample for sample in samples)]
    if states:
        counts = [[sample.get(state, 0) for sample in samples] for state in states]
        colours = [_COLOURS[state] for state in states]
        labels = [state.lower() for state in states]
        panel.stackplot([one["at_s"] for one in samples], counts, labels=labels, colors=colours, step="post")


def _line(panel: Any, windows: Sequence[Mapping[str, Any]], name: str, colour: str) -> None:
    told = [(one["at_s"], one[name]) for one in windows if isinstance(one.get(name), float)]
    panel.plot([at_s for at_s, _ in told], [value for _, value in told], color=colour, label=name.removesuffix("_s"))
