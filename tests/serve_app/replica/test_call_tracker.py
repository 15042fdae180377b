"""Requests end with the ingress that asked for them."""

from __future__ import annotations

import asyncio

import pytest
import ray
from ray.exceptions import RpcError

from serve_app.replica import call_tracker
from serve_app.replica.call_tracker import CallTracker


def test_requests_of_a_dead_caller_end_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that its engine had not taken yet when its caller was found dead; nobody is watched without requests."""
    monkeypatch.setattr(call_tracker, "LOOK_EVERY_S", 0.0)
    dead: set[str] = set()
    asked: list[str] = []
    cancelled: list[str] = []
    watched = CallTracker(cancelled.append, lambda name: bool(asked.append(name)) or name not in dead)

    async def looked() -> None:
        """Wait until everybody has been looked after twice from now on."""
        before = asked.count("a")
        while asked.count("a") < before + 2:  # noqa: ASYNC110 (each look is a turn of the loop)
            await asyncio.sleep(0)

    async def run() -> None:
        watching = asyncio.create_task(watched.watch())
        for caller, request_id in (("a", "a1"), ("b", "b1"), ("b", "b2"), ("b", "over"), ("gone", "g")):
            watched.began(caller, request_id)
        watched.ended("b", "over")
        watched.ended("gone", "g")
        await looked()
        assert not cancelled
        dead.add("b")
        await looked()
        assert {"b1", "b2"} <= set(cancelled)
        cancelled.clear()
        await looked()
        assert set(cancelled) == {"b1", "b2"}, "not taken yet: once more"
        watched.ended("b", "b1")
        watched.ended("b", "b2")
        await looked()
        cancelled.clear()
        await looked()
        assert not cancelled
        assert "gone" not in asked
        watching.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(("said", "lives"), [(None, True), (ValueError("no such actor"), False), (RpcError("x"), True)])
def test_nobody_is_dead_while_ray_does_not_say_so(
    said: Exception | None, lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generations do not end because Ray's control plane is away."""

    def get_actor(name: str, namespace: str) -> object:
        if said is not None:
            raise said
        return name

    monkeypatch.setattr(ray, "get_actor", get_actor)
    assert call_tracker.actor_lives("x") is lives


def test_requests_that_nobody_waits_for_end_whether_they_have_begun_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that its engine had not taken yet; a request of another name does not, and of the ended none is kept."""
    monkeypatch.setattr(call_tracker, "LOOK_EVERY_S", 0.0)
    cancelled: list[str] = []
    watched = CallTracker(cancelled.append, lambda _: True)

    async def run() -> None:
        watching = asyncio.create_task(watched.watch())
        watched.began("a", "here")
        watched.began("a", "other")
        watched.left(["here", "coming"])
        assert cancelled == ["here"]
        while cancelled.count("here") < 3:  # noqa: ASYNC110 (each look is a turn of the loop)
            await asyncio.sleep(0)
        watched.ended("a", "here")
        cancelled.clear()
        watched.began("b", "coming")
        while cancelled.count("coming") < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        watched.ended("b", "coming")
        cancelled.clear()
        watched.began("b", "coming")
        watched.left([str(number) for number in range(20_000)])
        watched.began("a", "0")
        watched.began("a", "19999")
        watched.left([])
        assert set(cancelled) == {"19999"}
        watching.cancel()

    asyncio.run(run())
