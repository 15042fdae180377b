"""Loops go on after every error and end, tell of it, and end when they are cancelled."""

import asyncio
from functools import partial

import pytest

from router.background import FAILURES, LOOPS, RECOVERY_S, BackgroundLoops, run_in_background, run_until_done
from tests.harness.eventually import let_others_run

pytestmark = pytest.mark.anyio


def failures(loops: BackgroundLoops, name: str) -> list[float]:
    return [value for kind, labels, value in loops.samples() if kind == FAILURES and labels[0][1].endswith(name)]


async def test_work_begins_anew_after_errors_and_ends_until_it_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    """An error, a cancelled part of it, or a return does not end it; each is logged and counted by its name."""
    loops = BackgroundLoops()
    begun = 0
    going = asyncio.Event()

    async def work(_: str) -> None:
        nonlocal begun
        begun += 1
        if begun == 1:
            raise ValueError("a bad round")
        if begun == 2:
            part = asyncio.get_running_loop().create_future()
            part.cancel()
            await part
        if begun == 3:
            return
        going.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(loops.keep_running(partial(work, "x"), pause_s=0.0))
    await asyncio.wait_for(going.wait(), 30)
    assert begun == 4
    assert caplog.text.count("it begins anew") == 3 and "work" in caplog.records[0].message
    [(name, labels, value), *_] = loops.samples()
    assert (name, labels[0][0], value) == (FAILURES, "loop", 3.0) and labels[0][1].endswith("work")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_work_that_is_done_is_not_begun_again() -> None:
    begun = 0

    async def errand() -> None:
        nonlocal begun
        begun += 1

    await run_until_done(errand)
    assert begun == 1
    assert failures(LOOPS, "errand") == [0.0]


async def test_a_loop_is_counted_before_its_first_failure() -> None:
    """``increase()`` does not see the event that creates a counter."""

    async def patient() -> None:
        await asyncio.Event().wait()

    task = run_in_background(patient)
    await let_others_run()
    assert failures(LOOPS, "patient") == [0.0]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("part", [0.5, 1.0, 2.0, 1000.0])
def test_a_failure_is_told_until_the_loop_ran_well_for_a_while(part: float) -> None:
    """At any time since the failure; a later one counts anew."""
    now_s = 100.0
    loops = BackgroundLoops(lambda: now_s)
    loops.begin("Sweeper.run")
    assert loops.failing() == {}
    loops.failed("Sweeper.run", "KeyError")
    loops.failed("Feed.read", "OSError")
    now_s += part * RECOVERY_S
    assert loops.failing() == ({"Sweeper.run": "KeyError", "Feed.read": "OSError"} if part < 1 else {})
    loops.failed("Feed.read", "it ended")
    assert loops.failing()["Feed.read"] == "it ended"
    assert (failures(loops, "Sweeper.run"), failures(loops, "Feed.read")) == ([1.0], [2.0])
