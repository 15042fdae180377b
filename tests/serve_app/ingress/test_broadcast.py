"""Which ingresses a broadcast reaches, by Serve's own router without a cluster."""

import asyncio
from typing import Any, cast
from unittest.mock import MagicMock, Mock

import pytest
from ray import serve
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.router import AsyncioRouter, CurrentLoopRouter, SharedRouterLongPollClient
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ReplicaState,
    ServeStatus,
)

from router.protocol.version import UNTOLD, VERSION_METADATA, WIRE_VERSION
from serve_app.ingress.broadcast import INGRESS_NAME, Broadcast

pytestmark = pytest.mark.anyio

ID = DeploymentID(INGRESS_NAME, "app")


class Front:
    """An ingress as Serve's router knows it; it notes what it is called with."""

    max_ongoing_requests = 8
    node_id = availability_zone = ""
    multiplexed_model_ids: tuple[str, ...] = ()

    def __init__(self, name: str, metadata: dict[str, Any]) -> None:
        self.replica_id, self.replica_metadata = ReplicaID(name, ID), metadata
        self.calls: list[Any] = []

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0

    def try_send_request(self, request: Any, with_rejection: bool) -> Any:
        self.calls.append(request.args)
        return MagicMock()


def router_of(**_: Any) -> CurrentLoopRouter:
    """Return Serve's router of a handle, before it has heard from the controller."""
    made = object.__new__(CurrentLoopRouter)
    made._asyncio_router = AsyncioRouter(
        MagicMock(), ID, "handle", "actor", DeploymentHandleSource.REPLICA, asyncio.get_running_loop(),
        False, "node", None, False, _request_router_initialized_event=asyncio.Event(),
    )  # fmt: skip
    return made


async def test_ingresses_with_other_messages_are_not_called_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of a later version nor those that tell none, as during an upgrade. (docs: upgrade)"""
    monkeypatch.setattr(SharedRouterLongPollClient, "get_or_create", MagicMock())
    handle: DeploymentHandle[Any] = DeploymentHandle(INGRESS_NAME, "app", _create_router=cast(Any, router_of))
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *_: handle)
    told = {"same": {VERSION_METADATA: WIRE_VERSION}, "later": {VERSION_METADATA: WIRE_VERSION + 1}, "before": {}}
    fronts = {name: Front(name, metadata) for name, metadata in told.items()}
    broadcast = Broadcast(MagicMock(), "app", 2)
    assert broadcast.other_versions() == {}
    asked = asyncio.create_task(broadcast.ingresses("known_adapters", "argument"))
    await asyncio.sleep(0)
    router = handle._router._asyncio_router
    assert broadcast.other_versions() == {}
    known = PowerOfTwoChoicesRequestRouter(deployment_id=ID, handle_source=DeploymentHandleSource.REPLICA)
    known.update_replicas(cast(Any, list(fronts.values())))
    router._request_router = known
    router._request_router_initialized.set()
    await asyncio.wait_for(asyncio.gather(asked, return_exceptions=True), 5)
    assert {name: front.calls for name, front in fronts.items()} == {
        "same": [["argument"]], "later": [], "before": [],
    }  # fmt: skip
    assert broadcast.other_versions() == {"later": WIRE_VERSION + 1, "before": UNTOLD}
    known.update_replicas(cast(Any, [fronts["same"]]))
    assert broadcast.other_versions() == {}
    assert Broadcast(MagicMock(), "app", 1).other_versions() == {}


@pytest.mark.parametrize(
    ("status", "message", "states", "starting", "unheard"),
    [
        ("UPDATING", "", {"STARTING": 1}, True, True),
        ("UPDATING", "Traceback", {"STARTING": 1}, False, False),
        # Serve's status is ahead of its routers: the new replica runs, and no router has heard of it.
        ("HEALTHY", "", {"RUNNING": 1}, False, True),
        ("HEALTHY", "", {}, False, False),
        ("UNHEALTHY", "", {"STOPPING": 1}, False, False),
    ],
)
def test_a_request_waits_for_a_replica_that_starts_or_that_no_router_has_heard_of(
    status: str, message: str, states: dict[str, int], starting: bool, unheard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trigger = DeploymentStatusTrigger.UNSPECIFIED
    found = {ReplicaState(name).value: count for name, count in states.items()}
    deployment = DeploymentStatusOverview(DeploymentStatus(status), trigger, found, message)  # type: ignore[arg-type]
    app = ApplicationStatusOverview(ApplicationStatus.RUNNING, "", 0.0, {"Replica": deployment})
    monkeypatch.setattr(serve, "status", lambda: ServeStatus(applications={"app": app}))
    own, other = (Broadcast(Mock(deployment_name=name), "app", 1) for name in ("Replica", "Other"))
    assert (own.is_starting(), own.is_starting(unheard=True)) == (starting, unheard)
    assert not other.is_starting(unheard=True)
