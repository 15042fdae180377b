"""`warmpath top`: what an instance does now, in a terminal, from the snapshots of `/v1/cache/events` (docs/live.md)."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from serve_app.cli.commands.prompt_cutover import KEY as OPERATOR_KEY
from serve_app.cli.console import fail, harmless

TENANT_KEY = "WARMPATH_API_KEY"
TIMEOUT_S = 15.0
EVERY_S = 1.0
SHOWN_PREFIXES = 8
SHOWN_DECISIONS = 10
BAR_CELLS = 20

Row = dict[str, Any]


def top(
    url: Annotated[
        str, typer.Option(help=f"of the instance; an operator's key is taken from ${OPERATOR_KEY}, else ${TENANT_KEY}")
    ] = "http://127.0.0.1:8000",
    once: Annotated[bool, typer.Option("--once", help="print one frame and leave")] = False,
) -> None:
    """Show replicas, prefixes and decisions as they are; a tenant's key shows its own part. Ctrl-C ends it."""
    console = Console(highlight=False)
    first = _frame(url)
    if isinstance(first, str):
        fail(f"{first}; start an instance with warmpath serve, or name another with --url")
    if once or not console.is_terminal:
        console.print(first)
        return
    with Live(first, console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(EVERY_S)
            frame = _frame(url)
            frame = Text(f"{frame}; trying again", style="yellow") if isinstance(frame, str) else frame
            live.update(frame, refresh=True)


def _frame(url: str) -> RenderableType:
    """Return what an instance shows now; a sentence where nobody answers. Leaves with status 2 where it is refused."""
    key = os.environ.get(OPERATOR_KEY) or os.environ.get(TENANT_KEY)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    address = f"{url.rstrip('/')}/v1/cache/events"
    try:
        answer = httpx.get(address, params={"once": "true"}, headers=headers, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"nobody answers at {url}: {error}"
    if answer.status_code >= 500:
        return f"{url} answers with status {answer.status_code}"
    try:
        document = harmless(answer.json())
        refusal = document["error"]["message"] if answer.is_error else ""
        parts = [] if refusal else [_head(document), _replicas(document), _prefixes(document), _decisions(document)]
        parts += [] if refusal else _changes(document)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        fail(f"{url} does not answer as warmpath does: {error!r}")
    if refusal:
        fail(f"{refusal} (a key is taken from ${OPERATOR_KEY} or ${TENANT_KEY})")
    return Group(*parts)


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
    rows = snapshot["replicas"]
    figures = ("blocks_total", "running", "waiting", "queued_tokens", "prefill_tokens_per_s")
    full = snapshot["viewer"] == "operator"
    table = _table(f"{len(rows)} replica{'' if len(rows) == 1 else 's'}", "replica", "state")
    if full:
        table.add_column("pool: used, reusable, free")
        _add_numbers(table, *figures)
    for row in sorted(rows, key=lambda row: str(row["replica"])):
        cells = [escape(row["replica"]), escape(row["state"])]
        table.add_row(*cells, *([_bar(row), *(f"{row.get(name) or 0:.0f}" for name in figures)] if full else ()))
    return table


def _bar(row: Row) -> str:
    if not row.get("blocks_total"):
        return ""
    used, cached = (round(BAR_CELLS * row[name] / row["blocks_total"]) for name in ("blocks_used", "blocks_reusable"))
    cached = min(BAR_CELLS - used, cached)
    return f"[red]{'█' * used}[/][green]{'▒' * cached}[/]{'·' * (BAR_CELLS - used - cached)}"


def _prefixes(snapshot: Row) -> RenderableType:
    table = _table("prefixes asked for most", "prefix", "tenant", "name", "held by (tokens)")
    _add_numbers(table, "tokens", "requests", "hits")
    hottest = sorted(snapshot["prefixes"], key=lambda row: (-row["requests"], row["prefix_tokens"]))
    for row in hottest[:SHOWN_PREFIXES]:
        holders = "  ".join(f"{name} {tokens}" for name, tokens in sorted(row["holders"].items()))
        kind = row["kind"] + (" (pinned)" if row["pinned"] else "")
        cells = [kind, row["tenant"] or "everybody", row["label"] or row["id"][:8], holders or "nobody"]
        hits = f"{row['hits'] / max(1, row['requests']):.0%}"
        table.add_row(*map(escape, cells), str(row["prefix_tokens"]), str(row["requests"]), hits)
    return table


def _decisions(snapshot: Row) -> RenderableType:
    table = _table("last decisions", "at", "tenant", "replica", "because")
    times = ("ttft_s", "estimated_ttft_s", "cold_ttft_s")
    _add_numbers(table, "prompt_tokens", "cached_tokens", *times)
    for row in snapshot["decisions"][: -SHOWN_DECISIONS - 1 : -1]:
        at = time.strftime("%H:%M:%S", time.localtime(row["at_s"]))
        cells = [at, *(escape(row[name]) for name in ("tenant", "replica", "reason"))]
        seconds = ("" if row.get(name) is None else f"{row[name]:.3f}" for name in times)
        table.add_row(*cells, str(row["prompt_tokens"]), str(row["cached_tokens"]), *seconds)
    return table


def _changes(snapshot: Row) -> list[RenderableType]:
    """Return a line for each of the last moves of caches, and for what the autoscaler decided last."""
    changes: list[RenderableType] = []
    for row in snapshot.get("moves", ())[-2:]:
        what = "joined warm, copied" if row["kind"] == "prewarm" else "leaves, handed over"
        line = f"{row['replica']} {what} {row['blocks']} blocks in {row['seconds']} s ({row['state']})"
        changes.append(Text(line))
    if scale := snapshot.get("scale"):
        line = f"{scale['from']} -> {scale['target']} replicas ({scale['reason']}): {scale.get('why', '')}"
        changes.append(Text(f"autoscaling: {line}"))
    return changes


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")


def _add_numbers(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
