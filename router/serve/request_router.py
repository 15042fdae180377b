"""The Serve adapter: Ray Serve's RequestRouter hooks around a RoutingCore.

It maps Serve's replicas to the core's replica ids, and owns this loop's FeedSubscriber. It computes no scores and waits
for no remote call. It routes calls with a ``RoutedRequest`` as first argument; the replica receives it with the
router's ``decision``. Replicas call each other by ``target``. While no replica accepts more, requests wait in
``WaitQueue``: tenants take turns, and one request at a time asks again.
"""

import asyncio
import logging
import time
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from msgspec import structs
from ray.serve import get_replica_context
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from router.feed import FeedEndpoint, FeedSubscriber
from router.protocol.events import Event
from router.protocol.request import Decision, NoReplicaLeft, RoutedRequest
from router.protocol.version import WIRE_VERSION, mixes, version_of
from router.serve.core_registry import core_for, decisions_for, running_replicas
from router.settings import RouterSettings

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Waiter:
    order: float
    arrival_s: float
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False


class WaitQueue:
    """A queue for one event loop. ``pause`` waits for the next attempt, given the number of attempts so far.

    ``waited`` gets the seconds of each wait that ended with a result. ``over_s``: requests that came by then wait no
    longer, in any place of the queue; ``clock`` tells when they came.
    """

    def __init__(
        self,
        pause: Callable[[int], Awaitable[None]],
        waited: Callable[[float], None] = lambda _: None,
        over_s: Callable[[], float] = lambda: -inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pause = pause
        self._waited = waited
        self._over_s = over_s
        self._clock = clock
        self._lines: OrderedDict[str, deque[_Waiter]] = OrderedDict()
        self._by_arrival: dict[_Waiter, None] = {}
        self._asking: _Waiter | None = None

    async def take(self, choose: Callable[[], T | None], tenant: str = "", order: int = 0, *, ahead: bool = False) -> T:
        """Return the result of ``choose`` once it is not None. ``ahead``: before all others, for a retry.

        A tenant's requests are sorted by ``order``, lowest first, then by arrival. Raises NoReplicaLeft once its wait
        is over.
        """
        if not self._lines or ahead:
            result = choose()
            if result is not None:
                return result
        place = _Waiter(-inf if ahead else order, self._clock())
        line = self._lines.setdefault(tenant, deque())
        if ahead:
            line.appendleft(place)
            self._lines.move_to_end(tenant, last=False)
        else:
            insort(line, place, key=attrgetter("order"))
        self._by_arrival[place] = None
        self._asking = self._first()
        try:
            attempt = 0
            while True:
                while self._asking is not place and not place.over:
                    await place.woken.wait()
                    place.woken.clear()
                if self._asking is place:
                    result = choose()
                    if result is not None:
                        self._lines.move_to_end(tenant)
                        self._waited(self._clock() - place.arrival_s)
                        return result
                    self._end_waits()
                if place.over:
                    raise NoReplicaLeft("no replica came in time")
                await self._pause(attempt)
                attempt += 1
        finally:
            line.remove(place)
            del self._by_arrival[place]
            if not line:
                del self._lines[tenant]
            if self._asking is place:
                self._asking = self._first()
                if self._asking is not None:
                    self._asking.woken.set()

    def _end_waits(self) -> None:
        """End the waits that are over. Only one request asks, but each one has its own time."""
        over_s = self._over_s()
        for place in self._by_arrival:
            if place.arrival_s > over_s:
                return
            place.over = True
            place.woken.set()

    def _first(self) -> _Waiter | None:
        return next(iter(self._lines.values()))[0] if self._lines else None


logger = logging.getLogger("ray.serve")

FEED_METADATA = "feed"
"""The key of ``record_replica_metadata()`` under which a replica advertises ``FeedEndpoint`` as a dict."""


AWAY_S = 10.0
"""The time for which a replica that left the set is remembered. A replica that applies new settings leaves the set
temporarily but keeps its cache. A replica that leaves for good can supply KV until it stops."""

LOOK_S = 0.1
"""The interval between looks for the end of a wait while there is no replica."""


def deployment_key(app_name: str, deployment_name: str) -> str:
    """Return the key under which ``core_for`` finds the core of a Serve deployment in this process."""
    return f"{app_name}#{deployment_name}"


class CacheAwareRouter(RequestRouter):  # type: ignore[misc]
    """Sends each request to the replica that RoutingCore chooses. JSON configures it (``RouterSettings.from_json``)."""

    def initialize_state(self, **settings: Any) -> None:
        """Apply the ``request_router_kwargs`` of the deployment."""
        key = deployment_key(self._deployment_id.app_name, self._deployment_id.name)
        self._core = core_for(key, RouterSettings.from_json(settings))
        self._decisions = decisions_for(key)
        self._running = running_replicas(key)
        self._subscriber: FeedSubscriber | None = None
        self._by_name: dict[str, RunningReplica] = {}  # replaced, never changed: other threads read it
        self._away: dict[str, RunningReplica] = {}
        self._among_peers = _runs_in(self._deployment_id.app_name, self._deployment_id.name)
        self._clock: Callable[[], float] = time.monotonic
        self._wait_queue = WaitQueue(
            self._pause, self._core.counters.wait_s.observe, self._over_s, lambda: self._clock()
        )
        self._none_since_s = inf

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Follow the feeds of new replicas, and forget replicas that leave and do not return within ``AWAY_S``.

        Replicas of a release that does not mix with this one get no call from this process.
        """
        replicas = self._understood(replicas)
        super().update_replicas(replicas)
        before = self._by_name
        self._know({replica.replica_id.unique_id: replica for replica in replicas})
        left = {name: replica for name, replica in before.items() if name not in self._by_name}
        self._away = {name: replica for name, replica in self._away.items() if name not in self._by_name} | left
        for name, replica in left.items():
            self._event_loop.call_later(AWAY_S, self._forget, name, replica)
        if self._among_peers:
            return
        added, _ = self._core.update_replicas(self._by_name, self._away)
        if self._subscriber is None:  # only here does the router surely run in its own loop
            self._subscriber = FeedSubscriber(self._heard, self._core.counters.feed)
            self._core.follow(self._subscriber.is_live, self._full, self._subscriber.resync)
            added = tuple(self._by_name)
        for name in self._by_name.keys() - self._subscriber.replica_ids:
            self._follow(name, self._by_name[name], new=name in added)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Drop a dead replica at once."""
        super().on_replica_actor_died(replica_id)
        name = replica_id.unique_id
        self._know({other: replica for other, replica in self._by_name.items() if other != name})
        self._away.pop(name, None)
        self._core.drop_replica(name)
        self._unfollow(name)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Decide for this request in its own coroutine, because Serve's queue may swap two. Raises NoReplicaLeft.

        A call of one replica by name needs no place, so it does not wait behind those that do.
        """
        route = await self.route_of(pending_request)
        if is_retry:
            self._undo(route)
        tenant, order = ("", 0) if route is None else (route.tenant, route.order)
        ahead = is_retry or pending_request.kwargs.get("target") is not None
        return await self._wait_queue.take(
            lambda: self._choose(pending_request, route, is_retry), tenant, order, ahead=ahead
        )

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank candidates by queue length, one per rank, for callers inside Serve that bypass this router's choice."""
        return [[replica] for replica in sorted(candidate_replicas, key=self._queue_length)]

    async def route_of(self, pending_request: PendingRequest) -> RoutedRequest | None:
        """Return a call's request as a router sees it, or None for a call without a prompt."""
        first = pending_request.args[0] if pending_request.args else None
        return first if isinstance(first, RoutedRequest) else None

    def _choose(
        self, pending_request: PendingRequest, route: RoutedRequest | None, is_retry: bool
    ) -> RunningReplica | None:
        """Return the replica for a request, or None while all are full or there is none that can take it.

        The first attempt of a call with a ``target`` also reaches an away replica. If the target is gone, the call goes
        to any replica, which refuses it. Raises CancelledError if the caller has left.
        """
        target = pending_request.kwargs.get("target")
        if not self._by_name or (target is None and self._core.all_out):
            self._none_since_s = min(self._none_since_s, self._clock())
            return None
        if target is None:
            self._none_since_s = inf
        try:
            if target is not None:
                away = None if is_retry else self._away.get(target)
                return self._by_name.get(target) or away or next(iter(self._by_name.values()), None)
            full = self._full()
            if route is None:
                name = self._core.decide_unkeyed(full)
                return None if name is None else self._by_name[name]
            decision = self._core.decide(route, full)
            if decision is None:
                return None
            if not self._decisions.add(route.request_id, decision):
                self._core.release(decision)
                raise asyncio.CancelledError
            self._decided(route, decision)
            if isinstance(pending_request.args[0], RoutedRequest):  # a router's subclass may read other arguments
                sent = decision if decision.shadow is None else structs.replace(decision, shadow=None)
                pending_request.args = [structs.replace(route, decision=sent), *pending_request.args[1:]]
            return self._by_name[decision.replica_id]
        except Exception:
            self._fault("choosing a replica")
            return min(self._replicas.values(), key=self._queue_length, default=None)

    def _over_s(self) -> float:
        """Return the time of arrival of the requests that have waited for a replica as long as they may.

        A wait counts from the request's own arrival, however long there was no replica before; and while all were full,
        there was one.
        """
        over_s = self._clock() - self._core.settings.no_replica_wait_s
        return over_s if self._none_since_s <= over_s else -inf

    def _decided(self, route: RoutedRequest, decision: Decision) -> None:
        """Handle a decision that a request follows. A hook for routers without reservation numbers in replicas."""

    async def _pause(self, attempt: int) -> None:
        """Wait before the first queued request asks again: longer each time, but not beyond a change of replicas."""
        if self._by_name:
            await self._backoff(attempt)
            return
        self._replicas_updated_event.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):  # wait_for would swallow a simultaneous cancellation
                await self._replicas_updated_event.wait()

    def _understood(self, replicas: list[RunningReplica]) -> list[RunningReplica]:
        """Return the replicas whose messages this release reads, and note the others."""
        versions = {one.replica_id.unique_id: _version_of(one) for one in replicas}
        others = {name: version for name, version in versions.items() if not mixes(version)}
        for name in others.keys() - self._core.other_versions.keys():
            logger.warning(
                "replica %s is not used: its messages have version %d, not %d (docs/how-to/upgrade.md)",
                name, others[name], WIRE_VERSION,
            )  # fmt: skip
        self._core.other_versions = others
        return [one for one in replicas if one.replica_id.unique_id not in others]

    def _heard(self, replica_id: str, events: Iterable[Event]) -> None:
        """Apply one message of a replica's feed, in this router's loop."""
        self._core.apply(replica_id, events)

    def _know(self, by_name: dict[str, RunningReplica]) -> None:
        self._by_name = by_name
        self._running.heard(by_name)

    def _undo(self, route: RoutedRequest | None) -> None:
        """Release the reservation at the replica that has just rejected the request."""
        try:
            decision: Decision | None = None if route is None else self._decisions.take(route.request_id)
            if decision is not None:
                self._core.release(decision)
            self._core.counters.rejected += 1
        except Exception:
            self._fault("releasing a rejected request")

    def _full(self) -> list[str]:
        """Return the replicas that have reached their limit of ongoing requests in Serve's count."""
        queue_length = self._replica_queue_len_cache.get
        return [
            name
            for name, replica in self._by_name.items()
            if (queue_length(replica.replica_id) or 0) >= replica.max_ongoing_requests
        ]

    def _queue_length(self, replica: RunningReplica) -> int:
        return self._replica_queue_len_cache.get(replica.replica_id) or 0

    def _follow(self, name: str, replica: RunningReplica, *, new: bool) -> None:
        advertised = replica.replica_metadata.get(FEED_METADATA)
        assert self._subscriber is not None
        if advertised is None:
            if new:
                logger.info("replica %s advertises no feed; it is routed to by load alone", name)
            return
        try:
            self._subscriber.connect(name, msgspec.convert(advertised, FeedEndpoint))
        except Exception:
            self._fault(f"following the feed of {name}")

    def _forget(self, name: str, replica: RunningReplica) -> None:
        """Forget a replica that left, unless it has returned."""
        if self._away.get(name) is replica:
            del self._away[name]
            self._core.drop_replica(name)
            self._unfollow(name)

    def _unfollow(self, name: str) -> None:
        if self._subscriber is not None:
            self._subscriber.disconnect(name)

    def _fault(self, doing: str) -> None:
        self._core.counters.faults += 1
        logger.exception("cache-aware routing failed at %s", doing)


def _version_of(replica: RunningReplica) -> int:
    """Return the version of a replica's messages. One without a feed sends none that a router reads."""
    advertised = replica.replica_metadata.get(FEED_METADATA)
    return WIRE_VERSION if advertised is None else version_of(advertised)


def _runs_in(app_name: str, deployment_name: str) -> bool:
    """Return whether this process is a replica of that deployment. Its router then only reaches peers by name."""
    try:
        context = get_replica_context()
    except RayServeException:  # a driver
        return False
    return (context.app_name, context.deployment) == (app_name, deployment_name)
