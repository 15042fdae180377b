"""Waiting for a replica, a place or late tokens, the client's answer then, and clients that leave before the end.

Chunks and a call's end arrive by different paths: their order changes nothing, and lost chunks are requested again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest
from msgspec import structs
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID, RequestMetadata
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentResponse

from router.protocol.request import NoReplicaLeft
from serve_app.engine.protocol import EngineOutput, EngineRequest, FirstToken, Prefilled, request_of_wire, to_wire
from serve_app.errors import LimitReason, Overloaded, RateLimited, WarmpathError
from serve_app.generation.dispatch import MAX_ATTEMPTS, Aborts
from serve_app.ray_compat import cancel_call
from tests.harness.eventually import let_others_run
from tests.serve_app.generation.fake_replicas import (
    Chunks,
    FakeHandle,
    FakeResult,
    always,
    answer,
    at_first,
    called,
    generation,
    ids,
    lost_once,
    run,
    whole,
)
from tests.serve_app.generation.outputs import output

REASON = LimitReason("engine", "max_waiting_requests", 2, 2)
FULL = output(error="queue_full", message="full", retry_after_s=3.0, reason=REASON)


@pytest.mark.parametrize("error", [NoReplicaLeft("none"), DeploymentUnavailableError(DeploymentID("d"))], ids=type)
def test_a_stream_that_has_begun_waits_for_a_replica(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has a part of the answer and cannot request the rest: it continues once a replica exists again."""
    monkeypatch.setattr("serve_app.generation.dispatch.FIRST_PAUSE_S", 0.001)
    none_at_first = at_first(2 * MAX_ATTEMPTS, always(error))
    handle = FakeHandle(lost_once(2, none_at_first, ActorDiedError()))
    assert ids(run(handle)) == whole()
    assert handle.after_first_token == [True]


OTHER = always(output(error="other_model", message="this replica has another model"))


@pytest.mark.parametrize("none_yet", [OTHER, always(NoReplicaLeft("none"))], ids=["another model's", "none"])
@pytest.mark.parametrize("starts", [True, False])
def test_a_request_waits_for_a_replica_of_its_model_that_starts(
    none_yet: Chunks, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often there is none of its own yet; if none starts, the client is told at once to come back."""
    monkeypatch.setattr("serve_app.generation.dispatch.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("serve_app.generation.dispatch.MAX_PAUSE_S", 0.002)
    handle = FakeHandle(at_first(3 * MAX_ATTEMPTS, none_yet))

    async def starting() -> bool:
        return starts

    handle.dispatcher.starting = starting
    if starts:
        assert ids(run(handle)) == whole()
        assert handle.after_first_token == []
        return
    with pytest.raises(Overloaded) as refused:
        run(handle)
    assert refused.value.retry_after_s is not None and len(handle.calls) == 1


def test_a_begun_answer_goes_on_where_its_model_runs_or_ends_at_once() -> None:
    """After the loss of its replica, those of another model do not take it: no wait of minutes for what is gone."""
    for starts in (True, False):
        handle = FakeHandle(lost_once(2, at_first(1, OTHER), ActorDiedError()))

        async def starting(starts: bool = starts) -> bool:
            return starts

        handle.dispatcher.starting = starting
        if starts:
            assert ids(run(handle)) == whole()
        else:
            with pytest.raises(Overloaded):
                run(handle)


BEGUN = lost_once(2, always(NoReplicaLeft("none")), ActorDiedError())
NONE = always(NoReplicaLeft("there has been no replica for 5 s"))


@pytest.mark.parametrize(
    ("chunks", "error", "retry_after_s"),
    [(always(FULL), RateLimited, 3.0), (BEGUN, Overloaded, 5.0), (NONE, Overloaded, 5.0)],
    ids=["full", "begun", "none"],
)
def test_a_wait_ends_at_the_deadline_with_when_to_come_back(
    chunks: Chunks, error: type[Overloaded | RateLimited], retry_after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue stays full, or a begun stream finds no replica; a new call does not wait for a replica.

    Each call lets the clock go on by a tenth of the time that is left at the start.
    """
    now_s = 1000.0

    def later(call: EngineRequest, replica: str) -> Any:
        nonlocal now_s
        now_s += 3.0
        return chunks(call, replica)

    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    monkeypatch.setattr("serve_app.generation.dispatch.FIRST_PAUSE_S", 0.001)
    handle = FakeHandle(later)
    with pytest.raises(error) as caught:
        run(handle, deadline_s=1030.0)
    assert caught.value.retry_after_s == retry_after_s
    assert caught.value.reason == (REASON if chunks is not BEGUN and chunks is not NONE else None)
    assert (len(handle.calls) > 2) == (chunks is not NONE)


def test_a_call_carries_the_seconds_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt sends the replica its remaining time, so that an engine ends requests nobody waits for."""
    now_s = 1000.0
    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    chunks = lost_once(2)

    def slow(call: EngineRequest, replica: str) -> Any:
        nonlocal now_s
        now_s += 4.5
        return chunks(call, replica)

    handle = FakeHandle(slow)
    run(handle, deadline_s=1030.0)
    assert [call.timeout_s for call in handle.calls] == [30.0, 25.5]
    assert request_of_wire(to_wire(handle.calls[1])).timeout_s == 25.5


@pytest.mark.parametrize("separate_loop", [True, False])
def test_backpressure_is_429_in_both_modes_of_the_router(separate_loop: bool) -> None:
    """Serve refuses while a replica is chosen, and Ray raises it once more when the call is cancelled."""
    error = BackPressureError(num_queued_requests=1, max_queued_requests=1)

    class Refusing(FakeHandle):
        def remote(self, request: EngineRequest) -> Any:
            refused: Future[Any] | asyncio.Future[Any] = Future() if separate_loop else asyncio.Future()
            refused.set_exception(error)
            metadata = RequestMetadata(request_id="r", internal_request_id="r")
            return DeploymentResponse(refused, metadata, _is_router_running_in_separate_loop=separate_loop)

    with pytest.raises(RateLimited) as refused:
        run(Refusing(answer), deadline_s=time.perf_counter())
    assert refused.value.retry_after_s


@pytest.mark.parametrize("by_serve", [False, True])
def test_a_full_line_is_asked_again(by_serve: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An admitted call waits for its replica, longer each time, and is not lost; Serve's own bound works alike.

    docs: routing
    """
    monkeypatch.setattr("serve_app.generation.dispatch.FIRST_PAUSE_S", 0.001)
    full = always(BackPressureError(num_queued_requests=1, max_queued_requests=1)) if by_serve else always(FULL)
    handle = FakeHandle(at_first(MAX_ATTEMPTS + 2, full))
    assert ids(run(handle)) == whole()
    assert handle.after_first_token == []
    assert len({route.request_id for route in handle.calls}) == MAX_ATTEMPTS + 3
    assert not any(route.avoid for route in handle.calls)


class LateResult(FakeResult):
    """Its end is heard before its chunks; the first call loses the last ``lose`` of them."""

    lose = 0

    async def get_async(self) -> bytes:
        chunks = [
            structs.replace(chunk, request_id=self._call_id, seq=seq)
            for seq, chunk in enumerate([each async for each in self._chunks])
        ]
        kept, LateResult.lose = chunks[: len(chunks) - LateResult.lose], 0
        deliver = self._inbox.deliver
        asyncio.get_running_loop().call_later(0.02, deliver, kept)
        return to_wire(output(seq=len(chunks), finish_reason=chunks[-1].finish_reason))


def late(monkeypatch: pytest.MonkeyPatch, chunks: Chunks, lose: int = 0) -> FakeHandle:
    monkeypatch.setattr("tests.serve_app.generation.fake_replicas.FakeResult", LateResult)
    monkeypatch.setattr(LateResult, "lose", lose)
    return FakeHandle(chunks)


def test_an_answer_without_tokens_has_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that only warms the cache has its cached tokens in its one chunk, not in its end."""
    empty = always(output((), FirstToken(8), "length"))
    handle = late(monkeypatch, empty)
    (tokens,) = run(handle)
    assert len(handle.calls) == 1
    assert (tokens.token_ids, tokens.first, tokens.finish_reason) == ((), FirstToken(8), "length")


@pytest.mark.parametrize("lose", [0, 1, 2, 3])
def test_lost_chunks_are_asked_for_again(monkeypatch: pytest.MonkeyPatch, lose: int) -> None:
    """An early end cuts nothing off; after a broken channel another replica continues."""
    monkeypatch.setattr("serve_app.generation.dispatch.LATE_S", 1.0)
    handle = late(monkeypatch, answer, lose)
    assert ids(run(handle)) == whole()
    assert handle.after_first_token == [lose < 3] * bool(lose)


def test_leaving_between_the_assignment_and_its_news_cancels_the_call() -> None:
    """The replica has the call already, but the caller does not know it: Ray's own cancel would leave it running.

    The test also fails if Ray renames the future of an assignment, or changes its content.
    """
    handle = FakeHandle(answer, ["a"])

    async def leave() -> None:
        waiting = asyncio.ensure_future(anext(handle.dispatcher.generate(generation())))
        # Waiters of the event run before those of the task that sets it.
        await handle.assigned.wait()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(leave())
    assert handle.results[0].cancelled
    assert handle.core.state()["open_reservations"] == 0


@pytest.mark.anyio
async def test_leaving_before_the_assignment_cancels_that() -> None:
    """Nothing was sent yet, and nothing will be; a call with a failed assignment has nothing to cancel."""
    never = called(asyncio.Event().wait())
    failed = called(asyncio.sleep(0, result=None))
    await let_others_run()
    failed._replica_result_future.cancel()
    for stream in (never, failed):
        cancel_call(stream)
    await let_others_run()
    assert never._replica_result_future.cancelled()


class Replicas:
    """A handle; ``b`` is dead. ``heard``: (replica, calls) of each notice; ``computed``: of each prompt."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, list[str]]] = []
        self.computed: Prefilled | None = None

    def options(self, method_name: str) -> Replicas:
        assert method_name == "end_calls"
        return self

    async def remote(self, request_ids: list[str], *, target: str) -> list[Prefilled | None]:
        self.heard.append((target, request_ids))
        if target == "b":
            raise ActorDiedError
        return [self.computed] * len(request_ids)


async def until_nothing_is_under_way() -> None:
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("serve_app.generation.dispatch.TELL_AFTER_S", 0.01)
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


def test_only_a_departure_before_the_end_is_reported(replicas: Any) -> None:
    """The ingress reports it, independent of Ray's cancel: these replicas ignore that."""
    handle = FakeHandle(answer, ["a"])
    handle.dispatcher.left = Aborts(replicas).note

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
    assert replicas.heard == [("a", [handle.calls[-1].request_id])]
    assert [result.cancelled for result in handle.results] == [False, True]
    assert handle.core.state()["open_reservations"] == 0


LATE = output(error="timeout", message="The answer took too long.")


async def never(*_: Any) -> AsyncIterator[EngineOutput]:
    await asyncio.Event().wait()
    yield FULL


@pytest.mark.parametrize(
    ("chunks", "tokens_read", "charged"),
    [(never, 0, True), (always(LATE), 0, True), (answer, 0, False), (answer, 1, False), (always(FULL), 0, False)],
    ids=["left in prefill", "timed out in prefill", "answered", "left in the answer", "refused"],
)
def test_what_was_computed_before_the_first_token_is_charged(
    chunks: Chunks, tokens_read: int, charged: bool, replicas: Any
) -> None:
    """The replica tells it for a call that was left, or too late; after the first token the prompt is charged already.

    An attempt that a replica refused, or lost, costs nothing.
    """
    replicas.computed = Prefilled(640, 64)
    handle, told = FakeHandle(chunks, ["a"]), list[tuple[EngineRequest, Prefilled]]()
    handle.dispatcher.left = Aborts(replicas, lambda *one: told.append(one)).note
    waits = chunks is never or chunks is answer
    asked = structs.replace(generation(), deadline_s=time.perf_counter() + (3600 if waits else 0.2))

    async def run() -> None:
        stream = handle.dispatcher.generate(asked)
        with suppress(WarmpathError, asyncio.CancelledError):
            if chunks is answer and not tokens_read:
                async for _ in stream:
                    pass
            reading = asyncio.ensure_future(anext(stream, None))
            if chunks is never:
                await handle.assigned.wait()
                reading.cancel()
            await reading
        await stream.aclose()
        await until_nothing_is_under_way()

    asyncio.run(run())
    assert [(one.request_id, one.token_ids is asked.token_ids, done) for one, done in told] == (
        [("r.0", True, Prefilled(640, 64))] if charged else []
    )
