"""The picture of a run: replicas, offered load, hit rate and TTFT over time, an arm a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common.open_loop import Result, hit_rate
from benchmarks.common.plots import figure_of, save
from benchmarks.common.report import percentile
from benchmarks.end_to_end.autoscale.scenarios import Span
from benchmarks.end_to_end.autoscale.stage import Run

_WINDOW_S = 10.0
_COLOURS = {"RUNNING": "C0", "UPDATING": "C0", "STARTING": "C2", "STOPPING": "C3"}


def plot_runs(path: Path, runs: Mapping[str, Run], spans: Sequence[Span], title: str) -> None:
    """Draw the arms side by side, on one scale; spans and actions are marked."""
    figure = figure_of(max(7.0, 3.4 * len(runs)), 8.5)
    rows = figure.subplots(4, len(runs), sharex=True, sharey="row", squeeze=False)
    for column, (name, run) in enumerate(runs.items()):
        replicas, load, hits, ttft = (rows[row][column] for row in range(4))
        replicas.set_title(name)
        times_s = [sample.at_s for sample in run.samples]
        states = [state for state in _COLOURS if any(state in sample.states for sample in run.samples)]
        counts = [[sample.states.get(state, 0) for sample in run.samples] for state in states]
        if states:
            colours = [_COLOURS[state] for state in states]
            replicas.stackplot(times_s, counts, labels=[state.lower() for state in states], colors=colours, step="post")
        windows = _windows(run.results, spans[-1].end_s)
        middles_s = [(number + 0.5) * _WINDOW_S for number in range(len(windows))]
        load.plot(middles_s, [len(window) / _WINDOW_S for window in windows], color="C7")
        rates = [hit_rate([one.answer for one in window if one.answer is not None]) for window in windows]
        told = [(at_s, rate) for at_s, rate in zip(middles_s, rates, strict=True) if isinstance(rate, float)]
        hits.plot([at_s for at_s, _ in told], [rate for _, rate in told], color="C4")
        for percent, colour in ((50, "C0"), (99, "C1")):
            answered = [[one.ttft_s for one in window if one.answer is not None] for window in windows]
            points = [(at_s, percentile(t, percent)) for at_s, t in zip(middles_s, answered, strict=True) if t]
            ttft.plot([at_s for at_s, _ in points], [value for _, value in points], color=colour, label=f"p{percent}")
        for panel in (replicas, load, hits, ttft):
            for span in spans[1:]:
                panel.axvline(span.start_s, color="0.8", linewidth=0.8, zorder=0)
            for at_s, action in run.actions:
                panel.axvline(at_s, color="C3" if action == "kill" else "0.4", linewidth=0.8, linestyle=":")
            panel.set_xlim(0, spans[-1].end_s)
            panel.grid(visible=True, axis="y", alpha=0.3)
        for span in spans:
            load.text(span.start_s, 0, f" {span.name.replace('_', ' ')}", rotation=90, fontsize=7, va="bottom")
        ttft.set_xlabel("s")
    for row, label in zip(rows, ("replicas", "requests offered /s", "token hit rate", "TTFT, s"), strict=True):
        row[0].set_ylabel(label)
        row[0].set_ylim(bottom=0)
    rows[2][0].set_ylim(0, 1)
    rows[0][0].legend(loc="lower left", fontsize=7)
    rows[3][0].legend(loc="upper left", fontsize=7)
    figure.suptitle(title)
    save(figure, path)


def _windows(results: Sequence[Result], end_s: float) -> list[list[Result]]:
    windows: list[list[Result]] = [[] for _ in range(int(end_s // _WINDOW_S) + 1)]
    for result in results:
        windows[int(result.shot.at_s // _WINDOW_S)].append(result)
    return windows[:-1]
