"""The report of a replay as one HTML file with charts, which needs no network and is readable without scripts.

Takes the report as JSON has it. Names in it may hold any characters: all text is escaped here or in ``charts``.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import isfinite
from pathlib import Path
from string import Template
from typing import Any

from serve_app.replay.charts import MOST_LINES, Chart, ChartLine, Values, figure, known, moment, short

_TEMPLATE = Path(__file__).with_name("page.html")

RunRow = Mapping[str, Any]


def write_page(report: Mapping[str, Any], path: Path) -> None:
    """Write the report's page. Raises OSError."""
    path.write_bytes(page_of(report).encode("utf-8", "replace"))


def page_of(report: Mapping[str, Any]) -> str:
    """Return the report's page: verdict and settings, then warnings, traffic, rows, charts and rates."""
    template = _TEMPLATE.read_text("utf-8")
    script = template.partition("<script>")[2].partition("</script>")[0]
    assert script
    # The page's policy allows this script alone, whatever a name in the report would smuggle in.
    digest = hashlib.sha256(script.encode()).digest()
    about = [str(report[name]) for name in ("file", "made_at") if report.get(name)]
    return Template(template).substitute(
        script_hash=base64.b64encode(digest).decode(),
        title=escape(str(report.get("title") or "Replay")),
        kind=_kind(report),
        about=escape(", ".join(about)),
        verdict=_sentences("verdict", report.get("verdict")),
        settings=_settings(str(report.get("settings") or "")),
        warnings=_sentences("warnings", report.get("warnings")),
        traffic=_traffic(report.get("traffic") or {}),
        rows=_rows(report),
        charts=_charts(report),
        rates=_rates(report.get("rates") or {}),
    )


# Numbers for people.


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def plain(value: float) -> str:
    """Return a number in three digits, or whole with its thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def seconds(value: float) -> str:
    """Return a time to first token."""
    return f"{value * 1000:.3g} ms" if 0 < abs(value) < 0.9995 else f"{plain(value)} s"


def percent(value: float) -> str:
    """Return a part of all."""
    return f"{value * 100:.0f} %" if value in (0, 1) else f"{value * 100:.1f} %"


def _axis_percent(value: float) -> str:
    return f"{value * 100:.3g} %"


def money(value: float) -> str:
    """Return a price in the user's currency, which is not known."""
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def _hours(value: float) -> str:
    return f"{plain(value)} h"


# The text.


def _kind(report: Mapping[str, Any]) -> str:
    return "simulated" if report.get("simulated") else "measured"


def _sentences(style: str, sentences: Sequence[str] | None) -> str:
    if not sentences:
        return ""
    label = style.capitalize()
    items = "".join(f"<li>{escape(str(sentence))}</li>" for sentence in sentences)
    return f'<section aria-label="{label}"><ul class="{style}">{items}</ul></section>'


def _settings(text: str) -> str:
    if not text.strip():
        return ""
    return (
        '<h2>Settings</h2><div class="settings"><button id="copy" type="button" aria-live="polite" hidden>Copy</button>'
        f'<pre tabindex="0" role="region" aria-label="Settings"><code id="settings">{escape(text)}</code></pre></div>'
    )


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>' for name, value in facts)}</dl>"


_TRAFFIC: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("requests", "requests", plain),
    ("refused", "refused when recorded", plain),
    ("span_s", "from first to last", moment),
    ("tenants", "tenants", plain),
    ("prompt_tokens", "prompt tokens", plain),
    ("output_tokens", "output tokens", plain),
    ("unlimited_hit_rate", "served by a cache without limit", percent),
)


def _traffic(traffic: Mapping[str, Any]) -> str:
    facts = [(label, form(traffic[name])) for name, label, form in _TRAFFIC if _is_number(traffic.get(name))]
    models = [str(model) for model in traffic.get("models") or () if model]
    if models:
        facts.append(("models" if len(models) > 1 else "model", ", ".join(models)))
    return f"<h2>Traffic</h2>{_facts(facts)}" if facts else ""


def _rates(rates: Mapping[str, Any]) -> str:
    """Return the rates, which are of one model or by model."""
    groups = rates if any(isinstance(each, Mapping) for each in rates.values()) else {"": rates}
    parts = []
    for model, figures in groups.items():
        facts = [(str(name), _value(value)) for name, value in figures.items()]
        parts.append((f"<h3>{escape(str(model))}</h3>" if model else "") + _facts(facts))
    return f"<h2>Rates of a replica</h2>{''.join(parts)}" if rates else ""


def _value(value: Any) -> str:
    return plain(value) if _is_number(value) else "–" if value is None else str(value)


# The table.

_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("requests", "requests", plain),
    ("lost", "lost", plain),
    ("replica_hours", "replica hours", plain),
    ("money", "cost", money),
    ("within_target", "within target", percent),
    ("ttft_mean_s", "TTFT mean", seconds),
    ("ttft_p50_s", "TTFT p50", seconds),
    ("ttft_p90_s", "TTFT p90", seconds),
    ("ttft_p99_s", "TTFT p99", seconds),
    ("hit_rate", "hit rate", percent),
    ("hit_rate_before_changes", "hit rate before changes", percent),
    ("hit_rate_after_changes", "hit rate after changes", percent),
    ("changes", "changes", plain),
    ("least_replicas", "least replicas", plain),
    ("most_replicas", "most replicas", plain),
)


def _recorded(report: Mapping[str, Any]) -> list[RunRow]:
    """Return what the file itself recorded: none, one row, or one a model."""
    recorded = report.get("recorded")
    return [recorded] if isinstance(recorded, Mapping) else list(recorded or ())


def _rows(report: Mapping[str, Any]) -> str:
    price, recorded = report.get("price_per_hour"), _recorded(report)
    rows = [*recorded, *(report.get("rows") or ())]
    if not rows:
        return ""
    if _is_number(price):
        rows = [
            {**row, "money": price * row["replica_hours"]} if _is_number(row.get("replica_hours")) else row
            for row in rows
        ]
    shown = [column for column in _COLUMNS if any(_is_number(row.get(column[0])) for row in rows)]
    models = len({str(row.get("model") or "") for row in rows}) > 1
    target = report.get("target_ttft_s")
    within = f" {seconds(target)}" if target is not None and _is_number(target) else ""
    heads = '<th scope="col">model</th>' * models + "".join(
        f'<th scope="col">{escape(label + within * (name == "within_target"))}</th>' for name, label, _ in shown
    )
    body = "".join(_row(row, shown, models=models) for row in rows)
    told = f"{_kind(report).capitalize()}{', but for what the file recorded' if recorded else ''}."
    if any(name == "hit_rate_after_changes" for name, _, _ in shown):
        told += " Hit rates before and after changes of replicas are those of one minute."
    return (
        '<h2>Results</h2><div class="wide" role="region" tabindex="0" aria-label="Results">'
        f'<table><caption>{told}</caption><thead><tr><th scope="col">run</th>{heads}'
        f"</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(row: RunRow, shown: Sequence[tuple[str, str, Callable[[float], str]]], *, models: bool) -> str:
    chosen = bool(row.get("chosen"))
    cells = [form(row[name]) if _is_number(row.get(name)) else "–" for name, _, form in shown]
    return (
        f'<tr{" class=chosen" * chosen}><th scope="row">{escape(str(row.get("name", "")))}'
        f"{' <span class=badge>chosen</span>' * chosen}</th>"
        + (f'<td class="text">{escape(str(row.get("model") or ""))}</td>' * models)
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
    )


# The charts.


def _charts(report: Mapping[str, Any]) -> str:
    curves = report.get("curves") or {}
    groups: dict[str, list[tuple[RunRow, Mapping[str, Any]]]] = {}
    for row in report.get("rows") or ():
        name, model = str(row.get("name", "")), str(row.get("model") or "")
        found = curves.get(f"{model}: {name}", curves.get(name))
        if found and found.get("at_s"):
            groups.setdefault(model, []).append((row, found))
    parts = []
    for model, runs in groups.items():
        shown = shown_runs(runs)
        title = f"Over time, {model}" if len(groups) > 1 else "Over time"
        parts.append(f'<h2>{escape(title)} <span class="badge">{_kind(report)}</span></h2>')
        if len(shown) < len(runs):
            names = "; ".join(short(str(row["name"])) for row, _ in shown)
            parts.append(f'<p class="soft">{len(shown)} of {len(runs)} runs are drawn: {escape(names)}.</p>')
        figures = "".join(figure(chart) for chart in _charts_of(shown, report))
        parts.append(f'<div class="charts">{figures}</div>')
    return "\n".join(parts)


def shown_runs(runs: Sequence[tuple[RunRow, Mapping[str, Any]]]) -> list[tuple[RunRow, Mapping[str, Any]]]:
    """Return the runs to draw, the chosen one first: then those that meet the goal, in order of cost."""

    def rank(run: tuple[RunRow, Mapping[str, Any]]) -> tuple[bool, bool, float, float]:
        row = run[0]
        within, hours = row.get("within_target"), row.get("replica_hours")
        return (
            not row.get("chosen"),
            not row.get("meets"),
            -round(within, 2) if within is not None and _is_number(within) else 0.0,
            hours if hours is not None and _is_number(hours) else 0.0,
        )

    return sorted(runs, key=rank)[:MOST_LINES]


def _charts_of(runs: Sequence[tuple[RunRow, Mapping[str, Any]]], report: Mapping[str, Any]) -> list[Chart]:
    kind, price = _kind(report).capitalize(), report.get("price_per_hour")
    cost_of = float(price) if price is not None and _is_number(price) else 1.0
    longest = max((curves for _, curves in runs), key=lambda curves: float(curves["at_s"][-1]))
    at_s = longest["at_s"]
    raw_target = report.get("target_ttft_s")
    target = float(raw_target) if raw_target is not None and _is_number(raw_target) else None

    def lines(name: str, by: float = 1.0) -> list[ChartLine]:
        return [
            ChartLine(
                str(row["name"]),
                _times(curves, name, by),
                curves["at_s"],
                _above(curves) if name == "replicas" else (),
                bool(row.get("chosen")),
            )
            for row, curves in runs
        ]

    arrivals = ChartLine("requests a second", _times(longest, "arrivals_per_s", 1.0), strong=True)
    same = "as the file has them, the same in every simulated run" if report.get("simulated") else "as they were sent"
    first = f"{kind}; of the requests that arrived then."
    return [
        Chart("Arrivals", f"Requests a second, {same}.", at_s, [arrivals], plain),
        Chart("Replicas", f"{kind}. Those that run; the thin line adds those that start.", at_s, lines("replicas"),
              plain, steps=True, whole=True),
        Chart("TTFT, p50", first, at_s, lines("ttft_p50_s"), seconds, may_log=True, target=target),
        Chart("TTFT, p99", first, at_s, lines("ttft_p99_s"), seconds, may_log=True, target=target),
        Chart("Hit rate", f"{kind}. Part of the prompt tokens that came from caches.", at_s, lines("hit_rate"),
              _axis_percent, top=1.0),
        Chart("Queue", f"{kind}. The most requests that waited.", at_s, lines("queue"), plain, steps=True, whole=True),
        Chart("Cost so far", f"{kind}. {'Money' if price else 'Replica hours'}, added up.", at_s,
              lines("cost", cost_of), money if price else _hours),
    ]  # fmt: skip


def _times(curves: Mapping[str, Any], name: str, by: float) -> Values:
    return [None if value is None else value * by for value in curves.get(name) or ()]


def _above(curves: Mapping[str, Any]) -> Values:
    """Return running and starting replicas together; nothing where none ever starts."""
    running, starting = curves.get("replicas") or (), curves.get("starting") or ()
    if not any(known(starting)):
        return ()
    return [None if one is None else one + (more or 0) for one, more in zip(running, starting, strict=False)]
