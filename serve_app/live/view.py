"""What one viewer sees: a picture that changes, told to its watchers as a snapshot and then as differences.

All that decides who may see what is here: an operator sees all, a tenant its own part. The words are those of
docs/live.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serve_app.live.nodes import Key, NodeRow, shown
from serve_app.live.replicas import TENANTS_FIELDS, Row, changed
from serve_app.live.watcher import Event, Watcher

RECENT_DECISIONS = 50
HIDDEN_FROM_TENANTS = frozenset({"estimated_ttft_s", "cold_ttft_s", "queued_tokens"})
"""Of a decision: they tell how busy others keep a replica."""

Total = tuple[int, int, int]
"""Requests, prompt tokens, cached tokens."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is known at one moment. ``about``: of the instance; ``sources``, ``totals``: by ingress."""

    about: Row = field(default_factory=dict)
    replicas: Mapping[str, Row] = field(default_factory=dict)
    sources: Sequence[Mapping[Key, NodeRow]] = ()
    totals: Sequence[Mapping[str, Total]] = ()
    moves: Sequence[Row] = ()
    scale: Row | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """Something that happened. ``tenant``: whose it is, None: for operators alone."""

    type: str
    at_s: float
    tenant: str | None
    body: Row


@dataclass(frozen=True, slots=True)
class Picture:
    """One viewer's part of the facts."""

    replicas: Mapping[str, Row]
    nodes: Mapping[str, NodeRow]
    totals: list[Row]
    moves: list[Row]
    scale: Row | None


def picture_of(facts: Facts, viewer: str | None) -> Picture:
    """Return what a viewer sees of the facts. ``viewer``: a tenant's name, None for an operator."""
    sums: dict[str, Total] = {}
    for totals in facts.totals:
        for tenant, (requests, prompt_tokens, cached_tokens) in totals.items():
            if viewer in (None, tenant):
                known = sums.get(tenant, (0, 0, 0))
                sums[tenant] = known[0] + requests, known[1] + prompt_tokens, known[2] + cached_tokens
    rows = [
        {"tenant": tenant, "requests": requests, "prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens}
        for tenant, (requests, prompt_tokens, cached_tokens) in sorted(sums.items())
    ]
    nodes = shown(facts.sources, viewer)
    if viewer is None:
        return Picture(facts.replicas, nodes, rows, list(facts.moves), facts.scale)
    replicas = {name: {key: row[key] for key in TENANTS_FIELDS} for name, row in facts.replicas.items()}
    return Picture(replicas, nodes, rows, [], None)


def visible(told: Told, viewer: str | None) -> Row | None:
    """Return what a viewer sees of something that happened, None for nothing."""
    body = told.body
    if viewer is not None:
        if told.tenant != viewer:
            return None
        body = {key: value for key, value in body.items() if key not in HIDDEN_FROM_TENANTS}
    return {"type": told.type, "at_s": told.at_s, **body}


def difference(before: Picture, after: Picture, at_s: float) -> list[Row]:
    """Return the events that make one picture the other."""
    head = {"at_s": at_s}
    events: list[Row] = [
        {"type": "replica", **head, **row}
        for name, row in after.replicas.items()
        if _differs(before.replicas.get(name), row)
    ]
    events += [
        {"type": "replica_left", **head, "replica": name} for name in before.replicas if name not in after.replicas
    ]
    gone = [name for name in before.nodes if name not in after.nodes]
    if gone:
        events.append({"type": "prefixes_gone", **head, "ids": gone})
    new = [row for name, row in after.nodes.items() if before.nodes.get(name) != row]
    if new:
        events.append({"type": "prefixes", **head, "nodes": new})
    if after.totals != before.totals:
        events.append({"type": "totals", **head, "totals": after.totals})
    events += [{"type": "move", **row} for row in after.moves if row not in before.moves]
    if after.scale is not None and after.scale != before.scale:
        events.append({"type": "scale", **after.scale})
    return events


def _differs(before: Row | None, after: Row) -> bool:
    return changed(before, after) if "report_age_s" in after else before != after


class View:
    """A viewer's picture, its latest decisions, and all of its watchers."""

    def __init__(self, viewer: str | None, facts: Facts) -> None:
        self.viewer = viewer
        self.watchers: set[Watcher] = set()
        self._about = facts.about
        self._picture = picture_of(facts, viewer)
        self._decisions: deque[Row] = deque(maxlen=RECENT_DECISIONS)

    def snapshot(self, at_s: float) -> Row:
        """Return all of it."""
        operator, picture = self.viewer is None, self._picture
        more = {"moves": picture.moves, "scale": picture.scale} if operator else {}
        return {
            "type": "snapshot",
            "at_s": at_s,
            "viewer": "operator" if operator else "tenant",
            "tenant": self.viewer,
            **self._about,
            "replicas": list(picture.replicas.values()),
            "prefixes": list(picture.nodes.values()),
            "totals": picture.totals,
            "decisions": list(self._decisions),
            **more,
        }

    def update(self, facts: Facts, at_s: float) -> None:
        """Take new facts, and tell the watchers what has changed."""
        before, self._picture, self._about = self._picture, picture_of(facts, self.viewer), facts.about
        for body in difference(before, self._picture, at_s):
            self._offer(encoded(body))
        for watcher in self.watchers:
            if watcher.skipped:
                watcher.offer(encoded({"type": "skipped", "at_s": at_s, "decisions": watcher.skipped}))
                watcher.skipped = 0

    def tell(self, told: Iterable[Told]) -> None:
        """Tell the watchers what happened, as far as they may know."""
        for each in told:
            body = visible(each, self.viewer)
            if body is None:
                continue
            if each.type == "decision":
                self._decisions.append(body)
                self._offer(encoded(body), Watcher.may_take_decision)
            else:
                self._offer(encoded(body))

    def _offer(self, event: Event, wanted: Callable[[Watcher], bool] = lambda _: True) -> None:
        for watcher in self.watchers:
            if wanted(watcher):
                watcher.offer(event)


def encoded(body: Mapping[str, Any]) -> Event:
    """Return an event as it is sent."""
    return Event(body["type"], msgspec.json.encode(body))
