"""Who leaves before the end: the replica's work is cancelled, at whatever point of the call, and nothing reserved."""

from __future__ import annotations

import asyncio

from serve_app.ray_compat import cancel_call
from tests.serve_app.generation.fake_replicas import FakeHandle, answer, called, generation


def test_closing_early_cancels_the_call() -> None:
    """A consumer that leaves cancels the replica's work and frees the reservation."""
    handle = FakeHandle(answer, ["a"])

    async def leave() -> None:
        stream = handle.dispatcher.generate(generation())
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    assert handle.results[0].cancelled
    assert handle.core.state()["open_reservations"] == 0


def test_leaving_between_the_assignment_and_its_news_cancels_the_call() -> None:
    """The replica has the call already, but nobody here has heard of it: Ray's own cancel would leave it running.

    It also fails when Ray calls the future of an assignment, or what it holds, otherwise.
    """
    handle = FakeHandle(answer, ["a"])

    async def leave() -> None:
        waiting = asyncio.ensure_future(anext(handle.dispatcher.generate(generation())))
        # Waiters of the event come before those of the task that sets it.
        await handle.assigned.wait()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(leave())
    assert handle.results[0].cancelled
    assert handle.core.state()["open_reservations"] == 0


def test_leaving_before_the_assignment_cancels_that() -> None:
    """Nothing was sent yet, and nothing will be; a call whose assignment failed has nothing to cancel."""

    async def leave() -> None:
        never = called(asyncio.sleep(3600))
        failed = called(asyncio.sleep(0, result=None))
        await asyncio.sleep(0)
        failed._replica_result_future.cancel()
        for stream in (never, failed):
            cancel_call(stream)
        await asyncio.sleep(0)
        assert never._replica_result_future.cancelled()

    asyncio.run(leave())
