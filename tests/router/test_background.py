"""Work in the background goes on after every error, and ends when it is cancelled."""

import asyncio
from functools import partial

import pytest

from router.background import keep_running, run_in_background

pytestmark = pytest.mark.anyio


async def test_work_begins_anew_after_errors_until_it_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    """An error, or a cancelled part of it, does not end it; each is logged with its name."""
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
        going.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(keep_running(partial(work, "x"), pause_s=0.0))
    await asyncio.wait_for(going.wait(), 30)
    assert begun == 3
    assert caplog.text.count("it begins anew") == 2 and "work" in caplog.records[0].message
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_work_that_ends_is_not_begun_again() -> None:
    begun = 0

    async def work() -> None:
        nonlocal begun
        begun += 1

    await run_in_background(work)
    assert begun == 1
