"""Sending a generation: retries, reservations and errors, with replicas that fail in every way they can."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    OwnerDiedError,
    RaySystemError,
    RayTaskError,
    RpcError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.serve._private.common import DeploymentID, RequestMetadata
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentResponseGenerator

from router.core import RoutingCore
from router.protocol.block_hash import PrefixScope, extend_chain, hash_blocks
from router.protocol.events import LoadReport
from router.protocol.request import NoReplicaLeft, RoutedRequest
from router.serve.recent_decisions import RecentDecisions
from router.settings import RouterSettings
from serve_app.engine.protocol import SamplingParams
from serve_app.errors import ContextLengthExceeded, GenerationFailed, Overloaded, RateLimited
from serve_app.generation.dispatch import MAX_ATTEMPTS, Dispatcher, cancel_call
from serve_app.generation.generation import Generation, Tokens
from serve_app.replica import messages as wire

BLOCK = 4
SCOPE = PrefixScope("m", "", b"salt")
ROOT = SCOPE.root(b"secret")
LOST = [
    ActorDiedError(),
    ActorUnavailableError("gone", None),
    TaskCancelledError(),
    WorkerCrashedError(),
    NodeDiedError("gone"),
    OwnerDiedError("00", None, ""),
    RpcError("broken"),
    GetTimeoutError("late"),
    RaySystemError("broken"),
    AioRpcError(StatusCode.CANCELLED, Metadata(), Metadata()),
]
"""The ways in which Ray, or its transport, loses a call; the replica's own code has no part in them."""
Chunks = Callable[[wire.GenerateCall, RoutedRequest, str], AsyncIterator[wire.GenerateChunk]]


class FakeResult:
    """A replica's end of a call, behind Ray's own ``DeploymentResponseGenerator``."""

    def __init__(self, chunks: AsyncIterator[wire.GenerateChunk]) -> None:
        self._chunks = chunks
        self.cancelled = False

    async def __anext__(self) -> bytes:
        return wire.encode(await anext(self._chunks))

    def cancel(self) -> None:
        self.cancelled = True


class FakeHandle:
    """A Serve handle whose router is a real RoutingCore and whose replicas are one function."""

    def __init__(self, core: RoutingCore, chunks: Chunks) -> None:
        self.core = core
        self.chunks = chunks
        self.decisions = RecentDecisions()
        self.calls: list[tuple[wire.GenerateCall, RoutedRequest]] = []
        self.results: list[FakeResult] = []
        self.assigned = asyncio.Event()

    def options(self, **_: Any) -> FakeHandle:
        return self

    def remote(self, payload: bytes, *, route: RoutedRequest, decision: None) -> Any:
        call = wire.decode_call(payload)
        self.calls.append((call, route))
        chosen = self.core.decide(route)
        assert chosen is not None
        self.decisions.add(route.request_id, chosen)
        self.results.append(FakeResult(self.chunks(call, route, chosen.replica_id)))
        return called(self._assign(self.results[-1]))

    async def _assign(self, result: FakeResult) -> FakeResult:
        self.assigned.set()
        return result


def called(assignment: Coroutine[Any, Any, Any]) -> Any:
    """What a Serve handle returns whose router runs in the caller's loop."""
    metadata = RequestMetadata(request_id="r", internal_request_id="r")
    task = asyncio.get_running_loop().create_task(assignment)
    return DeploymentResponseGenerator(task, metadata, _is_router_running_in_separate_loop=False)


class Retries:
    def __init__(self) -> None:
        self.after_first_token: list[bool] = []

    def retried(self, after_first_token: bool) -> None:
        self.after_first_token.append(after_first_token)


def generation(max_tokens: int = 6, public_blocks: int = 0) -> Generation:
    token_ids = np.arange(10, dtype=np.int32)
    return Generation(
        request_id="r",
        token_ids=token_ids,
        block_hashes=extend_chain(root_of(public_blocks), public_blocks, token_ids, BLOCK),
        scope=replace(SCOPE, public_blocks=public_blocks),
        root=root_of(public_blocks),
        placement_key=b"k" * 16,
        tenant="t",
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=11),
    )


def root_of(public_blocks: int) -> bytes:
    return b"p" * 16 + ROOT if public_blocks else ROOT


def run(
    chunks: Chunks, max_tokens: int = 6, public_blocks: int = 0, deadline_s: float = math.inf
) -> tuple[list[Tokens], FakeHandle, Retries]:
    core = RoutingCore("router", RouterSettings(block_size=BLOCK))
    core.update_replicas(["a", "b", "c", "d", "e"])
    handle, retries = FakeHandle(core, chunks), Retries()
    dispatcher = Dispatcher(handle, core, handle.decisions, BLOCK, retries.retried, "me")  # type: ignore[arg-type]

    async def collect() -> list[Tokens]:
        asked = replace(generation(max_tokens, public_blocks), deadline_s=deadline_s)
        return [tokens async for tokens in dispatcher.generate(asked)]

    try:
        return asyncio.run(collect()), handle, retries
    finally:
        assert core.state()["open_reservations"] == 0


def token_at(position: int) -> int:
    """The deterministic model of these tests: a token depends on its position only."""
    return 100 + position


async def answer(call: wire.GenerateCall, replica: str, stop_after: int | None = None) -> Any:
    """Yield what a sound replica yields, two tokens a chunk; optionally only the first ``stop_after`` tokens."""
    start = len(call.token_ids) // 4
    tokens = [token_at(start + i) for i in range(call.sampling.max_tokens)][:stop_after]
    for i in range(0, len(tokens), 2):
        last = stop_after is None and i + 2 >= len(tokens)
        yield wire.GenerateChunk(
            tuple(tokens[i : i + 2]),
            replica if i == 0 else "",
            8 if i == 0 else None,
            finish_reason="length" if last else None,
        )


def test_tokens_pass_through() -> None:
    """One call, the tokens in order, cached tokens once, the finish reason last."""

    async def chunks(call: wire.GenerateCall, route: RoutedRequest, replica: str) -> Any:
        async for chunk in answer(call, replica):
            yield chunk

    got, handle, retries = run(chunks)
    assert [t for tokens in got for t in tokens.token_ids] == [token_at(10 + i) for i in range(6)]
    assert [tokens.cached_tokens for tokens in got] == [8, None, None]
    assert [tokens.finish_reason for tokens in got] == [None, None, "length"]
    assert retries.after_first_token == []
    assert len(handle.calls) == 1


@pytest.mark.parametrize("received", [0, 2, 4])
@pytest.mark.parametrize("error", [*LOST, None], ids=lambda error: type(error).__name__)
def test_a_lost_replica_is_replaced_with_the_same_tokens(received: int, error: Exception | None) -> None:
    """Before and after the first token: the rest comes from another replica, which gets prompt + received tokens."""
    failed: list[str] = []

    async def chunks(call: wire.GenerateCall, route: RoutedRequest, replica: str) -> Any:
        if failed:
            async for chunk in answer(call, replica):
                yield chunk
            return
        failed.append(replica)
        async for chunk in answer(call, replica, stop_after=received):
            yield chunk
        if error is not None:
            raise error

    got, handle, retries = run(chunks)
    assert [t for tokens in got for t in tokens.token_ids] == [token_at(10 + i) for i in range(6)]
    assert sum(tokens.cached_tokens is not None for tokens in got) == 1
    assert retries.after_first_token == [received > 0]
    (_, first), (second_call, second) = handle.calls
    assert second.request_id != first.request_id
    assert second.avoid == (failed[0],)
    resumed = np.frombuffer(second_call.token_ids, dtype="<i4")
    assert list(resumed) == [*range(10), *(token_at(10 + i) for i in range(received))]
    assert second.block_hashes == hash_blocks(ROOT, resumed, BLOCK)
    assert second_call.sampling == replace(generation().sampling, max_tokens=6 - received)
    assert second_call.scope == SCOPE


def test_what_a_busier_replica_sends_back_goes_elsewhere() -> None:
    """Its load is learned, nothing is counted as lost, and the answer is whole; the next call says how often it was."""
    busy: list[str] = []

    async def chunks(call: wire.GenerateCall, route: RoutedRequest, replica: str) -> Any:
        if not busy:
            busy.append(replica)
            load = LoadReport(1_000_000, 0, 1, 8, 16, 1000.0, 0.01, taken_at_s=1.0)
            yield wire.GenerateChunk(replica_id=replica, error="busier", load=load)
            return
        assert replica not in busy
        async for chunk in answer(call, replica):
            yield chunk

    got, handle, retries = run(chunks)
    assert [t for tokens in got for t in tokens.token_ids] == [token_at(10 + i) for i in range(6)]
    assert [route.sent_back for _, route in handle.calls] == [0, 1]
    assert len({route.request_id for _, route in handle.calls}) == 2
    assert handle.core.loads.queue_ahead(busy[0]) == 1_000_000
    assert (handle.core.counters.sent_back, retries.after_first_token) == (1, [])


@pytest.mark.parametrize("public_blocks", [1, 2])
def test_what_is_sent_again_keeps_its_public_part(public_blocks: int) -> None:
    """Received tokens go on with the chain, and are private also where the whole prompt was public."""
    failed: list[str] = []

    async def chunks(call: wire.GenerateCall, route: RoutedRequest, replica: str) -> Any:
        stop_after = None if failed else 4
        failed.append(replica)
        async for chunk in answer(call, replica, stop_after=stop_after):
            yield chunk

    _, handle, _ = run(chunks, public_blocks=public_blocks)
    call, route = handle.calls[1]
    resumed = np.frombuffer(call.token_ids, dtype="<i4")
    assert len(resumed) == 14
    assert route.block_hashes == extend_chain(root_of(public_blocks), public_blocks, resumed, BLOCK)
    sent = wire.decode_call(wire.encode(call)).to_engine_request(route.block_hashes, "", 0)
    assert (sent.scope.public_blocks, sent.root) == (public_blocks, b"p" * 16 + ROOT)


def test_everything_received_before_the_loss_is_not_asked_again() -> None:
    """A replica that dies after the last token, before saying so, needs no second call."""

    async def chunks(call: wire.GenerateCall, route: RoutedRequest, replica: str) -> Any:
        async for chunk in answer(call, replica, stop_after=6):
            yield chunk
        raise ActorDiedError

    got, handle, retries = run(chunks)
    assert retries.after_first_token == []
    assert len([t for tokens in got for t in tokens.token_ids]) == 6
    assert got[-1].finish_reason == "length"
    assert len(handle.calls) == 1


def test_when_all_replicas_die_the_client_is_told_to_come_back() -> None:
    """A bounded number of attempts, each avoiding the lost ones, then 503 with Retry-After."""

    async def chunks(call: wire.GenerateCall, route: RoutedRequest, replica: str) -> Any:
        raise ActorDiedError
        yield

    core = RoutingCore("router", RouterSettings(block_size=BLOCK))
    core.update_replicas(["a", "b", "c", "d", "e"])
    handle, retries = FakeHandle(core, chunks), Retries()

    async def collect() -> None:
        dispatcher = Dispatcher(handle, core, handle.decisions, BLOCK, retries.retried, "me")  # type: ignore[arg-type]
        async for _ in dispatcher.generate(generation()):
            pass

    with pytest.raises(Overloaded) as caught:
        asyncio.run(collect())
    assert caught.value.retry_after_s
    assert len(handle.calls) == MAX_ATTEMPTS
    assert len(retries.after_first_token) == MAX_ATTEMPTS - 1
    assert len(set(handle.calls[-1][1].avoid)) == MAX_ATTEMPTS - 1
    assert core.state()["open_reservations"] == 0


def test_a_stream_outlives_any_number_of_replicas_that_leave_in_order() -> None:
    """A rolling update moves a long stream once a replica: what each of them said before it left is progress."""

    async def chunks(call: wire.GenerateCall, route: RoutedRequest, replica: str) -> Any:
        async for chunk in answer(call, replica, stop_after=2 if call.sampling.max_tokens > 2 else None):
            yield chunk
        if call.sampling.max_tokens > 2:
            yield wire.GenerateChunk(error="unavailable", message="stopping")

    got, handle, retries = run(chunks, max_tokens=4 * MAX_ATTEMPTS)
    assert [t for tokens in got for t in tokens.token_ids] == [token_at(10 + i) for i in range(4 * MAX_ATTEMPTS)]
    assert len({route.request_id for _, route in handle.calls}) == 2 * MAX_ATTEMPTS
    assert len(retries.after_first_token) == 2 * MAX_ATTEMPTS - 1


def test_replicas_that_leave_without_a_token_are_lost_ones() -> None:
    """Otherwise a deployment that is going away would be asked for ever."""

    async def chunks(call: wire.GenerateCall, route: RoutedRequest, replica: str) -> Any:
        yield wire.GenerateChunk(error="unavailable", message="stopping")

    with pytest.raises(Overloaded):
        run(chunks)


@pytest.mark.parametrize("error", [NoReplicaLeft("none"), DeploymentUnavailableError(DeploymentID("d"))], ids=type)
def test_a_stream_that_has_begun_waits_for_a_replica(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has a part of the answer and cannot ask for the rest: it goes on when there is a replica again."""
    monkeypatch.setattr("serve_app.generation.dispatch.FIRST_PAUSE_S", 0.001)
    calls = 0

    async def chunks(call: wire.GenerateCall, route: RoutedRequest, replica: str) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            async for chunk in answer(call, replica, stop_after=2):
                yield chunk
            raise ActorDiedError
        if calls < 2 * MAX_ATTEMPTS:
            raise error
        async for chunk in answer(call, replica):
            yield chunk

    got, _, retries = run(chunks)
    assert [t for tokens in got for t in tokens.token_ids] == [token_at(10 + i) for i in range(6)]
    assert retries.after_first_token == [True]


def test_a_stream_waits_for_a_replica_until_its_deadline() -> None:
    """Then the client hears that there is none."""
    calls = 0

    async def chunks(call: wire.GenerateCall, route: RoutedRequest, replica: str) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            async for chunk in answer(call, replica, stop_after=2):
                yield chunk
            raise ActorDiedError
        raise NoReplicaLeft("none")

    with pytest.raises(Overloaded) as caught:
        run(chunks, deadline_s=time.perf_counter() + 0.2)
    assert caught.value.retry_after_s


@pytest.mark.parametrize(
    ("chunk", "error"),
    [
        (wire.GenerateChunk(error="too_long", message="too long"), ContextLengthExceeded),
        (wire.GenerateChunk(error="failed", message="bad"), GenerationFailed),
        (wire.GenerateChunk(error="timeout", message="took too long"), GenerationFailed),
    ],
)
def test_refusals_become_client_errors(chunk: wire.GenerateChunk, error: type[Exception]) -> None:
    """What the replica refuses is not retried, and nothing stays reserved."""

    async def chunks(call: wire.GenerateCall, route: RoutedRequest, replica: str) -> Any:
        yield chunk

    with pytest.raises(error):
        run(chunks)


def test_a_call_carries_the_seconds_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt tells the replica how long it may still take, so that an engine ends what nobody waits for."""
    now_s = 1000.0
    monkeypatch.setattr("time.perf_counter", lambda: now_s)

    async def chunks(call: wire.GenerateCall, route: RoutedRequest, replica: str) -> Any:
        nonlocal now_s
        first = now_s == 1000.0
        now_s += 4.5
        async for chunk in answer(call, replica, stop_after=2 if first else None):
            yield chunk

    _, handle, _ = run(chunks, deadline_s=1030.0)
    assert [call.timeout_s for call, _ in handle.calls] == [30.0, 25.5]
    call, route = handle.calls[1]
    assert wire.decode_call(wire.encode(call)).to_engine_request(route.block_hashes, "", 0).timeout_s == 25.5


@pytest.mark.parametrize("separate_loop", [True, False])
def test_backpressure_is_429_in_both_modes_of_the_router(separate_loop: bool) -> None:
    """Refused by Serve while a replica is chosen, which Ray says once more when the call is cancelled."""
    error = BackPressureError(num_queued_requests=1, max_queued_requests=1)
    core = RoutingCore("router", RouterSettings(block_size=BLOCK))

    class Refusing(FakeHandle):
        def remote(self, payload: bytes, *, route: RoutedRequest, decision: None) -> Any:
            refused: Future[Any] | asyncio.Future[Any] = Future() if separate_loop else asyncio.Future()
            refused.set_exception(error)
            metadata = RequestMetadata(request_id="r", internal_request_id="r")
            return DeploymentResponseGenerator(refused, metadata, _is_router_running_in_separate_loop=separate_loop)

    async def ask() -> None:
        handle = Refusing(core, lambda call, _, replica: answer(call, replica))
        dispatcher = Dispatcher(handle, core, handle.decisions, BLOCK, Retries().retried, "me")  # type: ignore[arg-type]
        await anext(dispatcher.generate(replace(generation(), deadline_s=time.perf_counter())))

    with pytest.raises(RateLimited) as refused:
        asyncio.run(ask())
    assert refused.value.retry_after_s


FULL = wire.GenerateChunk(error="queue_full", message="full", retry_after_s=3.0)


@pytest.mark.parametrize("by_serve", [False, True])
def test_a_full_line_is_asked_again(by_serve: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was admitted waits for its replica, longer each time, and is no lost call; Serve's own bound reads alike."""
    monkeypatch.setattr("serve_app.generation.dispatch.FIRST_PAUSE_S", 0.001)
    asked = 0

    async def chunks(call: wire.GenerateCall, route: RoutedRequest, replica: str) -> Any:
        nonlocal asked
        asked += 1
        if asked <= MAX_ATTEMPTS + 2:
            if by_serve:
                raise BackPressureError(num_queued_requests=1, max_queued_requests=1)
            yield FULL
            return
        async for chunk in answer(call, replica):
            yield chunk

    got, handle, retries = run(chunks)
    assert [token for tokens in got for token in tokens.token_ids] == [token_at(10 + i) for i in range(6)]
    assert retries.after_first_token == []
    assert len({route.request_id for _, route in handle.calls}) == MAX_ATTEMPTS + 3
    assert not any(route.avoid for _, route in handle.calls)


def test_a_line_that_stays_full_is_429_at_the_deadline() -> None:
    """The client hears of it before its time is over."""

    async def chunks(call: wire.GenerateCall, route: RoutedRequest, replica: str) -> Any:
        yield FULL

    with pytest.raises(RateLimited) as caught:
        run(chunks, deadline_s=time.perf_counter() + 0.2)
    assert caught.value.retry_after_s == 3.0


def test_an_exception_in_the_replica_is_a_plain_500() -> None:
    """A fault inside the replica's code is not retried and shows nothing of the inside."""

    async def chunks(call: wire.GenerateCall, route: RoutedRequest, replica: str) -> Any:
        raise RayTaskError("generate", "Traceback: secret", ValueError("x"))
        yield

    with pytest.raises(GenerationFailed) as caught:
        run(chunks)
    assert "secret" not in caught.value.message


def test_closing_early_cancels_the_call() -> None:
    """A consumer that leaves cancels the replica's work and frees the reservation."""

    async def chunks(call: wire.GenerateCall, route: RoutedRequest, replica: str) -> Any:
        async for chunk in answer(call, replica):
            yield chunk

    core = RoutingCore("router", RouterSettings(block_size=BLOCK))
    core.update_replicas(["a"])
    handle = FakeHandle(core, chunks)

    async def leave() -> None:
        dispatcher = Dispatcher(handle, core, handle.decisions, BLOCK, Retries().retried, "me")  # type: ignore[arg-type]
        stream = dispatcher.generate(generation())
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    assert handle.results[0].cancelled
    assert core.state()["open_reservations"] == 0


def test_leaving_between_the_assignment_and_its_news_cancels_the_call() -> None:
    """The replica has the call already, but nobody here has heard of it: Ray's own cancel would leave it running.

    It also fails when Ray calls the future of an assignment, or what it holds, otherwise.
    """

    async def chunks(call: wire.GenerateCall, route: RoutedRequest, replica: str) -> Any:
        async for chunk in answer(call, replica):
            yield chunk

    core = RoutingCore("router", RouterSettings(block_size=BLOCK))
    core.update_replicas(["a"])

    async def leave() -> FakeHandle:
        handle = FakeHandle(core, chunks)
        dispatcher = Dispatcher(handle, core, handle.decisions, BLOCK, Retries().retried, "me")  # type: ignore[arg-type]
        stream = dispatcher.generate(generation())
        waiting = asyncio.ensure_future(anext(stream))
        # Waiters of the event come before those of the task that sets it.
        await handle.assigned.wait()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return handle

    assert asyncio.run(leave()).results[0].cancelled
    assert core.state()["open_reservations"] == 0


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


def test_no_replica_at_all_is_503_with_retry_after() -> None:
    """The router's word that there is none becomes an error that says when to come back."""

    async def none(call: wire.GenerateCall, route: RoutedRequest, replica: str) -> AsyncIterator[wire.GenerateChunk]:
        raise NoReplicaLeft("there has been no replica for 5 s")
        yield  # makes it a generator

    with pytest.raises(Overloaded) as caught:
        run(none)
    assert caught.value.status == 503
    assert caught.value.retry_after_s == 5.0
