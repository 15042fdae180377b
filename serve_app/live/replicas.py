"""Rows of replicas, and what they did since the last look, from what a router knows and its replicas report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from router.protocol.samples import Sample

Row = dict[str, Any]

TENANTS_FIELDS = ("replica", "state", "engine", "simulated")
"""What a tenant sees of a replica: no count is its own there."""

_BLOCKS = {"used": "blocks_used", "cached": "blocks_reusable", "free": "blocks_free"}


def replica_rows(
    states: Iterable[Mapping[str, Any]], reports: Mapping[str, Sequence[Sample]], about: Mapping[str, Any]
) -> dict[str, Row]:
    """Return the rows by replica. ``states``: as ``RoutingCore.state`` has them; ``about``: the instance."""
    return {state["replica_id"]: _row(state, reports.get(state["replica_id"], ()), about) for state in states}


def _row(state: Mapping[str, Any], samples: Sequence[Sample], about: Mapping[str, Any]) -> Row:
    blocks: dict[str, int] = {}
    for name, labels, value in samples:
        of = dict(labels)
        if name == "warmpath_kv_cache_blocks" and of.get("state") in _BLOCKS:
            blocks[_BLOCKS[of["state"]]] = int(value)
        elif name == "warmpath_pinned_blocks":
            blocks["blocks_pinned"] = int(value)
    if blocks.keys() >= set(_BLOCKS.values()):
        blocks["blocks_total"] = sum(blocks[name] for name in _BLOCKS.values())
    age_s = state["report_age_s"]
    return {
        "replica": state["replica_id"],
        "state": "leaving" if state["away"] else "joining" if age_s is None else "serving",
        "engine": about["engine"],
        "simulated": about["simulated"],
        **blocks,
        "running": state["running_sequences"],
        "waiting": state["waiting_sequences"],
        "queued_tokens": state["queued_prefill_tokens"],
        "full": state["full"],
        "prefill_tokens_per_s": round(state["prefill_tokens_per_s"], 1),
        "tier_blocks": {tier: count for tier, count in state["blocks"].items() if tier != "pool"},
        "report_age_s": age_s,
    }


def changed(before: Row | None, after: Row) -> bool:
    """Whether a row says anything new: a report's age always moves, and matters once it is old."""
    if before is None:
        return True
    ages = (before["report_age_s"] or 0.0) > SILENT_S, (after["report_age_s"] or 0.0) > SILENT_S
    return ages[0] != ages[1] or {**before, "report_age_s": 0} != {**after, "report_age_s": 0}


SILENT_S = 5.0
"""A replica reports at least once a second; after this its feed counts as silent (docs/routing.md)."""


class Activity:
    """What replicas' counters say has happened between two looks, summed: no event a block, no event a pull."""

    def __init__(self) -> None:
        self._before: dict[str, dict[str, float]] = {}
        self._looked_s = 0.0

    def look(self, reports: Mapping[str, Sequence[Sample]], now_s: float) -> list[tuple[str, Row]]:
        """Return evictions and pulls since the last look, by event type; none of a replica that was not there then."""
        seconds, self._looked_s = round(now_s - self._looked_s, 3), now_s
        found: list[tuple[str, Row]] = []
        counts = {replica: _counts(samples) for replica, samples in reports.items()}
        for replica, now in counts.items():
            before = self._before.get(replica)
            if before is None:
                continue
            more = {name: int(value - before.get(name, 0.0)) for name, value in now.items()}
            if more.get("evicted", 0) > 0:
                found.append(("evictions", {"replica": replica, "blocks": more["evicted"], "seconds": seconds}))
            pulls = {
                name.removeprefix("pull "): count
                for name, count in more.items()
                if name.startswith("pull ") and count > 0
            }
            if pulls or more.get("pulled_tokens", 0) > 0:
                tokens = more.get("pulled_tokens", 0)
                found.append(("pulls", {"replica": replica, "pulls": pulls, "tokens": tokens, "seconds": seconds}))
        self._before = counts
        return found


def _counts(samples: Sequence[Sample]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, labels, value in samples:
        match name:
            case "warmpath_prefix_cache_evicted_blocks_total":
                found["evicted"] = found.get("evicted", 0.0) + value
            case "warmpath_kv_pulls_total":
                found["pull " + dict(labels).get("outcome", "")] = value
            case "warmpath_kv_pulled_tokens_total":
                found["pulled_tokens"] = value
    return found
