"""Replicas hear of the calls that nobody waits for any more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from serve_app.generation import aborts as aborts_module
from serve_app.generation.aborts import Aborts
from tests.serve_app.generation.fake_replicas import FakeHandle, answer, generation


class Replicas:
    """A handle; ``b`` is dead."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[str, list[str]]] = asyncio.Queue()

    def options(self, method_name: str) -> Replicas:
        assert method_name == "end_calls"
        return self

    async def remote(self, request_ids: list[str], *, target: str) -> None:
        self.told.put_nowait((target, request_ids))
        if target == "b":
            raise ActorDiedError


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aborts_module, "TELL_AFTER_S", 0.01)


def test_each_replica_is_told_of_its_own_once_and_a_dead_one_harms_nobody() -> None:
    async def run() -> None:
        replicas: Any = Replicas()
        aborts = Aborts(replicas)
        for replica_id, request_id in (("a", "1"), ("b", "2"), ("a", "3")):
            aborts.note(replica_id, request_id)
        assert sorted([await replicas.told.get(), await replicas.told.get()]) == [("a", ["1", "3"]), ("b", ["2"])]
        aborts.note("a", "4")
        assert await replicas.told.get() == ("a", ["4"])
        while aborts._telling:  # noqa: ASYNC110 (nobody announces it)
            await asyncio.sleep(0)
        assert replicas.told.empty()

    asyncio.run(run())


def test_who_leaves_before_the_end_is_told_of_and_whose_answer_ended_is_not() -> None:
    left: list[tuple[str, str]] = []
    handle = FakeHandle(answer, ["a"])
    handle.dispatcher._left = lambda *call: left.append(call)

    async def run() -> None:
        async for _ in handle.dispatcher.generate(generation()):
            pass
        assert not left
        stream = handle.dispatcher.generate(generation())
        await anext(stream)
        await stream.aclose()

    asyncio.run(run())
    assert left == [("a", handle.calls[-1][1].request_id)]
