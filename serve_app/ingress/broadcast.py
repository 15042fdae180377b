"""Calls to all replicas or all ingresses of one application, with time limits."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import DeploymentStatusOverview, ReplicaState

from router.protocol.request import NoReplicaLeft
from router.protocol.version import mixes, version_of
from router.serve.core_registry import running_replicas
from router.serve.request_router import deployment_key
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.errors import innermost
from serve_app.fairness.levels import LevelAnswer, LevelQuestion
from serve_app.notices import board_name, figures_prefix, read, read_shown
from serve_app.ray_compat import advertisements, limit_broadcasts
from serve_app.tenancy.registry import TenantRegistry
from serve_app.tenancy.weights import post_weights

logger = logging.getLogger(__name__)

INGRESS_NAME = "Ingress"
NONE_S = 3.0
"""After this time a new handle knows the replicas, if there are any."""
LEVEL_S = 2.0
"""The longest wait of a request for the other ingresses' counts."""


@dataclass(eq=False)
class Broadcast:
    """Calls a method of every replica of a model, or of every ingress, about that model: of those whose messages mix
    with ours.

    ``ingress_replicas``: their number, including this one. ``model``: its name, if there are several.
    """

    replica: DeploymentHandle
    app_name: str
    ingress_replicas: int
    model: str = ""

    @property
    def _there_are_replicas(self) -> bool:
        return bool(running_replicas(deployment_key(self.app_name, self.replica.deployment_name)).names)

    async def replicas(self, method: str, *arguments: Any, timeout_s: float = 120) -> list[Any]:
        """Call a method of every replica and return the answers."""
        if not self._there_are_replicas:  # Serve would wait for one
            return []
        return list(await self.replica.broadcast(method, *arguments).results_async(timeout_s=timeout_s))

    async def ingresses(self, method: str, *arguments: Any, timeout_s: float = 30) -> list[Any]:
        """Call a method of every ingress, including this one, and return the answers; none if there is no other."""
        if self.ingress_replicas == 1:
            return []
        handle = serve.get_deployment_handle(INGRESS_NAME, self.app_name)
        limit_broadcasts(handle, lambda advertised: mixes(version_of(advertised)))
        arguments = (*arguments, self.model) if self.model else arguments
        return list(await handle.broadcast(method, *arguments).results_async(timeout_s=timeout_s))

    def other_versions(self) -> dict[str, int]:
        """Return the ingresses that are not called, because their messages do not mix with ours, and their versions."""
        if self.ingress_replicas == 1:
            return {}
        known = advertisements(serve.get_deployment_handle(INGRESS_NAME, self.app_name))
        told = {name: version_of(advertised) for name, advertised in known.items()}
        return {name: version for name, version in told.items() if not mixes(version)}

    async def levels(self, question: LevelQuestion) -> Sequence[LevelAnswer]:
        """Ask every ingress what it has for a tenant; return nothing if some do not answer in time."""
        try:
            return await self.ingresses("tenant_level", question, timeout_s=LEVEL_S)
        except (RayError, DeploymentUnavailableError, TimeoutError):
            logger.warning("an ingress does not tell what tenants have at once", exc_info=True)
            return ()

    async def keep_tenants(self) -> bool:
        """Return whether every ingress that answers has a database of tenants and keys; one that cannot stops nobody.

        A key that has leaked is to end on all others.
        """
        try:
            return all(await self.ingresses("keeps_tenants", timeout_s=LEVEL_S))
        except (RayError, DeploymentUnavailableError, TimeoutError):
            logger.warning("an ingress does not tell whether it has the database of tenants", exc_info=True)
            return True

    async def connect(
        self, adapters: AdapterRegistry, learn: Callable[[], Awaitable[None]], *, from_zero: bool = False
    ) -> None:
        """Return once replicas and ingresses answer and ``adapters`` is current. ``learn``: asks ingresses for more.

        A handle's router answers after its first call. ``from_zero``: there may be no replica, and so none to ask.
        """
        while True:
            try:
                if from_zero:  # a call would start one
                    await asyncio.sleep(NONE_S)
                if not from_zero or self._there_are_replicas:
                    await self.replica.describe.remote()
                # All replicas may be younger than an adapter that an operator loaded; other ingresses know it, too.
                for known in [*await self.replicas("known_adapters"), *await self.ingresses("known_adapters")]:
                    adapters.merge(known)
                await learn()
                adapters.current = True
                return
            except NoReplicaLeft:
                logger.info("no replica has started yet")
            except (RayError, DeploymentUnavailableError, TimeoutError):
                logger.warning("a replica or an ingress does not answer yet", exc_info=True)
            await asyncio.sleep(0.5)

    async def post_weights(self, registry: TenantRegistry) -> NoReturn:
        """Tell the replicas the weights of tenants in the database, whenever they change."""
        await post_weights(self.board, registry)

    # What the cluster says of the model's deployment. Each of these blocks.

    @property
    def board(self) -> str:
        """The name of the notice board."""
        return board_name(self.app_name, self.replica.deployment_name)

    @property
    def figures_prefix(self) -> str:
        """What the names of an ingress' figures for autoscaling begin with."""
        return figures_prefix(self.replica.deployment_name)

    def notices(self) -> dict[str, list[dict[str, Any]]]:
        """Return the notices that operators see, by kind."""
        return read_shown(self.board)

    def scaling_notices(self) -> list[dict[str, Any]]:
        """Return the autoscaler's notices, newest first."""
        return read(self.board, "autoscaling")

    def is_starting(self, *, unheard: bool = False) -> bool:
        """Return whether replicas are starting, and none of them has failed to.

        ``unheard``: or whether one runs, for a router that has heard of none yet: Serve's status is ahead of its
        routers.
        """
        status = self._status()
        if status is None:
            return False
        if unheard and status.replica_states.get(ReplicaState.RUNNING):
            return True
        return status.status in ("UPDATING", "UPSCALING") and "Traceback" not in status.message

    def message(self) -> str:
        """Return what Serve says of the deployment, "" for nothing."""
        status = self._status()
        return "" if status is None else innermost(status.message)

    def _status(self) -> DeploymentStatusOverview | None:
        try:
            return serve.status().applications[self.app_name].deployments[self.replica.deployment_name]
        except (KeyError, RayError, RayServeException):
            return None


class Alone(Broadcast):
    """Calls of the only ingress of an address, whose replicas are not in Ray: nobody is called."""

    def __init__(self, model: str = "") -> None:
        self.ingress_replicas, self.model = 1, model

    def __repr__(self) -> str:
        """Return which model's it is."""
        return f"Alone({self.model!r})"

    @property
    def board(self) -> str:
        """See ``Broadcast``; there is none."""
        return ""

    @property
    def figures_prefix(self) -> str:
        """See ``Broadcast``."""
        return f"{self.model}:" if self.model else ""

    async def replicas(self, method: str, *arguments: Any, timeout_s: float = 120) -> list[Any]:
        """Return nothing."""
        return []

    async def connect(
        self, adapters: AdapterRegistry, learn: Callable[[], Awaitable[None]], *, from_zero: bool = False
    ) -> None:
        """Return at once: the adapters of the settings are all."""
        adapters.current = True

    async def post_weights(self, registry: TenantRegistry) -> NoReturn:
        """Wait without an end."""
        await asyncio.Event().wait()
        raise AssertionError

    def notices(self) -> dict[str, list[dict[str, Any]]]:
        """Return nothing."""
        return {}

    def scaling_notices(self) -> list[dict[str, Any]]:
        """Return nothing."""
        return []

    def is_starting(self, *, unheard: bool = False) -> bool:
        """Return False."""
        return False

    def message(self) -> str:
        """Return ""."""
        return ""
