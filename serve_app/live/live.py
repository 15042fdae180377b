"""An ingress' event stream: hears of each first token, looks at replicas and prefixes once a second, tells watchers.

With nobody watching nothing is made and nothing runs but the table of prefixes. All calls are of one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from router.core import RoutingCore
from router.protocol.block_hash import HASH_BYTES
from router.protocol.request import Decision, RoutedRequest
from serve_app.engine.protocol import SaveResult
from serve_app.errors import RateLimited
from serve_app.generation.generation import Generation
from serve_app.live.nodes import NodeRows
from serve_app.live.peers import LEASE_S, Batch, Cursors, Peers
from serve_app.live.prefix_table import PrefixTable, node_id
from serve_app.live.replicas import Activity, Row, replica_rows
from serve_app.live.view import Facts, Told, View, encoded
from serve_app.live.watcher import Event, Watcher

logger = logging.getLogger(__name__)

LOOK_S = 1.0
BOARD_S = 2.0
"""Between two looks at the notice board, and how long one may take: it is asked over the network."""

MAX_TENANT_WATCHERS = 4
MAX_OPERATOR_WATCHERS = 16
KEPT_EVENTS = 2048
"""For other ingresses, which ask once a second."""

SHOWN_MOVES = 16

LIVE_NOTICES = ("autoscaling", "handover", "prewarm")
"""The kinds of notices that are told."""

Board = Mapping[str, list[dict[str, Any]]]


class Live:
    """What one ingress' watchers see. ``viewer`` is a tenant's name, None an operator.

    ``name``: this ingress; ``about``: of the instance, for snapshots (model, engine, ...); ``read_board``: returns
    notices by kind, and blocks; ``count_dropped`` is called with numbers of events.
    """

    def __init__(
        self,
        name: str,
        core: RoutingCore,
        table: PrefixTable,
        about: Callable[[], Row],
        read_board: Callable[[], Board],
        peers: Peers,
        *,
        count_dropped: Callable[[int], None] = lambda _: None,
        clock_s: Callable[[], float] = time.monotonic,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._name = name
        self._core = core
        self._table = table
        self._about = about
        self._read_board = read_board
        self._peers = peers
        self._count_dropped = count_dropped
        self._clock_s = clock_s
        self._now_s = now_s
        self._views: dict[str | None, View] = {}
        self._looking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._leased_until_s = 0.0
        self._kept: deque[Told] = deque(maxlen=KEPT_EVENTS)
        self._number = 0
        self._closed = False
        self._facts = Facts()
        self._facts_s: float | None = None
        self._board: Board = {}
        self._board_s: float | None = None
        self._activity = Activity()
        self._rows = NodeRows(table, self._holders)
        self._rates: dict[str, float] = {}

    @property
    def watchers(self) -> int:
        """How many streams there are."""
        return sum(len(view.watchers) for view in self._views.values())

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing is kept for anybody, but the table."""
        return self._task is None and not self._views and not self._kept

    def delivered(
        self,
        generation: Generation,
        decision: Decision,
        cached_tokens: int,
        ttft_s: float,
        save: SaveResult | None,
    ) -> None:
        """Hear of a generation's first token. Never raises."""
        try:
            at_s = self._now_s()
            public_blocks = generation.scope.public_blocks
            key = self._table.add(
                generation.tenant,
                generation.block_hashes,
                len(generation.token_ids),
                cached_tokens,
                at_s,
                public_blocks=public_blocks,
                system_tokens=generation.system_tokens,
                label=generation.prompt_ref,
                pinned=save is not None and save.outcome in ("saved", "present"),
            )
            if self._views or self._leased_until_s:
                self._tell(self._told_of(generation, decision, cached_tokens, ttft_s, key, at_s))
        except Exception:
            logger.exception("a first token is not in the event stream")

    def reset(self, *, complete: bool) -> None:
        """Hear that the caches were told to forget everything."""
        self._table.forget_pins()
        if self._views or self._leased_until_s:
            self._tell(Told("reset", round(self._now_s(), 3), None, {"complete": complete}))

    async def snapshot(self, viewer: str | None) -> Row:
        """Return what a viewer sees now."""
        await self._look(LOOK_S)
        view = self._views.get(viewer) or View(viewer, self._facts)
        return view.snapshot(self._at_s())

    async def watch(self, viewer: str | None) -> Watcher:
        """Return a new watcher, for which a snapshot waits; ``leave`` ends it. Raises RateLimited."""
        self._refuse_many(viewer)
        await self._look(LOOK_S)
        self._refuse_many(viewer)
        view = self._views.get(viewer)
        if view is None:
            view = self._views[viewer] = View(viewer, self._facts)
        watcher = Watcher(self._clock_s)
        view.watchers.add(watcher)
        watcher.offer(encoded(view.snapshot(self._at_s())))
        if self._closed:
            watcher.end("stopping")
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return watcher

    def leave(self, viewer: str | None, watcher: Watcher) -> None:
        """End a watcher; with the last one all else ends."""
        view = self._views.get(viewer)
        if view is None or watcher not in view.watchers:
            return
        view.watchers.discard(watcher)
        if not view.watchers:
            del self._views[viewer]
        if not self._views and self._task is not None:
            self._task.cancel()
            self._task = None
            self._forget()
            if not self._leased_until_s:
                self._kept.clear()

    def resync(self, viewer: str | None, watcher: Watcher) -> list[Event]:
        """Return what a watcher that has lost events is told, and what it goes on from."""
        dropped, watcher.dropped = watcher.dropped, 0
        self._count_dropped(dropped)
        snapshot = self._views[viewer].snapshot(self._at_s())
        return [encoded({"type": "dropped", "at_s": snapshot["at_s"], "events": dropped}), encoded(snapshot)]

    def close(self) -> None:
        """End all streams: the server stops."""
        self._closed = True
        for view in self._views.values():
            for watcher in view.watchers:
                watcher.end("stopping")

    def recent(self, cursors: Cursors) -> Batch:
        """Tell another ingress what is new here, and keep what comes for it for a while."""
        now_s = self._clock_s()
        if not self._leased_until_s:
            asyncio.get_running_loop().call_later(LEASE_S, self._end_lease)
        self._leased_until_s = now_s + LEASE_S
        number, version = cursors.get(self._name, (self._number, 0))
        self._rows.refresh()
        self._learn_rates(self._core.state())
        new = min(self._number - number, len(self._kept))
        return Batch(
            self._name,
            self._number,
            self._rows.version,
            list(self._kept)[len(self._kept) - new :],
            self._rows.since(version),
            list(self._rows.rows),
            self._totals(),
        )

    def _end_lease(self) -> None:
        left_s = self._leased_until_s - self._clock_s()
        if left_s > 0.0:
            asyncio.get_running_loop().call_later(left_s, self._end_lease)
            return
        self._leased_until_s = 0.0
        self._kept.clear()
        if not self._views:
            self._forget()

    def _refuse_many(self, viewer: str | None) -> None:
        most = MAX_OPERATOR_WATCHERS if viewer is None else MAX_TENANT_WATCHERS
        view = self._views.get(viewer)
        if view is not None and len(view.watchers) >= most:
            raise RateLimited(
                f"There are {most} event streams with this key's view already; close one first.",
                code="too_many_streams",
                retry_after_s=5.0,
            )

    def _tell(self, told: Told) -> None:
        self._number += 1
        if self._leased_until_s:
            self._kept.append(told)
        for view in self._views.values():
            view.tell((told,))

    def _told_of(
        self, generation: Generation, decision: Decision, cached_tokens: int, ttft_s: float, key: bytes, at_s: float
    ) -> Told:
        rate = self._rates.get(decision.replica_id)
        body = {
            "request": generation.request_id,
            "tenant": generation.tenant,
            "ingress": self._name,
            "replica": decision.replica_id,
            "reason": decision.reason,
            "node": node_id(generation.tenant, key) if key else None,
            "prompt_tokens": len(generation.token_ids),
            "best_cached_tokens": decision.best_cached_tokens,
            "selected_cached_tokens": decision.selected_cached_tokens,
            "cached_tokens": cached_tokens,
            "pull_from": decision.pull_from or None,
            "pull_tokens": decision.pull_tokens,
            "queued_tokens": decision.queued_tokens,
            "estimated_ttft_s": round(decision.estimated_ttft_s, 6),
            "ttft_s": round(ttft_s, 6),
            "cold_ttft_s": round(ttft_s + cached_tokens / rate, 6) if rate else None,
        }
        return Told("decision", round(at_s, 3), generation.tenant, body)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look(0.0)
            except Exception:
                logger.exception("watchers do not see what has changed")

    async def _look(self, fresh_s: float) -> None:
        """Bring the facts up to date, unless they are younger than ``fresh_s``, and tell all watchers."""
        async with self._looking:
            now_s = self._clock_s()
            if self._facts_s is not None and now_s - self._facts_s < fresh_s:
                return
            heard, _ = await asyncio.gather(self._peers.ask(), self._look_at_board(now_s))
            self._facts_s = self._clock_s()
            state, stats = self._core.state(), self._core.stats()
            reports = {replica_id: report.samples for replica_id, report in stats.items()}
            about = self._about()
            self._learn_rates(state)
            self._rows.refresh()
            self._facts = Facts(
                about,
                replica_rows(state["replicas"], reports, about),
                [self._rows.rows, *self._peers.rows],
                [self._totals(), *self._peers.totals],
                _moves(self._board),
                next(iter(self._board.get("autoscaling", ())), None),
            )
            at_s = self._at_s()
            done = [Told(kind, at_s, None, body) for kind, body in self._activity.look(reports, self._facts_s)]
            for view in self._views.values():
                view.update(self._facts, at_s)
                view.tell((*done, *heard))

    async def _look_at_board(self, now_s: float) -> None:
        if self._board_s is not None and now_s - self._board_s < BOARD_S:
            return
        self._board_s = now_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BOARD_S):
                self._board = await asyncio.to_thread(self._read_board)

    def _learn_rates(self, state: Mapping[str, Any]) -> None:
        self._rates = {each["replica_id"]: each["prefill_tokens_per_s"] for each in state["replicas"]}

    def _totals(self) -> dict[str, tuple[int, int, int]]:
        return {
            tenant: (room.requests, room.prompt_tokens, room.cached_tokens)
            for tenant, room in self._table.rooms.items()
        }

    def _forget(self) -> None:
        """Begin without anything that was looked at."""
        self._peers.forget()
        self._facts, self._facts_s = Facts(), None
        self._board, self._board_s = {}, None
        self._activity = Activity()
        self._rows = NodeRows(self._table, self._holders, self._rows.version)  # others remember the version
        self._rates = {}

    def _holders(self, chain: bytes) -> Mapping[str, int]:
        tokens = len(chain) // HASH_BYTES * self._table.block_size
        return self._core.holders(RoutedRequest("", chain, tokens + 1, b""))

    def _at_s(self) -> float:
        return round(self._now_s(), 3)


def _moves(board: Board) -> list[Row]:
    """Return the latest joins and leaves, the oldest first."""
    rows = [
        {"kind": kind, "replica": notice["replica_id"], **{k: v for k, v in notice.items() if k != "replica_id"}}
        for kind in ("prewarm", "handover")
        for notice in board.get(kind, ())
    ]
    return sorted(rows, key=lambda row: row["at_s"])[-SHOWN_MOVES:]
