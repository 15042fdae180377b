"""Curves for people: a PNG beside a benchmark's JSON. Knows nothing of what is measured; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def plot_ttft(path: Path, curves: Mapping[str, Sequence[float]], title: str) -> None:
    """Draw the share of requests (0 to 1) that had their first token within a time, one curve a name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, times_s in curves.items():
        ordered = sorted(times_s)
        shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
        axes.plot(ordered, shares, label=name, linestyle="--" if name not in ("estimated_ttft",) else "-")
    axes.set(xscale="log", xlabel="time to first token, s", ylabel="share of requests", ylim=(0, 1), title=title)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
