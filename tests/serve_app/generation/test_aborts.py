"""Replicas hear of the calls that nobody waits for any more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from serve_app.generation.call import Aborts
from tests.serve_app.generation.fake_replicas import FakeHandle, answer, generation


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
