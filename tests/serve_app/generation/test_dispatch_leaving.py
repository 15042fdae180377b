"""Who leaves before the end: the replica's work is cancelled, at whatever point of the call, and it hears of it too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from serve_app.generation.call import Aborts
from serve_app.ray_compat import cancel_call
from tests.serve_app.generation.fake_replicas import FakeHandle, answer, called, generation


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


class Replicas:
    """A handle; ``b`` is dead. ``heard``: who was told of which calls."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, list[str]]] = []

    def options(self, method_name: str) -> Replicas:
        assert method_name == "end_calls"
        return self

    async def remote(self, request_ids: list[str], *, target: str) -> None:
        self.heard.append((target, request_ids))
        if target == "b":
            raise ActorDiedError


async def until_nothing_is_under_way() -> None:
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("serve_app.generation.call.TELL_AFTER_S", 0.01)
    return Replicas()


def test_each_replica_is_told_of_its_own_once_and_a_dead_one_harms_nobody(replicas: Any) -> None:
    async def run() -> None:
        aborts = Aborts(replicas)
        for replica_id, request_id in (("a", "1"), ("b", "2"), ("a", "3")):
            aborts.note(replica_id, request_id)
        await until_nothing_is_under_way()
        aborts.note("a", "4")
        await until_nothing_is_under_way()

    asyncio.run(run())
    assert replicas.heard == [("a", ["1", "3"]), ("b", ["2"]), ("a", ["4"])]


def test_who_leaves_before_the_end_is_told_of_and_whose_answer_ended_is_not(replicas: Any) -> None:
    """By the ingress, whatever becomes of Ray's cancel: these replicas do not heed it."""
    handle = FakeHandle(answer, ["a"])
    handle.dispatcher._left = Aborts(replicas).note

    async def run() -> None:
        async for _ in handle.dispatcher.generate(generation()):
            pass
        await until_nothing_is_under_way()
        assert not replicas.heard
        stream = handle.dispatcher.generate(generation())
        await anext(stream)
        await stream.aclose()
        await until_nothing_is_under_way()

    asyncio.run(run())
    assert replicas.heard == [("a", [handle.calls[-1][1].request_id])]
    assert [result.cancelled for result in handle.results] == [False, True]
    assert handle.core.state()["open_reservations"] == 0
