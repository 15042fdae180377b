"""The table of panels as Grafana's JSON, by Grafana's own SDK: it knows the format's defaults and lays panels out."""

from __future__ import annotations

import json

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef

from cluster.observability.panel import Panel, Row

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_PANELS_A_LINE = 3


def dashboard_json(rows: tuple[Row, ...]) -> str:
    """Return the dashboard; it is the same for the same table, so that a changed file is a changed table."""
    board = (
        dashboard.Dashboard("warmpath")
        .uid("warmpath")
        .description("Made by `python -m cluster.observability.build` from the tables beside it; change those.")
        .tags(["warmpath"])
        .time("now-1h", "now")
        .timezone("browser")
        .refresh("30s")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    number = 0
    for row in rows:
        number += 1
        board = board.with_row(dashboard.Row(row.title).id(number))
        for panel in row.panels:
            number += 1
            board = board.with_panel(_panel(panel, number))
    return json.dumps(board.build(), cls=JSONEncoder, indent=2) + "\n"


def _panel(panel: Panel, number: int) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .id(number)
        .title(panel.title)
        .description(panel.text if not panel.after else f"{panel.text} Empty until: {panel.after}.")
        .unit(panel.unit)
        .min(0)
        .height(8)
        .span(24 // _PANELS_A_LINE)
        .datasource(_SOURCE)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    for letter, series in zip("ABCDEFGH", panel.series, strict=False):
        made = made.with_target(prometheus.Dataquery().expr(series.promql).legend_format(series.legend).ref_id(letter))
    return made
