"""One viewer's picture, sent as a snapshot and then as differences (docs: api).

All access rights apply here. A watcher's queue is bounded, and never makes a sender wait.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from serve_app.live.prefixes import NodeRow, NodeRows, visible_nodes
from serve_app.live.replicas import TENANTS_FIELDS, ReplicaRow, changed, left
from serve_app.live.tally import Bucket, Rings, Total, figure_of, rows_of

End = Literal["key", "stopping", "gone"]

QUEUE_EVENTS = 512
QUEUE_BYTES = 1 << 20
GATHER_S = 0.1
"""Events within this time are sent together: one write per event would cost more than everything else."""

LAST_EVENT_S = 1.0
"""The time that a watcher has to read the end of its stream."""


class LiveEvent(NamedTuple):
    """``payload``: JSON on one line."""

    type: str
    payload: bytes


class Watcher:
    """The queue of one stream. ``dropped``: lost events. ``ended``: the reason for its end. ``limit``: its timeout."""

    def __init__(self) -> None:
        self.dropped = 0
        self.ended: End | None = None
        self.limit: asyncio.Timeout | None = None
        self._queue: deque[LiveEvent] = deque()
        self._bytes = 0
        self._ready = asyncio.Event()

    def offer(self, event: LiveEvent) -> None:
        """Add an event. If the queue is full, drop the oldest ones."""
        self._queue.append(event)
        self._bytes += len(event.payload)
        while self._queue and (len(self._queue) > QUEUE_EVENTS or self._bytes > QUEUE_BYTES):
            self._bytes -= len(self._queue.popleft().payload)
            self.dropped += 1
        self._ready.set()

    def end(self, reason: End) -> None:
        """End the stream, within ``LAST_EVENT_S`` if its reader takes nothing."""
        if self.ended is None:
            self.ended = reason
            self._ready.set()
            if self.limit is not None:
                self.limit.reschedule(asyncio.get_running_loop().time() + LAST_EVENT_S)

    async def take(self, timeout_s: float) -> list[LiveEvent]:
        """Return the queued events, after at most ``timeout_s``, or none after a loss: they are outdated then."""
        if not self._queue and self.ended is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._ready.wait()
            except TimeoutError:
                return []
            if self.ended is None:
                await asyncio.sleep(GATHER_S)
        self._ready.clear()
        if self.dropped:
            self.dropped += len(self._queue)
        taken = [] if self.dropped else list(self._queue)
        self._queue.clear()
        self._bytes = 0
        return taken


RECENT_DECISIONS = 50
"""The latest decisions, and as many refusals and misses, for later watchers."""
_MANY = {"decision": "decisions", "refusal": "refusals", "miss": "misses"}
"""The types of events of which there may be many, with the words for several."""
DECISIONS_A_LOOK = 20
"""The limit of each of these that is sent between two looks, which are a second apart. Others are only counted."""
HIDDEN_FROM_TENANTS = frozenset({"estimated_ttft_s", "cold_ttft_s", "queued_tokens"})
"""Fields of a decision that reveal the load from other tenants."""

TENANTS_INCIDENTS = ("joined", "replica_left")

SHOWN_MOVES = 16

NoticesByKind = Mapping[str, Sequence[ReplicaRow]]
"""Notices by kind."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All data of one moment. ``about``: the instance; ``sources``, ``totals``, ``figures``: one item per ingress.

    ``heard``: the number of ingresses that answer, or None if the others cannot be asked.
    """

    about: ReplicaRow = field(default_factory=dict)
    replicas: Mapping[str, ReplicaRow] = field(default_factory=dict)
    sources: Sequence[NodeRows] = ()
    totals: Sequence[Mapping[str, Total]] = ()
    figures: Sequence[Rings] = ()
    board: NoticesByKind = field(default_factory=dict)
    incidents: Sequence[ReplicaRow] = ()
    heard: int | None = 1
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Occurrence:
    """An event that is not yet filtered for a viewer. ``tenant``: its owner, or None if only operators see it."""

    type: str
    at_s: float
    tenant: str | None
    body: ReplicaRow


@dataclass(frozen=True, slots=True)
class Picture:
    """One viewer's part of the facts. ``operators``: the fields of the snapshot that only operators see."""

    replicas: Mapping[str, ReplicaRow]
    nodes: Mapping[str, NodeRow]
    totals: list[ReplicaRow]
    figures: Mapping[int, ReplicaRow]
    minute: Bucket
    incidents: Sequence[ReplicaRow]
    operators: ReplicaRow = field(default_factory=dict)


def moves_of(board: NoticesByKind) -> list[ReplicaRow]:
    """Return the latest joins and leaves, oldest first."""
    rows = [
        {"kind": kind, "replica": notice["replica_id"], **{k: v for k, v in notice.items() if k != "replica_id"}}
        for kind in ("prewarm", "handover")
        for notice in board.get(kind, ())
    ]
    return sorted(rows, key=lambda row: row["at_s"])[-SHOWN_MOVES:]


def refusals_of(board: NoticesByKind) -> list[ReplicaRow]:
    """Return the messages of replicas and ingresses about the newest ``user_config``, each message once."""
    rows: dict[str, ReplicaRow] = {}
    for notice in board.get("configuration", ()):
        row = rows.setdefault(notice["why"], {"accepted": notice["accepted"], "why": notice["why"], "processes": 0})
        row["processes"] += 1
        row["at_s"] = notice["at_s"]  # the oldest comes last
    return list(rows.values())


def handed_over(board: NoticesByKind) -> list[str]:
    """Return the replicas that reported their handover."""
    return [notice["replica_id"] for notice in board.get("handover", ()) if notice.get("state") != "returned"]


def picture_of(facts: Facts, viewer: str | None) -> Picture:
    """Return a viewer's part of the facts. ``viewer``: a tenant's name, or None for an operator."""
    sums: dict[str, Total] = {}
    for totals in facts.totals:
        for tenant, total in totals.items():
            if viewer in (None, tenant):
                requests, prompt_tokens, cached_tokens = sums.get(tenant, (0, 0, 0))
                sums[tenant] = requests + total[0], prompt_tokens + total[1], cached_tokens + total[2]
    rows = [
        {"tenant": tenant, "requests": requests, "prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens}
        for tenant, (requests, prompt_tokens, cached_tokens) in sorted(sums.items())
    ]
    nodes = visible_nodes(facts.sources, viewer)
    figures, minute = rows_of(facts.figures, viewer, facts.at_s)
    if viewer is None:
        operators = {
            "moves": moves_of(facts.board),
            "scale": next(iter(facts.board.get("autoscaling", ())), None),
            "configuration": refusals_of(facts.board),
            "ingresses_heard": facts.heard,
        }
        return Picture(facts.replicas, nodes, rows, figures, minute, facts.incidents, operators)
    replicas = {name: {key: row[key] for key in TENANTS_FIELDS} for name, row in facts.replicas.items()}
    incidents = [
        {key: value for key, value in row.items() if key != "report_age_s"}
        for row in facts.incidents
        if row["type"] in TENANTS_INCIDENTS
    ]
    return Picture(replicas, nodes, rows, figures, minute, incidents)


def visible(occurrence: Occurrence, viewer: str | None) -> ReplicaRow | None:
    """Return the event as a viewer sees it, or None if it must not see it."""
    body = occurrence.body
    if viewer is not None:
        if occurrence.tenant != viewer:
            return None
        body = {key: value for key, value in body.items() if key not in HIDDEN_FROM_TENANTS}
    return {"type": occurrence.type, "at_s": occurrence.at_s, **body}


def difference(before: Picture, after: Picture, at_s: float) -> list[ReplicaRow]:
    """Return the events that turn one picture into the other."""
    events: list[ReplicaRow] = [
        {"type": "replica", "at_s": at_s, **row}
        for name, row in after.replicas.items()
        if changed(before.replicas.get(name), row)
    ]
    events += [left(name, row, at_s) for name, row in before.replicas.items() if name not in after.replicas]
    ids = [name for name in before.nodes if name not in after.nodes]
    if ids:
        events.append({"type": "prefixes_gone", "at_s": at_s, "ids": ids})
    nodes = [row for name, row in after.nodes.items() if before.nodes.get(name) != row]
    if nodes:
        events.append({"type": "prefixes", "at_s": at_s, "nodes": nodes})
    figures = [row for at, row in after.figures.items() if before.figures.get(at) != row]
    if after.totals != before.totals or figures:
        sums = {"totals": after.totals, "figures": figures, "minute": figure_of(after.minute, int(at_s))}
        events.append({"type": "totals", "at_s": at_s, **sums})
    old, new = before.operators, after.operators
    events += [{"type": "move", **row} for row in new.get("moves", ()) if row not in old.get("moves", ())]
    if new.get("scale") is not None and new["scale"] != old.get("scale"):
        events.append({"type": "scale", **new["scale"]})
    events += [
        {"type": field, "at_s": at_s, field: new[field]}
        for field in ("configuration", "ingresses_heard")
        if field in new and new[field] != old.get(field)
    ]
    return events


class View:
    """A viewer's picture, its latest decisions, and all of its watchers."""

    def __init__(self, viewer: str | None, facts: Facts) -> None:
        self.viewer = viewer
        self.watchers: set[Watcher] = set()
        self._about = facts.about
        self._picture = picture_of(facts, viewer)
        self._latest: dict[str, deque[ReplicaRow]] = {kind: deque(maxlen=RECENT_DECISIONS) for kind in _MANY}
        self._new: Counter[str] = Counter()

    def snapshot(self, at_s: float) -> ReplicaRow:
        """Return the snapshot event."""
        operator, picture = self.viewer is None, self._picture
        return {
            "type": "snapshot",
            "at_s": at_s,
            "viewer": "operator" if operator else "tenant",
            "tenant": self.viewer,
            **self._about,
            "replicas": list(picture.replicas.values()),
            "prefixes": list(picture.nodes.values()),
            "totals": picture.totals,
            "figures": list(picture.figures.values()),
            "minute": figure_of(picture.minute, int(at_s)),
            "incidents": picture.incidents,
            **{name: list(self._latest[kind]) for kind, name in _MANY.items()},
            **picture.operators,
        }

    def update(self, facts: Facts, at_s: float) -> None:
        """Replace the facts, and send the changes to the watchers."""
        before, self._picture, self._about = self._picture, picture_of(facts, self.viewer), facts.about
        events = difference(before, self._picture, at_s)
        skipped = {_MANY[kind]: number - DECISIONS_A_LOOK for kind, number in self._new.items()}
        if any(number > 0 for number in skipped.values()):
            shown = {name: number for name, number in skipped.items() if number > 0}
            events.append({"type": "skipped", "at_s": at_s, **shown})
        self._new.clear()
        self._send(events)

    def tell(self, occurrences: Iterable[Occurrence]) -> None:
        """Send the events that the viewer may see to the watchers."""
        for occurrence in occurrences:
            body = visible(occurrence, self.viewer)
            if body is None:
                continue
            if occurrence.type in self._latest:
                self._latest[occurrence.type].append(body)
                self._new[occurrence.type] += 1
                if self._new[occurrence.type] > DECISIONS_A_LOOK:
                    continue
            self._send([body])

    def _send(self, bodies: Iterable[ReplicaRow]) -> None:
        for event in map(encoded, bodies):
            for watcher in self.watchers:
                watcher.offer(event)


def encoded(body: Mapping[str, Any]) -> LiveEvent:
    """Return an event in its wire form."""
    return LiveEvent(body["type"], msgspec.json.encode(body))
