"""`warmpath top`: what an instance does now, in a terminal, from the snapshots of `/v1/cache/events` (docs/live.md)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import itemgetter
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from serve_app.cli.client import LOCAL, NotAnswered, Url, ask, not_ours
from serve_app.cli.console import fail

TIMEOUT_S = 15.0
EVERY_S = 1.0
SHOWN_PREFIXES = 8
SHOWN_DECISIONS = 10
BAR_CELLS = 20
POOL = "used, reusable, free"

Row = dict[str, Any]
Column = Callable[[Row], Any]


def top(
    url: Url = LOCAL, once: Annotated[bool, typer.Option("--once", help="print one frame and leave")] = False
) -> None:
    """Show replicas, prefixes and decisions as they are; a tenant's key shows its own part. Ctrl-C ends it."""
    console = Console(highlight=False)
    try:
        frame = _frame(url)
    except NotAnswered as error:
        fail(f"{error}; start an instance with warmpath serve, or name another with --url")
    if once or not console.is_terminal:
        console.print(frame)
        return
    with Live(frame, console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(EVERY_S)
            try:
                live.update(_frame(url), refresh=True)
            except NotAnswered as error:
                live.update(Text(f"{error}; trying again", style="yellow"), refresh=True)


def _frame(url: str) -> RenderableType:
    """Return what an instance shows now. Raises NotAnswered."""
    snapshot = ask(url, "GET", "/v1/cache/events?once=true", timeout_s=TIMEOUT_S)
    try:
        return Group(*(part(snapshot) for part in (_head, _replicas, _prefixes, _decisions, _changes)))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        not_ours(url, error)


def _head(snapshot: Row) -> RenderableType:
    requests, prompt_tokens, cached_tokens = (
        sum(row[name] for row in snapshot["totals"]) for name in ("requests", "prompt_tokens", "cached_tokens")
    )
    rate = f"{cached_tokens / prompt_tokens:.1%}" if prompt_tokens else "-"
    engine = "simulated: all times are a cost model's" if snapshot["simulated"] else snapshot["engine"]
    viewer = "all tenants" if snapshot["viewer"] == "operator" else f"tenant {snapshot['tenant']}"
    parts = [f"{snapshot['model']} ({engine})", f"policy {snapshot['policy']}", viewer]
    return Text("  ".join([*parts, f"{requests} requests", f"hit rate {rate}"]), style="bold")


def _replicas(snapshot: Row) -> RenderableType:
    """Return the table of replicas; only operators are sent their figures."""
    rows = sorted(snapshot["replicas"], key=lambda row: str(row["replica"]))
    columns: dict[str, Column] = {"replica": itemgetter("replica"), "state": itemgetter("state")}
    if snapshot["viewer"] == "operator":
        columns[POOL] = _bar
        figures = ("blocks_total", "running", "waiting", "queued_tokens", "prefill_tokens_per_s")
        columns |= {name: partial(_number, name, ".0f") for name in figures}
    return _table(f"{len(rows)} replica{'' if len(rows) == 1 else 's'}", rows, columns)


def _bar(row: Row) -> Text:
    total = row.get("blocks_total") or 1
    used, cached = (round(BAR_CELLS * (row.get(name) or 0) / total) for name in ("blocks_used", "blocks_reusable"))
    cached = min(BAR_CELLS - used, cached)
    return Text.assemble(("█" * used, "red"), ("▒" * cached, "green"), "·" * (BAR_CELLS - used - cached))


def _prefixes(snapshot: Row) -> RenderableType:
    rows = sorted(snapshot["prefixes"], key=lambda row: (-row["requests"], row["prefix_tokens"]))
    columns: dict[str, Column] = {
        "prefix": lambda row: row["kind"] + (" (pinned)" if row["pinned"] else ""),
        "tenant": lambda row: row["tenant"] or "everybody",
        "name": lambda row: row["label"] or row["id"][:8],
        "tokens": itemgetter("prefix_tokens"),
        "requests": itemgetter("requests"),
        "hits": lambda row: f"{row['hits'] / max(1, row['requests']):.0%}",
        "held by (tokens)": lambda row: "  ".join(f"{name} {tokens}" for name, tokens in row["holders"].items()),
    }
    return _table("prefixes asked for most", rows[:SHOWN_PREFIXES], columns)


def _decisions(snapshot: Row) -> RenderableType:
    names = ("tenant", "replica", "reason", "prompt_tokens", "cached_tokens")
    columns: dict[str, Column] = {"at": lambda row: time.strftime("%H:%M:%S", time.localtime(row["at_s"]))}
    columns |= {name: itemgetter(name) for name in names}
    columns |= {name: partial(_number, name, ".3f") for name in ("ttft_s", "estimated_ttft_s", "cold_ttft_s")}
    return _table("last decisions", snapshot["decisions"][: -SHOWN_DECISIONS - 1 : -1], columns)


def _number(name: str, form: str, row: Row) -> str:
    return "" if row.get(name) is None else f"{row[name]:{form}}"


def _changes(snapshot: Row) -> RenderableType:
    """Return a line for each of the last moves of caches, and for what the autoscaler decided last."""
    lines = []
    for row in snapshot.get("moves", ())[-2:]:
        what = "joined warm, copied" if row["kind"] == "prewarm" else "leaves, handed over"
        lines.append(f"{row['replica']} {what} {row['blocks']} blocks in {row['seconds']} s ({row['state']})")
    if scale := snapshot.get("scale"):
        why = f"({scale['reason']}): {scale.get('why', '')}"
        lines.append(f"autoscaling: {scale['from']} -> {scale['target']} replicas {why}")
    return Text("\n".join(lines))


def _table(title: str, rows: Iterable[Row], columns: Mapping[str, Column]) -> Table:
    """Return a table; what a cell holds is never markup."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name.replace("_", " "), min_width=BAR_CELLS if name == POOL else None)
    for row in rows:
        cells = (cell(row) for cell in columns.values())
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells))
    return table
