"""What `warmpath top` shows: the state that events make (docs/live.md), and the frame that is drawn of it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from serve_app.cli.console import harmless

Row = dict[str, Any]

SHOWN_PREFIXES = 8
SHOWN_DECISIONS = 10
BAR_CELLS = 20

REASONS = {
    "cached": "it holds the most",
    "in_flight": "it is computing the same prefix",
    "cold": "nobody holds any of it",
    "load_spill": "the holder has too much to do",
    "hot_prefix": "the prefix gets another holder",
    "only_replica": "there is no other",
    "round_robin": "its turn",
    "power_of_two": "the idler of two",
    "placement": "by hash of the prefix",
    "fallback": "the router could not decide",
}


class State:
    """What a snapshot and the events after it say now. ``lost``: decisions and events that were not sent."""

    def __init__(self) -> None:
        self.about: Row = {}
        self.replicas: dict[str, Row] = {}
        self.prefixes: dict[str, Row] = {}
        self.totals: list[Row] = []
        self.decisions: deque[Row] = deque(maxlen=SHOWN_DECISIONS)
        self.moves: deque[Row] = deque(maxlen=2)
        self.scale: Row | None = None
        self.evicted_blocks = 0
        self.pulled_tokens = 0
        self.lost = 0

    def take(self, event: Row) -> None:
        """Take one event; unknown types change nothing."""
        event = harmless(event)
        match event["type"]:
            case "snapshot":
                self.about = {key: value for key, value in event.items() if not isinstance(value, list)}
                self.replicas = {row["replica"]: row for row in event["replicas"]}
                self.prefixes = {row["id"]: row for row in event["prefixes"]}
                self.totals, self.scale = event["totals"], event.get("scale")
                self.decisions = deque(event["decisions"], SHOWN_DECISIONS)
                self.moves = deque(event.get("moves", ()), 2)
            case "replica":
                self.replicas[event["replica"]] = event
            case "replica_left":
                self.replicas.pop(event["replica"], None)
            case "prefixes":
                self.prefixes |= {row["id"]: row for row in event["nodes"]}
            case "prefixes_gone":
                for name in event["ids"]:
                    self.prefixes.pop(name, None)
            case "totals":
                self.totals = event["totals"]
            case "decision":
                self.decisions.append(event)
            case "move":
                self.moves.append(event)
            case "scale":
                self.scale = event
            case "evictions":
                self.evicted_blocks += event["blocks"]
            case "pulls":
                self.pulled_tokens += event["tokens"]
            case "skipped":
                self.lost += event["decisions"]
            case "dropped":
                self.lost += event["events"]


def frame(state: State, note: str = "") -> RenderableType:
    """Return the whole display. ``note``: what stands under it, about the connection."""
    parts: list[RenderableType] = [_head(state), _replicas(state), _prefixes(state), _decisions(state)]
    parts += [_move(row) for row in state.moves]
    if state.scale is not None:
        why = f"{state.scale['from']} -> {state.scale['target']} replicas ({state.scale['reason']})"
        parts.append(Text(f"autoscaling: {why}: {state.scale.get('why', '')}"))
    if note:
        parts.append(Text(note, style="yellow"))
    return Group(*parts)


def _head(state: State) -> Text:
    about = state.about
    requests = sum(row["requests"] for row in state.totals)
    prompt_tokens = sum(row["prompt_tokens"] for row in state.totals)
    cached_tokens = sum(row["cached_tokens"] for row in state.totals)
    rate = f"{cached_tokens / prompt_tokens:.1%}" if prompt_tokens else "-"
    engine = "simulated: all times are a cost model's" if about.get("simulated") else str(about.get("engine"))
    viewer = "all tenants" if about.get("viewer") == "operator" else f"tenant {about.get('tenant')}"
    parts = [f"{about.get('model')} ({engine})", f"policy {about.get('policy')}", viewer]
    parts += [f"{requests} requests", f"hit rate {rate}"]
    if about.get("viewer") == "operator":
        parts += [f"{state.evicted_blocks} blocks evicted", f"{state.pulled_tokens} tokens pulled"]
    if state.lost:
        parts.append(f"{state.lost} events not shown")
    return Text("  ".join(parts), style="bold")


def _replicas(state: State) -> Table:
    table = _table(f"{len(state.replicas)} replicas", "replica", "state")
    full = state.about.get("viewer") == "operator"
    if full:
        table.add_column("pool: used, reusable, free")
        for name in ("blocks", "running", "waiting", "queued tokens", "prefill tokens/s"):
            table.add_column(name, justify="right")
    for name in sorted(state.replicas):
        row = state.replicas[name]
        cells = [escape(name), escape(row["state"])]
        if full:
            total = row.get("blocks_total")
            cells += [_bar(row) if total else "", str(total or "")]
            cells += [str(row[field]) for field in ("running", "waiting", "queued_tokens")]
            cells.append(f"{row['prefill_tokens_per_s']:.0f}")
        table.add_row(*cells)
    return table


def _bar(row: Row) -> str:
    total = row["blocks_total"]
    used = round(BAR_CELLS * row["blocks_used"] / total)
    cached = min(BAR_CELLS - used, round(BAR_CELLS * row["blocks_reusable"] / total))
    return f"[red]{'█' * used}[/][green]{'▒' * cached}[/]{'·' * (BAR_CELLS - used - cached)}"


def _prefixes(state: State) -> Table:
    table = _table("prefixes asked for most", "prefix", "tenant", "name")
    for name in ("tokens", "requests", "hits"):
        table.add_column(name, justify="right")
    table.add_column("held by (tokens)")
    hottest = sorted(state.prefixes.values(), key=lambda row: (-row["requests"], row["prefix_tokens"]))
    for row in hottest[:SHOWN_PREFIXES]:
        holders = "  ".join(f"{name} {tokens}" for name, tokens in sorted(row["holders"].items()))
        kind = row["kind"] + (" (pinned)" if row["pinned"] else "")
        cells = [kind, row["tenant"] or "everybody", row["label"] or row["id"][:8]]
        cells += [str(row["prefix_tokens"]), str(row["requests"]), f"{row['hits'] / max(1, row['requests']):.0%}"]
        table.add_row(*map(escape, cells), escape(holders or "nobody"))
    return table


def _decisions(state: State) -> Table:
    table = _table("last decisions", "at", "tenant", "replica", "because")
    for name in ("prompt", "cached", "TTFT s", "expected", "cold"):
        table.add_column(name, justify="right")
    for row in reversed(state.decisions):
        at = time.strftime("%H:%M:%S", time.localtime(row["at_s"]))
        cells = [at, row["tenant"], row["replica"], REASONS.get(row["reason"], row["reason"])]
        cells += [str(row["prompt_tokens"]), str(row["cached_tokens"])]
        cells += [_seconds(row.get(field)) for field in ("ttft_s", "estimated_ttft_s", "cold_ttft_s")]
        table.add_row(*map(escape, cells))
    return table


def _move(row: Row) -> Text:
    what = "joined warm, copied" if row["kind"] == "prewarm" else "leaves, handed over"
    return Text(f"{row['replica']} {what} {row['blocks']} blocks in {row['seconds']} s ({row['state']})")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column)
    return table


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
