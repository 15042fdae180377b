"""One RoutingCore for each deployment in this process: what Serve's router and the ingress beside it share."""

from __future__ import annotations

from threading import Lock
from uuid import uuid4

from router.core import RoutingCore
from router.settings import RouterSettings

_cores: dict[str, RoutingCore] = {}
_cores_lock = Lock()


def core_for(deployment_key: str, settings: RouterSettings | None = None) -> RoutingCore:
    """Return this process's core for a deployment, made on first use; given ``settings`` are put into force.

    The ingress reaches through it the core that its process's Serve router uses. ``router_id`` is unique to the
    process.
    """
    with _cores_lock:
        core = _cores.get(deployment_key)
        if core is None:
            core = _cores[deployment_key] = RoutingCore(uuid4().hex, settings)
        elif settings is not None and settings != core.settings:
            core.configure(settings)
        return core
