"""The dashboard and the rules ask for what there is. (docs/observability.md)"""

from __future__ import annotations

import re

import pytest

from serve_app.ingress.observe.families import FAMILIES
from tests.harness.boards import ALERTS, DASHBOARD, PANELS, SERIES, WINDOW

ASKED = [(series.title, series.promql) for series in SERIES]
ASKED += [(alert["alert"], alert["expr"]) for alert in ALERTS if "warmpath_" in alert["expr"]]
_ENDS = ("_bucket", "_sum", "_count")
MOVED = frozenset(
    {"warmpath_prewarm_blocks_total", "warmpath_handover_blocks_total", "warmpath_handover_refused_blocks_total"}
)
"""Counters that a new replica shows with all that they will ever have: their rate would be 0."""


@pytest.mark.parametrize(("title", "promql"), ASKED, ids=[f"{title}-{i}" for i, (title, _) in enumerate(ASKED)])
def test_a_query_asks_for_families_and_labels_that_there_are(title: str, promql: str) -> None:
    """Renaming a family breaks no dashboard silently; counters are read by their rate, gauges as they are."""
    labels = {"le"}
    read = re.findall(r"(?<![\w{])(warmpath_[a-z_]+)(?:\{[^}]*\})?(\[[$\w]+\])?", promql)
    assert read, title
    for name, window in read:
        end = next((end for end in _ENDS if name.endswith(end) and name.removesuffix(end) in FAMILIES), "")
        assert name.removesuffix(end) in FAMILIES, f"{title}: there is no {name}"
        family = FAMILIES[name.removesuffix(end)]
        assert (family.kind == "histogram") == bool(end)
        assert bool(window) == (family.kind != "gauge" and name not in MOVED), f"{title}: {name}"
        labels |= set(family.labels)
    asked = {
        label.strip() for names in re.findall(r"(?:by|ignoring) \(([^)]*)\)", promql) for label in names.split(",")
    }
    asked |= {label for pairs in re.findall(r"\{([^}]*)\}", promql) for label in re.findall(r"(\w+)[=!]", pairs)}
    assert asked <= labels, title
    assert promql.count("(") == promql.count(")")


def test_legends_name_labels_that_the_query_keeps() -> None:
    """Else every line of a graph is called the same."""
    for series in SERIES:
        kept = {label.strip() for by in re.findall(r"by \(([^)]*)\)", series.promql) for label in by.split(",")}
        assert set(re.findall(r"\{\{(\w+)\}\}", series.legend)) == kept - {"le"}, series.title


def test_panels_say_what_they_show_and_lie_on_grafanas_grid() -> None:
    """Each has an id of its own, a unit and a text, and no line of panels is wider than the grid."""
    assert len(PANELS) >= 30
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PANELS}) == len(PANELS)
    assert max(panel["gridPos"]["x"] + panel["gridPos"]["w"] for panel in PANELS) == 24
    for panel in PANELS:
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"], panel["id"]


def test_rates_use_grafanas_window() -> None:
    """A fixed one is empty or coarse at other scrape intervals."""
    assert any("[" in series.promql for series in SERIES)
    for series in SERIES:
        assert set(re.findall(r"\[([^\]]+)\]", series.promql)) <= {WINDOW}
