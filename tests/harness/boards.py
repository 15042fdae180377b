"""The queries in the files for Prometheus and Grafana."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CLUSTER = Path(__file__).parents[2] / "cluster"
FOLDER = CLUSTER / "observability"
BOARDS = CLUSTER / "chart" / "dashboards"
WINDOW = "$__rate_interval"
"""Grafana's own window: at least four scrapes, and no shorter than a step of the graph."""

DASHBOARD: dict[str, Any] = json.loads((BOARDS / "warmpath.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS: list[dict[str, Any]] = yaml.safe_load((BOARDS / "alerts.yaml").read_text())["groups"][0]["rules"]


class Series(NamedTuple):
    """One line of a panel's graph."""

    title: str
    promql: str
    legend: str


SERIES = [
    Series(panel["title"], query["expr"], query["legendFormat"]) for panel in PANELS for query in panel["targets"]
]
