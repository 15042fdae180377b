"""Callers that leave while Serve's router, in a loop of its own, chooses a replica."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from router.protocol.request import RoutedRequest
from router.serve.core_registry import decisions_for
from router.serve.request_router import deployment_key
from tests.router.serve.test_away_replicas import Case


def test_nothing_is_sent_for_a_caller_that_has_left() -> None:
    """The wait for a replica ends, and nothing stays reserved."""

    async def run() -> None:
        case = Case("leaves")
        decisions = decisions_for(deployment_key("app", "leaves"))
        route = RoutedRequest("r.0", bytes(16), 20, bytes(16))
        pending: Any = SimpleNamespace(args=[], kwargs={"route": route, "decision": None})
        waiting = asyncio.create_task(case.router._choose_replica_for_request(pending))
        await asyncio.sleep(0)
        decisions.leave("r.0")
        case.set("ab")
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert case.core.state()["open_reservations"] == 0

    asyncio.run(run())
