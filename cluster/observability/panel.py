"""What a panel of the dashboard is, and the PromQL that many of them share."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = "$__rate_interval"
"""Grafana's own window: at least four scrapes, and no shorter than a step of the graph."""


@dataclass(frozen=True, slots=True)
class Series:
    """``legend``: in Grafana's form, ``{{label}}`` for a label's value."""

    promql: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """``unit``: in Grafana's words. ``after``: what must have happened before it shows anything, "" for requests."""

    title: str
    text: str
    unit: str
    series: tuple[Series, ...]
    after: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels about one thing."""

    title: str
    panels: tuple[Panel, ...]


def rate(name: str, by: str = "", where: str = "") -> str:
    """Return a counter's rate, summed."""
    summed = f"sum by ({by})" if by else "sum"
    return f"{summed} (rate({name}{where}[{WINDOW}]))"


def share(part: str, whole: str, by: str = "") -> str:
    """Return one counter's rate as a share of another's."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def quantiles(name: str) -> tuple[Series, ...]:
    """Return the median, p95 and p99 of a histogram."""
    return tuple(
        Series(f"histogram_quantile({quantile}, {rate(f'{name}_bucket', 'le')})", legend)
        for quantile, legend in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    )


def p95(name: str, by: str) -> Series:
    """Return a histogram's p95 for each value of a label."""
    return Series(f"histogram_quantile(0.95, {rate(f'{name}_bucket', f'le, {by}')})", "{{" + by + "}}")
