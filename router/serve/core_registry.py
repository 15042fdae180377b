"""One RoutingCore for each deployment in a process, and the state that its Serve router shares with the ingress.

Serve copies deployment classes into a process but imports this module by reference, so router and replica share it.

The ingress fetches the decisions of its requests from there (``RecentDecisions``).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from uuid import uuid4

from router.core import RoutingCore
from router.protocol.request import Decision
from router.settings import RouterSettings

_MAX_REQUESTS = 8192


class RecentDecisions:
    """The last decision of each recent request, also for callers that leave early. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._decisions: OrderedDict[str, Decision] = OrderedDict()
        self._left: OrderedDict[str, None] = OrderedDict()

    def add(self, request_id: str, decision: Decision) -> bool:
        """Store a request's decision in place of an earlier one. Return False if the caller has already left."""
        with self._lock:
            if request_id in self._left:
                del self._left[request_id]
                return False
            self._decisions[request_id] = decision
            if len(self._decisions) > _MAX_REQUESTS:
                self._decisions.popitem(last=False)
            return True

    def leave(self, request_id: str) -> Decision | None:
        """Remove and return a leaving caller's decision. Without one, a later ``add`` will be refused."""
        with self._lock:
            decision = self._decisions.pop(request_id, None)
            if decision is None:
                self._left[request_id] = None
                if len(self._left) > _MAX_REQUESTS:
                    self._left.popitem(last=False)
            return decision

    def take(self, request_id: str) -> Decision | None:
        """Return a request's decision and forget it."""
        with self._lock:
            return self._decisions.pop(request_id, None)


Listener = Callable[[frozenset[str]], None]
"""Receives the ids of all running replicas. It is called from the router's loop and must not block or raise."""


class RunningReplicas:
    """The ids of one deployment's running replicas, as last reported to a router. Any thread may use it."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self._lock = Lock()
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Call the listener now and after every update."""
        with self._lock:
            self._listeners.append(listener)
            listener(self.names)

    def heard(self, names: Iterable[str]) -> None:
        """Store an update that a router received, and call the listeners."""
        with self._lock:
            self.names = frozenset(names)
            for listener in self._listeners:
                listener(self.names)


@dataclass(slots=True)
class _Shared:
    core: RoutingCore
    deployed: RouterSettings | None
    decisions: RecentDecisions = field(default_factory=RecentDecisions)
    running: RunningReplicas = field(default_factory=RunningReplicas)
    router: Any = None


_shared: dict[str, _Shared] = {}
_shared_lock = Lock()


def core_for(deployment_key: str, settings: RouterSettings | None = None) -> RoutingCore:
    """Return this process's core for a deployment, created on first use. ``router_id`` is unique to the process.

    ``settings``: the deployment's settings, applied when they are new here. Otherwise those of ``configure`` stay.
    """
    return _of(deployment_key, settings).core


def decisions_for(deployment_key: str) -> RecentDecisions:
    """Return the recent decisions of this process's Serve router, which Serve's handle does not return."""
    return _of(deployment_key, None).decisions


def running_replicas(deployment_key: str) -> RunningReplicas:
    """Return the running replicas of a deployment, as last reported to this process's Serve router."""
    return _of(deployment_key, None).running


def register_router(deployment_key: str, router: Any) -> None:
    """Record the latest of this process's Serve routers for a deployment."""
    _of(deployment_key, None).router = router


def router_for(deployment_key: str) -> Any:
    """Return the registered router, or None. Serve copies a router's class, but not this module's state."""
    return _of(deployment_key, None).router


def _of(deployment_key: str, settings: RouterSettings | None) -> _Shared:
    with _shared_lock:
        shared = _shared.get(deployment_key)
        if shared is None:
            shared = _shared[deployment_key] = _Shared(RoutingCore(uuid4().hex, settings), settings)
        elif settings is not None and settings != shared.deployed:
            shared.deployed = settings
            if settings != shared.core.settings:
                shared.core.configure(settings)
        return shared
