"""Rows of replicas, and what they did since the last look, from what a router knows and its replicas report."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from router.protocol.events import ENDS_TIER, POOL_TIER
from router.protocol.samples import Sample

Row = dict[str, Any]
Reports = Mapping[str, Sequence[Sample]]
"""Samples by replica."""

TENANTS_FIELDS = ("replica", "number", "state", "engine", "simulated")
"""What a tenant sees of a replica: no count is its own there."""

QUIET_S = 3.0
"""A replica reports at least once a second; after this whoever watches is told that it does not."""

_BLOCKS = {"used": "blocks_used", "cached": "blocks_reusable", "free": "blocks_free"}
_EVICTED = "warmpath_prefix_cache_evicted_blocks_total"
_PULLS = "warmpath_kv_pulls_total"
_PULLED = "warmpath_kv_pulled_tokens_total"


def replica_rows(states: Iterable[Mapping[str, Any]], reports: Reports, about: Mapping[str, Any]) -> dict[str, Row]:
    """Return the rows by replica. ``states``: as ``RoutingCore.state`` has them; ``about``: the instance."""
    return {state["replica_id"]: _row(state, reports.get(state["replica_id"], ()), about) for state in states}


def _row(state: Mapping[str, Any], samples: Sequence[Sample], about: Mapping[str, Any]) -> Row:
    blocks: dict[str, int] = {}
    place: dict[str, str] = {}
    for name, labels, value in samples:
        pool_state = dict(labels).get("state")
        if name == "warmpath_kv_cache_blocks" and pool_state in _BLOCKS:
            blocks[_BLOCKS[pool_state]] = int(value)
        elif name == "warmpath_pinned_blocks":
            blocks["blocks_pinned"] = int(value)
        elif name == "warmpath_replica_info":
            place = {label: told for label, told in labels if label in ("node", "gpu") and told}
    if blocks.keys() >= set(_BLOCKS.values()):
        blocks["blocks_total"] = sum(blocks[name] for name in _BLOCKS.values())
    age_s = state["report_age_s"]
    return {
        "replica": state["replica_id"],
        "state": "leaving" if state["away"] else "joining" if age_s is None else "serving",
        "engine": about["engine"],
        "simulated": about["simulated"],
        **place,
        **blocks,
        "running": state["running_sequences"],
        "waiting": state["waiting_sequences"],
        "queued_tokens": state["queued_prefill_tokens"],
        "full": state["full"],
        "prefill_tokens_per_s": round(state["prefill_tokens_per_s"], 1),
        "tier_blocks": {tier: count for tier, count in state["blocks"].items() if tier not in (POOL_TIER, ENDS_TIER)},
        "report_age_s": age_s,
    }


def changed(before: Row | None, after: Row) -> bool:
    """Whether a row says anything new: a report's age always moves, and matters once it is old."""
    if before is None or before.keys() != after.keys():
        return True
    quiet = [(row.get("report_age_s") or 0.0) > QUIET_S for row in (before, after)]
    return quiet[0] != quiet[1] or any(before[name] != after[name] for name in after if name != "report_age_s")


class Roster:
    """The replicas that there are: their numbers, in the order in which they joined, and who of those leaving died."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._last = 0
        self._leaving: dict[str, float | None] = {}

    def note(self, rows: Mapping[str, Row], handed_over: Collection[str], now_s: float) -> None:
        """Add numbers, and the state "lost" of those that leave and say nothing: who is stopped goes on for a while.

        ``handed_over``: replicas that said how they left.
        """
        numbers, leaving = self._numbers, self._leaving
        self._numbers = {name: numbers.get(name) or self._next() for name in rows}
        self._leaving = {name: leaving.get(name, now_s) for name, row in rows.items() if row["state"] == "leaving"}
        for name, row in rows.items():
            row["number"], since_s, age_s = self._numbers[name], self._leaving.get(name), row["report_age_s"]
            if since_s is None:
                continue
            if name in handed_over or (age_s is not None and age_s < now_s - since_s):
                self._leaving[name] = None
            elif (now_s - since_s if age_s is None else age_s) > QUIET_S:
                row["state"] = "lost"

    def _next(self) -> int:
        self._last += 1
        return self._last


def left(name: str, row: Row, at_s: float) -> Row:
    """Return the event of a replica that is gone, by its last row. ``lost``: it was not to leave, or died at it."""
    more = {key: row[key] for key in ("report_age_s",) if key in row}
    lost = row["state"] != "leaving"
    return {"type": "replica_left", "at_s": at_s, "replica": name, "number": row["number"], "lost": lost, **more}


def came_and_went(before: Mapping[str, Row], after: Mapping[str, Row], at_s: float) -> list[Row]:
    """Return events of replicas that are gone, and of those that serve for the first time."""
    gone = [left(name, row, at_s) for name, row in before.items() if name not in after]
    new = [
        {"type": "joined", "at_s": at_s, "replica": name, "number": row["number"]}
        for name, row in after.items()
        if row["state"] == "serving" and before.get(name, {"state": "joining"})["state"] == "joining"
    ]
    return gone + new


class Activity:
    """What replicas' counters say has happened between two looks, summed: no event a block, no event a pull."""

    def __init__(self) -> None:
        self._before: dict[str, Counter[str]] = {}
        self._looked_s = 0.0

    def look(self, reports: Reports, now_s: float) -> list[tuple[str, Row]]:
        """Return evictions and pulls since the last look, by event type; none of a replica that was not there then."""
        counts = {replica: _counts(samples) for replica, samples in reports.items()}
        seconds = round(now_s - self._looked_s, 3)
        events: list[tuple[str, Row]] = []
        for replica, now in counts.items():
            more = now - self._before.get(replica, now)
            blocks, tokens = more.pop(_EVICTED, 0), more.pop(_PULLED, 0)
            if blocks:
                events.append(("evictions", {"replica": replica, "blocks": blocks, "seconds": seconds}))
            if more or tokens:
                pulls = {"replica": replica, "pulls": dict(more), "tokens": tokens, "seconds": seconds}
                events.append(("pulls", pulls))
        self._before, self._looked_s = counts, now_s
        return events


def _counts(samples: Sequence[Sample]) -> Counter[str]:
    """Return evicted blocks and pulled tokens by their names, and pulls by outcome."""
    counts: Counter[str] = Counter()
    for name, labels, value in samples:
        if name in (_EVICTED, _PULLED):
            counts[name] += int(value)
        elif name == _PULLS:
            counts[dict(labels).get("outcome", "")] += int(value)
    return counts
