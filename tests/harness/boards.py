"""What the files for Prometheus and Grafana ask, read from them."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml

FOLDER = Path(__file__).parents[2] / "cluster" / "observability"
WINDOW = "$__rate_interval"
"""Grafana's own window: at least four scrapes, and no shorter than a step of the graph."""

DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana/dashboards/warmpath.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]


class Series(NamedTuple):
    """One line of a panel."""

    title: str
    promql: str
    legend: str


SERIES = [
    Series(panel["title"], query["expr"], query["legendFormat"]) for panel in PANELS for query in panel["targets"]
]
