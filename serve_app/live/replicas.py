"""Rows of replicas, and their activity since the last look, from the router's state and the replicas' reports."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from router.protocol.events import ENDS_TIER, POOL_TIER
from router.protocol.samples import Sample

ReplicaRow = dict[str, Any]
Reports = Mapping[str, Sequence[Sample]]
"""Samples by replica."""

TENANTS_FIELDS = ("replica", "number", "state", "engine", "simulated")
"""The fields of a replica that a tenant sees. The counts would include other tenants' work."""

QUIET_S = 3.0
"""A replica reports at least once a second. After this time without a report, it is shown as silent."""

MAX_OWNERS = 12
"""The limit of owners of a replica's blocks that are shown: those that hold the most."""

_BLOCKS = {"used": "blocks_used", "cached": "blocks_reusable", "free": "blocks_free"}
_EVICTED = "warmpath_prefix_cache_evicted_blocks_total"
_PULLS = "warmpath_kv_pulls_total"
_PULLED = "warmpath_kv_pulled_tokens_total"


def replica_rows(
    states: Iterable[Mapping[str, Any]], reports: Reports, about: Mapping[str, Any]
) -> dict[str, ReplicaRow]:
    """Return the rows by replica. ``states``: from ``RoutingCore.state``; ``about``: the instance."""
    return {state["replica_id"]: _row(state, reports.get(state["replica_id"], ()), about) for state in states}


def _row(state: Mapping[str, Any], samples: Sequence[Sample], about: Mapping[str, Any]) -> ReplicaRow:
    blocks: dict[str, int] = {}
    owners: Counter[str] = Counter()
    machine: dict[str, str] = {}
    without = lacking(samples)
    for name, labels, value in samples:
        pool_state = dict(labels).get("state")
        if name == "warmpath_kv_cache_blocks" and pool_state in _BLOCKS:
            blocks[_BLOCKS[pool_state]] = int(value)
        elif name == "warmpath_pinned_blocks":
            blocks["blocks_pinned"] = int(value)
        elif name == "warmpath_tenant_kv_cache_blocks" and value:
            owners[dict(labels).get("tenant", "")] += int(value)
        elif name == "warmpath_replica_info":
            machine = {label: value for label, value in labels if label in ("node", "gpu") and value}
    if blocks.keys() >= set(_BLOCKS.values()):
        blocks["blocks_total"] = sum(blocks[name] for name in _BLOCKS.values())
    age_s = state["report_age_s"]
    return {
        "replica": state["replica_id"],
        "state": "leaving" if state["away"] else "joining" if age_s is None else "serving",
        "engine": about["engine"],
        "simulated": about["simulated"],
        **machine,
        **blocks,
        **({"blocks_by_owner": dict(owners.most_common(MAX_OWNERS))} if owners else {}),
        **({"without": without} if without else {}),
        "running": state["running_sequences"],
        "waiting": state["waiting_sequences"],
        "queued_tokens": state["queued_prefill_tokens"],
        "full": state["full"],
        "prefill_tokens_per_s": round(state["prefill_tokens_per_s"], 1),
        "tier_blocks": {tier: count for tier, count in state["blocks"].items() if tier not in (POOL_TIER, ENDS_TIER)},
        "report_age_s": age_s,
    }


def lacking(samples: Sequence[Sample]) -> list[str]:
    """Return the capabilities that a replica goes without, because its engine's library does not allow them."""
    return [
        dict(labels)["capability"]
        for name, labels, value in samples
        if name == "warmpath_engine_capability" and not value
    ]


def changed(before: ReplicaRow | None, after: ReplicaRow) -> bool:
    """Return whether a row has news. A report's age always changes, and matters only once it is old."""
    if before is None or before.keys() != after.keys():
        return True
    quiet = [(row.get("report_age_s") or 0.0) > QUIET_S for row in (before, after)]
    return quiet[0] != quiet[1] or any(before[name] != after[name] for name in after if name != "report_age_s")


class Roster:
    """The current replicas: their numbers, in the order of joining, and those that died while leaving."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._last = 0
        self._leaving: dict[str, float | None] = {}

    def note(self, rows: Mapping[str, ReplicaRow], handed_over: Collection[str], now_s: float) -> None:
        """Add the numbers, and set the state "lost" for silent leaving replicas: a stopped one reports until its end.

        ``handed_over``: replicas that reported their handover.
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


def left(name: str, row: ReplicaRow, at_s: float) -> ReplicaRow:
    """Return the event for a replica that is gone. ``row``: its last one. ``lost``: it died, perhaps while leaving."""
    more = {key: row[key] for key in ("report_age_s",) if key in row}
    lost = row["state"] != "leaving"
    return {"type": "replica_left", "at_s": at_s, "replica": name, "number": row["number"], "lost": lost, **more}


def came_and_went(before: Mapping[str, ReplicaRow], after: Mapping[str, ReplicaRow], at_s: float) -> list[ReplicaRow]:
    """Return events for replicas that are gone, and for those that serve for the first time."""
    gone = [left(name, row, at_s) for name, row in before.items() if name not in after]
    new = [
        {"type": "joined", "at_s": at_s, "replica": name, "number": row["number"]}
        for name, row in after.items()
        if row["state"] == "serving" and before.get(name, {"state": "joining"})["state"] == "joining"
    ]
    return gone + new


class Activity:
    """The replicas' work between two looks, summed from their counters: no event per block or per pull."""

    def __init__(self) -> None:
        self._before: dict[str, Counter[str]] = {}
        self._looked_s = 0.0

    def look(self, reports: Reports, now_s: float) -> list[tuple[str, ReplicaRow]]:
        """Return evictions and pulls since the last look, by event type, without replicas that are new since then."""
        counts = {replica: _counts(samples) for replica, samples in reports.items()}
        seconds = round(now_s - self._looked_s, 3)
        events: list[tuple[str, ReplicaRow]] = []
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
    """Return evicted blocks and pulled tokens by metric name, and pulls by outcome."""
    counts: Counter[str] = Counter()
    for name, labels, value in samples:
        if name in (_EVICTED, _PULLED):
            counts[name] += int(value)
        elif name == _PULLS:
            counts[dict(labels).get("outcome", "")] += int(value)
    return counts
