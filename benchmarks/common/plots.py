"""Curves for people: a PNG beside a benchmark's JSON. Knows nothing of what is measured; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def figure_of(width: float, height: float) -> Any:
    """Return an empty matplotlib figure of so many inches, which needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG, with the folders of its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def plot_ttft(path: Path, curves: Mapping[str, Sequence[float]], title: str) -> None:
    """Draw the share of requests (0 to 1) that had their first token within a time, one curve a name."""
    figure = figure_of(9, 5)
    axes = figure.subplots()
    for name, times_s in curves.items():
        ordered = sorted(times_s)
        shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
        axes.plot(ordered, shares, label=name, linestyle="--" if name not in ("estimated_ttft",) else "-")
    axes.set(xscale="log", xlabel="time to first token, s", ylabel="share of requests", ylim=(0, 1), title=title)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    save(figure, path)


_OF_TENANTS = {
    "time to first token, p50 and p99, s": ("ttft_p50_s", "ttft_p99_s"),
    "time per token, p50, s": ("tpot_p50_s",),
    "hit rate": ("hit_rate",),
    "good answers a second": ("goodput_rps",),
    "rejected and failed": ("rejected", "failed"),
}


def plot_tenants(path: Path, systems: Mapping[str, Mapping[str, Mapping[str, Any]]], title: str) -> None:
    """Draw figures of ``open_loop.summary`` by system and tenant: a panel a figure, a line a tenant, a colour a system.

    A figure that is missing or unknown is left out; of two in one panel the second is hollow.
    """
    tenants = sorted({tenant for rows in systems.values() for tenant in rows})
    figure = figure_of(15, 1.6 + 0.28 * len(tenants) * max(1.0, len(systems) / 3))
    for panel, (label, names) in zip(
        figure.subplots(1, len(_OF_TENANTS), sharey=True), _OF_TENANTS.items(), strict=True
    ):
        for number, (system, rows) in enumerate(systems.items()):
            offset = (number - (len(systems) - 1) / 2) * 0.7 / len(systems)
            for place, name in enumerate(names):
                found = {tenant: row[name] for tenant, row in rows.items() if isinstance(row.get(name), (int, float))}
                panel.plot(
                    list(found.values()),
                    [tenants.index(tenant) + offset for tenant in found],
                    "o",
                    color=f"C{number}",
                    fillstyle="none" if place else "full",
                    label=None if place else system,
                )
        panel.set(xlabel=label, xscale="log" if names[0].startswith("ttft") else "linear")
        if not names[0].startswith("ttft"):
            panel.set_xlim(left=0)
        panel.grid(visible=True, alpha=0.3)
        panel.set_yticks(range(len(tenants)), tenants)
    figure.suptitle(title)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=min(6, len(systems)))
    save(figure, path)


def plot_lines(path: Path, curves: Mapping[str, Sequence[tuple[float, float]]], title: str, x: str, y: str) -> None:
    """Draw steps: from each point's first value on, its second; one curve a name."""
    figure = figure_of(11, 5)
    axes = figure.subplots()
    for name, points in curves.items():
        axes.step(*zip(*points, strict=True), where="post", label=name, linewidth=1.0)
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    save(figure, path)
