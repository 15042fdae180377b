"""An ingress' event stream: each first token; replicas, prefixes and other ingresses' decisions once a second.

Without watchers, only the table of prefixes and the figures are updated. One event loop makes all calls.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.background import run_in_background
from router.core import RoutingCore
from router.protocol.block_hash import HASH_BYTES
from router.protocol.request import Decision, RoutedRequest
from serve_app.engine.protocol import EngineRequest, FirstToken
from serve_app.errors import LimitReason, RateLimited
from serve_app.live.journal import Journal, refusal_row
from serve_app.live.prefixes import Answered, NodeRows, PrefixTable, decision_row, node_rows
from serve_app.live.replicas import Activity, ReplicaRow, Roster, came_and_went, replica_rows
from serve_app.live.tally import BUCKETS, Rings, Tally, Total, joined
from serve_app.live.view import (
    Facts,
    LiveEvent,
    NoticesByKind,
    Occurrence,
    View,
    Watcher,
    encoded,
    handed_over,
)

logger = logging.getLogger(__name__)

LOOK_S = 1.0
BOARD_S = 2.0
"""The interval between two reads of the notice board, and the timeout of one: it is read over the network."""
LEASE_S = 5.0

MAX_TENANT_WATCHERS = 4
MAX_OPERATOR_WATCHERS = 16
KEPT_EVENTS = 2048
"""The limit of events kept for other ingresses, which ask once a second."""

KEPT_INCIDENTS = 32
"""The limit of events about replicas and caches that are kept for later watchers."""

ASK_TIMEOUT_S = 2.0
FRESH_BUCKETS = 3
"""The buckets of figures for an ingress that already has the earlier ones."""
FAILURES = 2
"""The failures in a row after which the others count as silent. A single one may come from a stopping ingress."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One ingress' answer to another: its current state, and ``news``, the last of which has this ``number``."""

    ingress: str
    number: int
    news: Sequence[Occurrence]
    rows: NodeRows
    totals: Mapping[str, Total]
    figures: Rings


class Others:
    """The other ingresses. ``batches``: the latest of each; ``figures``: all known ones of each."""

    def __init__(self, name: str, ingresses: Callable[..., Awaitable[list[Any]]]) -> None:
        """``name``: this ingress; ``ingresses``: calls a method of every ingress, and returns [] if there is one."""
        self.batches: Sequence[Batch] = ()
        self.figures: dict[str, Rings] = {}
        self._name = name
        self._ingresses = ingresses
        self._failures = 0

    @property
    def heard(self) -> int | None:
        """The number of ingresses that answer, including this one, or None if the others cannot be asked."""
        return None if self._failures >= FAILURES else 1 + len(self.batches)

    async def ask(self) -> list[Occurrence]:
        """Ask the other ingresses, and return their new events, or none if they cannot be asked."""
        numbers = {batch.ingress: batch.number for batch in self.batches}
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                batches: list[Batch] = await self._ingresses("recent_events", numbers, timeout_s=ASK_TIMEOUT_S)
        except Exception:
            logger.debug("the other ingresses did not send their events", exc_info=True)
            self._failures += 1
            return []
        self._failures = 0
        self.batches = [batch for batch in batches if batch.ingress != self._name]
        before = self.figures
        self.figures = {batch.ingress: joined(before.get(batch.ingress, {}), batch.figures) for batch in self.batches}
        return [occurrence for batch in self.batches for occurrence in batch.news]


class _Seen:
    """The data read since the first watcher came."""

    def __init__(self, others: Others) -> None:
        self.facts = Facts()
        self.looked_s: float | None = None
        self.board: NoticesByKind = {}
        self.board_s: float | None = None
        self.others = others
        self.activity = Activity()


@dataclass(eq=False)
class Live:
    """One ingress' events for all of its watchers. ``viewer`` is a tenant's name, or None for an operator.

    ``about``: returns a snapshot's facts about the instance; ``read_board``: returns notices by kind, and blocks;
    ``ingresses``: see ``Others``; ``counts``: those of this ingress, to which dropped events are added. ``journal``:
    keeps requests for later readers.
    """

    name: str
    core: RoutingCore
    table: PrefixTable
    about: Callable[[], ReplicaRow]
    read_board: Callable[[], NoticesByKind]
    ingresses: Callable[..., Awaitable[list[Any]]]
    counts: Tally = field(default_factory=Tally)
    journal: Journal | None = None
    _views: dict[str | None, View] = field(default_factory=dict)
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _task: asyncio.Task[None] | None = None
    _leased_until_s: float = 0.0
    _kept: deque[Occurrence] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    _number: int = 0
    _closed: bool = False
    _roster: Roster = field(default_factory=Roster)
    _incidents: deque[ReplicaRow] = field(default_factory=lambda: deque(maxlen=KEPT_INCIDENTS))
    _rates: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seen = _Seen(Others(self.name, self.ingresses))

    @property
    def watchers(self) -> int:
        """The number of open streams."""
        return sum(len(view.watchers) for view in self._views.values())

    def delivered(
        self,
        generation: EngineRequest,
        decision: Decision,
        first: FirstToken,
        ttft_s: float,
    ) -> None:
        """Record a generation's first token. Never raises."""
        self.answered(
            Answered(
                generation.request_id,
                generation.tenant,
                generation.block_hashes,
                len(generation.token_ids),
                first.cached_tokens,
                ttft_s,
                decision,
                public_blocks=generation.scope.public_blocks,
                system_tokens=generation.system_tokens,
                label=generation.prompt_ref,
                pinned=first.save is not None and not first.save.refused,
            )
        )

    def answered(self, answered: Answered) -> None:
        """Record a request's first token. Never raises."""
        try:
            at_s = time.time()
            key = self.table.add(answered, at_s)
            if self.journal is None and not self._watched():
                return
            body = decision_row(answered, key, self._rates.get(answered.decision.replica_id))
            done = Occurrence("decision", round(at_s, 3), answered.tenant, {"ingress": self.name, **body})
            if self.journal is not None:
                self.journal.add(answered.tenant, {"type": done.type, "at_s": done.at_s, **done.body})
            if self._watched():
                self._tell(done)
        except Exception:
            logger.exception("a first token is missing from the event stream")

    def refused(self, tenant: str, reason: LimitReason) -> None:
        """Record a request that a limit refused."""
        if self._watched():
            self._tell(Occurrence("refusal", _now_s(), tenant, {"ingress": self.name, **refusal_row(tenant, reason)}))

    def missed(self, generation: EngineRequest, facts: Mapping[str, Any]) -> None:
        """Record a miss that its client can avoid, the first of its session."""
        if self._watched():
            body = {"request": generation.request_id, "tenant": generation.tenant, **facts}
            self._tell(Occurrence("miss", _now_s(), generation.tenant, body))

    def reset(self, *, complete: bool) -> None:
        """Record a reset of all caches. ``complete``: whether every replica confirmed it."""
        self.table.forget_pins()
        at_s, body = _now_s(), {"complete": complete}
        self._incidents.append({"type": "reset", "at_s": at_s, **body})
        if self._watched():
            self._tell(Occurrence("reset", at_s, None, body))

    async def snapshot(self, viewer: str | None) -> ReplicaRow:
        """Return a viewer's snapshot."""
        await self._look(LOOK_S)
        view = self._views.get(viewer) or View(viewer, self._seen.facts)
        return view.snapshot(_now_s())

    async def watch(self, viewer: str | None) -> Watcher:
        """Return a new watcher, with a snapshot in its queue. ``leave`` removes it. Raises RateLimited."""
        self._refuse_many(viewer)
        await self._look(LOOK_S)
        self._refuse_many(viewer)
        view = self._views.setdefault(viewer, View(viewer, self._seen.facts))
        watcher = Watcher()
        view.watchers.add(watcher)
        watcher.offer(encoded(view.snapshot(_now_s())))
        if self._closed:
            watcher.end("stopping")
        if self._task is None:
            self._task = run_in_background(self._run)
        return watcher

    def leave(self, viewer: str | None, watcher: Watcher) -> None:
        """Remove a watcher. After the last one, the work for watchers stops."""
        view = self._views.get(viewer)
        if view is None or watcher not in view.watchers:
            return
        view.watchers.discard(watcher)
        if not view.watchers:
            del self._views[viewer]
        if not self._views and self._task is not None:
            self._task.cancel()
            self._task = None
            self._seen = _Seen(Others(self.name, self.ingresses))
            self._watched()

    def resync(self, viewer: str | None, watcher: Watcher) -> list[LiveEvent]:
        """Return the events for a watcher that lost some: their number, and a new snapshot."""
        dropped, watcher.dropped = watcher.dropped, 0
        self.counts.add("warmpath_dropped_events_total", dropped)
        snapshot = self._views[viewer].snapshot(_now_s())
        return [encoded({"type": "dropped", "at_s": snapshot["at_s"], "events": dropped}), encoded(snapshot)]

    def close(self) -> None:
        """End all streams, because the server stops."""
        self._closed = True
        for view in self._views.values():
            for watcher in view.watchers:
                watcher.end("stopping")

    def recent(self, numbers: Mapping[str, int]) -> Batch:
        """Return the events after ``numbers`` (by ingress), and keep later ones for the ingress that asks."""
        self._leased_until_s = time.monotonic() + LEASE_S
        self._learn_rates(self.core.state())
        new = min(self._number - numbers.get(self.name, self._number), len(self._kept))
        news = list(self._kept)[len(self._kept) - new :]
        figures = joined(self.counts.rings, {}, FRESH_BUCKETS if self.name in numbers else BUCKETS)
        return Batch(self.name, self._number, news, self._rows(), self.counts.totals(), figures)

    def _watched(self) -> bool:
        """Return whether events have a receiver. Drop the events kept for other ingresses if none asks any more."""
        leased = time.monotonic() < self._leased_until_s
        if not leased:
            self._kept.clear()
        return leased or bool(self._views)

    def _refuse_many(self, viewer: str | None) -> None:
        most = MAX_OPERATOR_WATCHERS if viewer is None else MAX_TENANT_WATCHERS
        view = self._views.get(viewer)
        if view is not None and len(view.watchers) >= most:
            raise RateLimited(
                f"There are already {most} event streams of this viewer; close one first.",
                code="too_many_streams",
                retry_after_s=5.0,
                reason=LimitReason("ingress", "event_streams", len(view.watchers), most),
            )

    def _tell(self, occurrence: Occurrence) -> None:
        self._number += 1
        self._kept.append(occurrence)
        for view in self._views.values():
            view.tell((occurrence,))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._look(0.0)

    async def _look(self, fresh_s: float) -> None:
        """Update the facts unless they are younger than ``fresh_s``, and send the changes to all watchers."""
        async with self._looking:
            now_s, looked_s = time.monotonic(), self._seen.looked_s
            if looked_s is not None and now_s - looked_s < fresh_s:
                return
            news, _ = await asyncio.gather(self._seen.others.ask(), self._look_at_board(now_s))
            seen = self._seen
            watched, seen.looked_s = seen.looked_s is not None, time.monotonic()
            state, stats, about = self.core.state(), self.core.stats(), self.about()
            reports = {replica_id: report.samples for replica_id, report in stats.items()}
            self._learn_rates(state)
            rows = replica_rows(state["replicas"], reports, about)
            self._roster.note(rows, handed_over(seen.board), seen.looked_s)
            at_s = _now_s()
            if watched:  # earlier joins and leaves were not observed
                self._incidents.extend(came_and_went(seen.facts.replicas, rows, at_s))
            seen.facts = Facts(
                about,
                rows,
                [self._rows(), *(batch.rows for batch in seen.others.batches)],
                [self.counts.totals(), *(batch.totals for batch in seen.others.batches)],
                [self.counts.rings, *seen.others.figures.values()],
                seen.board,
                tuple(self._incidents),
                seen.others.heard,
                at_s,
            )
            done = [Occurrence(kind, at_s, None, body) for kind, body in seen.activity.look(reports, seen.looked_s)]
            for view in self._views.values():
                view.update(seen.facts, at_s)
                view.tell((*done, *news))

    async def _look_at_board(self, now_s: float) -> None:
        if self._seen.board_s is None or now_s - self._seen.board_s >= BOARD_S:
            self._seen.board_s = now_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BOARD_S):
                    self._seen.board = await asyncio.to_thread(self.read_board)

    def _learn_rates(self, state: Mapping[str, Any]) -> None:
        self._rates = {row["replica_id"]: row["prefill_tokens_per_s"] for row in state["replicas"]}

    def _rows(self) -> NodeRows:
        return node_rows(self.table, self._holders)

    def _holders(self, chain: bytes) -> Mapping[str, int]:
        tokens = len(chain) // HASH_BYTES * self.table.block_size
        return self.core.holders(RoutedRequest("", chain, tokens + 1, b""))


def _now_s() -> float:
    return round(time.time(), 3)
