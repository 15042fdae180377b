"""When a replica takes its absence among those that run for its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from router.serve.core_registry import RunningReplicas
from serve_app.replica.lifecycle import departure as departure_module
from serve_app.replica.lifecycle.departure import NOTICED_S, Departure

SHORT_S = 0.05


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departure_module, "MISSING_S", SHORT_S)


def told(script: Callable[[RunningReplicas, Departure], Awaitable[None]]) -> list[str]:
    """Run a script and return what the replica was told, a while after it."""
    calls: list[str] = []

    async def run() -> None:
        replicas = RunningReplicas()
        departure = Departure(
            "me", lambda _: calls.append("leave"), lambda: calls.append("stay"), asyncio.get_running_loop()
        )
        replicas.listen(departure.heard)
        await script(replicas, departure)
        await asyncio.sleep(6 * SHORT_S)
        assert departure.leaving == (calls[-1:] == ["leave"])

    asyncio.run(run())
    return calls


def test_one_that_starts_is_not_leaving() -> None:
    async def script(replicas: RunningReplicas, departure: Departure) -> None:
        replicas.heard(["other"])

    assert told(script) == []


def test_one_that_was_there_and_is_missing_leaves_once() -> None:
    async def script(replicas: RunningReplicas, departure: Departure) -> None:
        replicas.heard(["me", "other"])
        replicas.heard(["other"])
        await asyncio.sleep(4 * SHORT_S)
        replicas.heard([])

    assert told(script) == ["leave"]


def test_one_that_returns_soon_or_late_stays() -> None:
    async def soon(replicas: RunningReplicas, departure: Departure) -> None:
        replicas.heard(["me"])
        replicas.heard([])
        replicas.heard(["me"])

    async def late(replicas: RunningReplicas, departure: Departure) -> None:
        replicas.heard(["me"])
        replicas.heard([])
        await asyncio.sleep(4 * SHORT_S)
        replicas.heard(["me"])

    assert told(soon) == []
    assert told(late) == ["leave", "stay"]


def test_a_reconfigure_is_no_departure_but_one_that_follows_it_is() -> None:
    async def returns(replicas: RunningReplicas, departure: Departure) -> None:
        replicas.heard(["me"])
        with departure.reconfiguring():
            replicas.heard([])
            await asyncio.sleep(4 * SHORT_S)
        replicas.heard(["me"])

    async def leaves(replicas: RunningReplicas, departure: Departure) -> None:
        replicas.heard(["me"])
        with departure.reconfiguring():
            replicas.heard([])
            await asyncio.sleep(4 * SHORT_S)

    assert told(returns) == []
    assert told(leaves) == ["leave"]


def test_time_away_in_a_reconfigure_is_not_taken_from_the_time_to_leave() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        left: asyncio.Queue[float] = asyncio.Queue()
        departure = Departure("me", left.put_nowait, lambda: None, loop)
        departure.heard({"me"})
        with departure.reconfiguring():
            departure.heard(set())
            await asyncio.sleep(4 * SHORT_S)
            ended_s = loop.time()
        assert await asyncio.wait_for(left.get(), 60) >= ended_s - NOTICED_S

    asyncio.run(run())


def test_one_that_is_stopped_leaves_once_whatever_it_hears() -> None:
    """Serve may stop it before its absence is long enough, or before the router beside it has heard of that."""

    async def missing(replicas: RunningReplicas, departure: Departure) -> None:
        replicas.heard(["me"])
        replicas.heard([])
        await asyncio.sleep(0)
        departure.stopped()

    async def listed(replicas: RunningReplicas, departure: Departure) -> None:
        replicas.heard(["me"])
        await asyncio.sleep(0)
        departure.stopped()
        replicas.heard(["me", "other"])
        replicas.heard(["other"])

    assert told(missing) == told(listed) == ["leave"]
