"""A replica's joining and leaving, in its loop: pre-warm at its start; hand-over and end of streams at its stop.

``Departure`` detects the stop: the replica's own router still lists its peers, but no longer the replica itself. Serve
reports it only after the last stream.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

from ray import serve

from serve_app import notices
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import Engine
from serve_app.ray_compat import own_deployment
from serve_app.replica.adapter_loader import ReplicaAdapters
from serve_app.replica.lifecycle.handover import HandOver, MoveMeters, Receipt
from serve_app.replica.lifecycle.prewarm import Prewarm
from serve_app.replica.peers import Peers
from serve_app.replica.running_calls import RunningCalls

MISSING_S = 1.0
"""A replica that is missing for this long leaves; a shorter absence has other reasons."""

NOTICED_S = 0.3
"""Upper limit, on an idle machine, of the time from the decision until routers know it."""


@dataclass(eq=False)
class Departure:
    """Watches for this replica's absence among the running ones.

    ``leave`` gets the loop's time of the decision; ``stay`` is called if the replica runs again after that.
    """

    replica_id: str
    leave: Callable[[float], None]
    stay: Callable[[], None]
    loop: asyncio.AbstractEventLoop
    leaving: bool = False
    _seen: bool = False
    _missing_since_s: float | None = None
    _reconfiguring: int = 0
    _stopped: bool = False

    def heard(self, names: Set[str]) -> None:
        """Note the running replicas (any thread)."""
        self.loop.call_soon_threadsafe(self._heard, self.replica_id in names)

    @contextmanager
    def reconfiguring(self) -> Iterator[None]:
        """Wrap a ``reconfigure``: Serve removes a replica from the routers meanwhile, though it stays."""
        self._reconfiguring += 1
        try:
            yield
        finally:
            self._reconfiguring -= 1
            if self._missing_since_s is not None:
                self._missing_since_s = self.loop.time()

    def stopped(self) -> None:
        """Note that Serve stops this replica: it leaves now if it has not yet, and ignores later reports."""
        self._stopped = True
        if not self.leaving:
            self._begin()

    def _begin(self) -> None:
        """Leave. The decision's time is that when this replica was first missing, or now if it never was."""
        self.leaving = True
        missing_since_s = self.loop.time() if self._missing_since_s is None else self._missing_since_s
        self.leave(missing_since_s - NOTICED_S)

    def _heard(self, present: bool) -> None:
        if self._stopped:
            return
        if present:
            self._seen, self._missing_since_s = True, None
            if self.leaving:
                self.leaving = False
                self.stay()
        elif self._seen and self._missing_since_s is None:  # a starting replica is missing until it was seen once
            self._missing_since_s = self.loop.time()
            self.loop.call_later(MISSING_S, self._look)

    def _look(self) -> None:
        if self._missing_since_s is None or self.leaving:
            return
        if self._reconfiguring or self.loop.time() - self._missing_since_s < MISSING_S:
            self.loop.call_later(MISSING_S, self._look)
            return
        self._begin()


logger = logging.getLogger(__name__)

KEPT_S = 2.0
"""Reserve of the time that Serve gives a replica to stop: for the last receipt and the engine's end."""

POST_S = 1.0
"""Limit for posting a receipt on the board; neither start nor stop waits longer."""

STREAMS_END_S = 5.0
"""Streams still running this long before the kill continue elsewhere. Serve may notice the last end after 2 s."""


@dataclass(eq=False)
class Lifecycle:
    """The lifecycle of one replica. ``running``: its streams, which continue elsewhere at the end of its time."""

    config: AppConfig
    engine: Engine
    adapters: ReplicaAdapters
    peers: Peers
    running: RunningCalls
    meters: MoveMeters
    _deadline_s: float = float("inf")
    _task: asyncio.Task[bool | None] | None = None
    _alarm: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        context = serve.get_replica_context()
        self._board = notices.board_name(context.app_name, context.deployment)
        self._replica_id: str = context.replica_id.unique_id
        self._loop = asyncio.get_running_loop()
        self.departure = Departure(self._replica_id, self._leave, self._stay, self._loop)
        self.peers.running.listen(self.departure.heard)

    async def join(self) -> None:
        """Copy the hottest prefixes of peers; returns within the budget, and at once if there are no peers."""
        config = self.config
        names = self._names()
        if not (config.prewarm and config.enable_prefix_caching and names):
            return
        prewarm = Prewarm(self.engine, self.peers, self.adapters.load, config)
        self.meters.joined = receipt = await prewarm.run(names)
        logger.info("pre-warm: %s", receipt.to_json())
        await self._post("prewarm", receipt)

    async def finish(self) -> None:
        """Hand over the rest after the last stream, while there is time."""
        self.departure.stopped()
        assert self._alarm is not None and self._task is not None
        self._alarm.cancel()
        if not await self._task:
            return
        left_s = self._left_s()
        if left_s > 0:
            await self._handover.run(self._names(), left_s)
        self._receipt.state = "done"
        logger.info("hand-over: %s", self._receipt.to_json())
        await self._post("handover", self._receipt)

    def _leave(self, decided_s: float) -> None:
        """Begin to hand over while streams run."""
        timeout_s = own_deployment().graceful_shutdown_timeout_s
        self._deadline_s = decided_s + timeout_s
        self._alarm = self._loop.call_at(
            max(self._loop.time(), self._deadline_s - STREAMS_END_S), self.running.break_off
        )
        self._receipt = Receipt()
        size = self.config.block_size
        self._handover = HandOver(self.engine, self.peers, size, lambda: bool(self.running), self._receipt)
        self._task = self._loop.create_task(self._hand_over())

    def _stay(self) -> None:
        """Continue running after an absence that looked like a stop."""
        self.running.closed = False
        assert self._alarm is not None and self._task is not None
        self._alarm.cancel()
        self._task.cancel()
        self._receipt.state = "returned"
        self._task = self._loop.create_task(self._post("handover", self._receipt))

    async def _hand_over(self) -> bool:
        """Return whether there is anything to hand over, and a peer to take it. Without that it is said, too.

        Else a replica that stops, such as the last one of a model at zero, would look like one that died.
        """
        names = self._names()
        if not (self.config.handover and self.config.enable_prefix_caching and names):
            self._receipt.state = "done"
            await self._post("handover", self._receipt)
            return False
        logger.info("this replica is being stopped; it hands over to %d peers", len(names))
        await self._handover.run(names, self._left_s())
        await self._post("handover", self._receipt)
        return True

    def _names(self) -> Sequence[str]:
        return sorted(self.peers.running.names - {self._replica_id})

    def _left_s(self) -> float:
        return self._deadline_s - KEPT_S - self._loop.time()

    async def _post(self, kind: str, receipt: Receipt) -> None:
        notice = {"replica_id": self._replica_id, **receipt.to_json()}
        try:
            async with asyncio.timeout(POST_S):
                await asyncio.to_thread(notices.post, self._board, kind, self._replica_id, notice)
        except Exception:
            logger.warning("the %s of this replica could not be posted", kind, exc_info=True)
