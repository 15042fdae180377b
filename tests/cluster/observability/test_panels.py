"""The dashboard and the rules ask for what there is, and the files are made from the tables."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from cluster.observability.alerts import ALERTS
from cluster.observability.build import DASHBOARD, FOLDER, yaml_files
from cluster.observability.panel import WINDOW
from cluster.observability.panels import ROWS
from serve_app.ingress.observe.families.catalog import FAMILIES

PANELS = [panel for row in ROWS for panel in row.panels]
ASKED = [(panel.title, series.promql) for panel in PANELS for series in panel.series]
ASKED += [(alert.name, alert.promql) for alert in ALERTS if "warmpath_" in alert.promql]
_ENDS = ("_bucket", "_sum", "_count")
MOVED = frozenset(
    {"warmpath_prewarm_blocks_total", "warmpath_handover_blocks_total", "warmpath_handover_refused_blocks_total"}
)
"""Counters that a new replica shows with all that they will ever have: their rate would be 0."""


@pytest.mark.parametrize(("title", "promql"), ASKED, ids=[f"{title}-{i}" for i, (title, _) in enumerate(ASKED)])
def test_a_query_asks_for_families_and_labels_that_there_are(title: str, promql: str) -> None:
    """Renaming a family breaks no dashboard silently; counters are read by their rate, gauges as they are."""
    labels = {"le"}
    found = re.findall(r"(?<![\w{])(warmpath_[a-z_]+)(?:\{[^}]*\})?(\[[$\w]+\])?", promql)
    assert found, title
    for name, window in found:
        end = next((end for end in _ENDS if name.endswith(end) and name.removesuffix(end) in FAMILIES), "")
        assert name.removesuffix(end) in FAMILIES, f"{title}: there is no {name}"
        family = FAMILIES[name.removesuffix(end)]
        assert family.histogram == bool(end)
        assert bool(window) == (family.kind != "gauge" and name not in MOVED), f"{title}: {name}"
        labels |= set(family.labels)
    asked = {
        label.strip() for found in re.findall(r"(?:by|ignoring) \(([^)]*)\)", promql) for label in found.split(",")
    }
    asked |= {label for found in re.findall(r"\{([^}]*)\}", promql) for label in re.findall(r"(\w+)[=!]", found)}
    assert asked <= labels, title
    assert promql.count("(") == promql.count(")")


def test_legends_name_labels_that_the_query_keeps() -> None:
    """Else every line of a graph is called the same."""
    for panel in PANELS:
        for series in panel.series:
            kept = {label.strip() for by in re.findall(r"by \(([^)]*)\)", series.promql) for label in by.split(",")}
            assert set(re.findall(r"\{\{(\w+)\}\}", series.legend)) == kept - {"le"}, panel.title


def test_the_yaml_files_are_made_from_the_tables() -> None:
    """To write them anew: ``python -m cluster.observability.build``."""
    for path, text in yaml_files().items():
        assert (FOLDER / path).read_text() == text
        yaml.safe_load(text)
    assert {path.name for path in FOLDER.rglob("*.yaml")} == {path.rsplit("/", 1)[-1] for path in yaml_files()}


def test_the_dashboard_has_the_tables_queries() -> None:
    """In the table's order, each with an id of its own, and no line of panels wider than Grafana's grid."""
    board = json.loads((FOLDER / DASHBOARD).read_text())
    shown = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert [panel["title"] for panel in shown] == [panel.title for panel in PANELS]
    queries = [[(target["expr"], target["legendFormat"]) for target in panel["targets"]] for panel in shown]
    assert queries == [[(series.promql, series.legend) for series in panel.series] for panel in PANELS]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in shown}) == len(shown)
    assert max(panel["gridPos"]["x"] + panel["gridPos"]["w"] for panel in shown) == 24


def test_the_dashboard_is_made_from_the_table() -> None:
    """By Grafana's SDK, byte for byte."""
    pytest.importorskip("grafana_foundation_sdk", reason="pip install '.[boards]'")
    from cluster.observability.grafana import dashboard_json

    assert (FOLDER / DASHBOARD).read_text() == dashboard_json(ROWS)


def test_rates_use_grafanas_window() -> None:
    """A fixed one is empty or coarse at other scrape intervals."""
    for panel in PANELS:
        for series in panel.series:
            assert set(re.findall(r"\[([^\]]+)\]", series.promql)) <= {WINDOW}
