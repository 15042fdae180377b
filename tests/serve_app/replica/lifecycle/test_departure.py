"""The rule by which a replica takes its absence from the list of running ones for its end."""

import asyncio
from contextlib import ExitStack

import pytest

from router.serve.core_registry import RunningReplicas
from serve_app.replica.lifecycle.departure import MISSING_S, NOTICED_S, Departure
from tests.serve_app.replica.loops import run_at_once

WAIT_S = 4 * MISSING_S


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (["other"], []),
        (["me other", "other", "wait", ""], ["leave"]),
        (["me", "", "me"], []),
        (["me", "", "wait", "me"], ["leave", "stay"]),
        (["me", "reconfigure", "", "wait", "reconfigured", "me"], []),
        (["me", "reconfigure", "", "wait", "reconfigured"], ["leave"]),
        (["me", "", "turn", "stopped"], ["leave"]),
        (["me", "turn", "stopped", "me other", "other"], ["leave"]),
    ],
    ids=[
        "one that starts", "missing for long, once", "returns soon", "returns late", "returns after a reconfigure",
        "leaves after a reconfigure", "stopped while missing", "stopped while listed, and listed again",
    ],
)  # fmt: skip
def test_an_absence_is_an_end_when_it_lasts(steps: list[str], told: list[str]) -> None:
    """Steps are the running replicas, or other events. Serve may stop one before its absence is long enough."""
    calls: list[str] = []

    async def run() -> None:
        replicas, loop = RunningReplicas(), asyncio.get_running_loop()
        departure = Departure("me", lambda _: calls.append("leave"), lambda: calls.append("stay"), loop)
        replicas.listen(departure.heard)
        with ExitStack() as reconfigures:
            for step in steps:
                match step:
                    case "wait":
                        await asyncio.sleep(WAIT_S)
                    case "turn":
                        await asyncio.sleep(0)
                    case "reconfigure":
                        reconfigures.enter_context(departure.reconfiguring())
                    case "reconfigured":
                        reconfigures.close()
                    case "stopped":
                        departure.stopped()
                    case names:
                        replicas.heard(names.split())
        await asyncio.sleep(WAIT_S)
        assert departure.leaving == (calls[-1:] == ["leave"])

    run_at_once(run())
    assert calls == told


def test_time_away_in_a_reconfigure_is_not_taken_from_the_time_to_leave() -> None:
    async def run() -> None:
        loop, left = asyncio.get_running_loop(), list[float]()
        departure = Departure("me", left.append, lambda: None, loop)
        departure.heard({"me"})
        with departure.reconfiguring():
            departure.heard(set())
            await asyncio.sleep(WAIT_S)
            ended_s = loop.time()
        await asyncio.sleep(WAIT_S)
        assert left[0] >= ended_s - NOTICED_S

    run_at_once(run())
