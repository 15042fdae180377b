"""One RoutingCore for each deployment in a process, and what its Serve router shares with the ingress beside it.

Imported by reference in a process whose deployment classes are copies: router and replica meet here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from uuid import uuid4

from router.core import RoutingCore
from router.serve.recent_decisions import RecentDecisions
from router.settings import RouterSettings

Listener = Callable[[frozenset[str]], None]
"""Gets the ids of all that run now. Called from the router's loop; must not block or raise."""


class RunningReplicas:
    """The ids of the replicas of one deployment that take requests, as a router last heard it. Any thread."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self._lock = Lock()
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Call it now, and whenever a router hears of the replicas."""
        with self._lock:
            self._listeners.append(listener)
            listener(self.names)

    def heard(self, names: Iterable[str]) -> None:
        """Take in what a router was told."""
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
    """Return this process's core for a deployment, made on first use; ``router_id`` is unique to the process.

    ``settings``: the deployment's, put into force when they are new here; else ``configure`` has the last word.
    """
    return _of(deployment_key, settings).core


def decisions_for(deployment_key: str) -> RecentDecisions:
    """Return what this process's Serve router decided lately for a deployment: Serve's handle does not pass it on."""
    return _of(deployment_key, None).decisions


def running_replicas(deployment_key: str) -> RunningReplicas:
    """Return which replicas of a deployment run, as this process's Serve router last heard it."""
    return _of(deployment_key, None).running


def register_router(deployment_key: str, router: Any) -> None:
    """Note the latest of this process's Serve routers for a deployment."""
    _of(deployment_key, None).router = router


def router_for(deployment_key: str) -> Any:
    """Return it, None where this process has none yet. Serve copies a router's class, not what is in this module."""
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
