"""Sending a generation: tokens, losses and errors, with replicas that fail in every way they can."""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError, TaskCancelledError

from router.protocol.block_hash import extend_chain
from router.protocol.events import LoadReport
from serve_app.engine.protocol import EngineOutput, EngineRequest, FirstToken, TokenLogprob, request_of_wire, to_wire
from serve_app.errors import ContextLengthExceeded, GenerationFailed, InvalidRequest, Overloaded
from serve_app.generation.dispatch import MAX_ATTEMPTS, MOST_LOSSES
from tests.harness.crashes.calls import MOST_BREAKS, CallCrashes, break_calls
from tests.harness.crashes.engines import call_crashes
from tests.harness.crashes.questions import Broken, Questions, Reply
from tests.serve_app.generation.fake_replicas import (
    BLOCK,
    SCOPE,
    Chunks,
    FakeHandle,
    always,
    answer,
    at_first,
    generation,
    ids,
    lost_once,
    root_of,
    run,
    whole,
)
from tests.serve_app.generation.outputs import output

LOST = [
    ActorUnavailableError("gone", None),
    TaskCancelledError(),
    GetTimeoutError("late"),
    AioRpcError(StatusCode.CANCELLED, Metadata(), Metadata()),
]
"""Ways in which Ray, or its transport, loses a call; the replica's own code plays no part in them."""

LEAVING = output(error="unavailable", message="stopping")


@pytest.mark.parametrize("public_blocks", [0, 1, 2])
@pytest.mark.parametrize("received", [0, 2, 4])
@pytest.mark.parametrize("error", [*LOST, None], ids=lambda error: type(error).__name__)
def test_a_lost_replica_is_replaced_with_the_same_tokens(
    received: int, error: Exception | None, public_blocks: int
) -> None:
    """Before and after the first token, the rest comes from another replica, which gets prompt + received tokens.

    Received tokens continue the chain, and are private even if the whole prompt was public.
    """
    handle = FakeHandle(lost_once(received, error=error))
    got = run(handle, public_blocks=public_blocks)
    assert ids(got) == whole()
    assert [tokens.first for tokens in got] == [FirstToken(8), None, None]
    assert [tokens.finish_reason for tokens in got] == [None, None, "length"]
    assert handle.after_first_token == [received > 0]
    first, second = handle.calls
    assert second.request_id != first.request_id
    assert second.avoid == second.dead == (handle.chosen[0],)
    resumed = request_of_wire(to_wire(second))
    assert list(resumed.token_ids) == [*range(10), *whole()[:received]]
    assert second.block_hashes == extend_chain(root_of(public_blocks), public_blocks, resumed.token_ids, BLOCK)
    assert resumed.sampling == replace(generation().sampling, max_tokens=6 - received)
    assert [call.session for call in handle.calls] == ["s", "s"]
    assert (resumed.scope, resumed.root) == (replace(SCOPE, public_blocks=public_blocks), root_of(public_blocks))
    assert resumed.resumed_tokens == received
    assert (first.order, second.order, resumed.order) == ((7, 0, 0) if received else (7, 7, 7))


def test_an_answer_that_goes_on_keeps_what_its_prompt_stands_for() -> None:
    """Received tokens stand for themselves behind the prompt's identity, under which the chain continues."""
    asked = generation()
    identity = asked.token_ids - 100
    hashes = extend_chain(root_of(0), 0, identity, BLOCK)
    handle = FakeHandle(lost_once(4))

    async def collect() -> list[EngineOutput]:
        pictured = structs.replace(asked, hashed_ids=identity, block_hashes=hashes)
        return [tokens async for tokens in handle.dispatcher.generate(pictured)]

    assert ids(asyncio.run(collect())) == whole()
    resumed = handle.calls[1]
    assert list(resumed.token_ids) == [*range(10), *whole()[:4]]
    assert list(resumed.identity) == [*identity, *whole()[:4]]
    assert resumed.block_hashes == extend_chain(root_of(0), 0, resumed.identity, BLOCK) != hashes
    assert resumed.block_hashes.startswith(hashes)


@pytest.mark.parametrize("taken", [(True,), (False, True), (True, False)])
@pytest.mark.parametrize("received", [2, 4, 6])
def test_tokens_that_are_taken_at_once_belong_to_the_answer(received: int, taken: tuple[bool, ...]) -> None:
    """They are not yielded, and a second replica gets them as part of the prompt; first and last are yielded."""
    handle = FakeHandle(lost_once(received))
    takes, got = cycle(taken), list[EngineOutput]()

    def take(tokens: EngineOutput) -> bool:
        took = next(takes)
        if took:
            got.append(tokens)
        return took

    async def collect() -> None:
        async for tokens in handle.dispatcher.generate(generation(10), at_once=take):
            got.append(tokens)

    asyncio.run(collect())
    assert ids(got) == whole(10)
    assert (got[0].first, got[-1].finish_reason) == (FirstToken(8), "length")
    assert list(handle.calls[1].token_ids) == [*range(10), *whole(10)[:received]]


def test_an_error_while_taking_is_raised() -> None:
    """The call then ends, and its replica is told."""
    handle = FakeHandle(answer)

    def take(_: EngineOutput) -> bool:
        raise GenerationFailed("broken")

    async def collect() -> None:
        async for _ in handle.dispatcher.generate(generation(), at_once=take):
            pass

    with pytest.raises(GenerationFailed, match="broken"):
        asyncio.run(collect())
    assert handle.results[0].cancelled


def test_a_request_sent_back_by_a_busier_replica_goes_elsewhere() -> None:
    """Its load is learned, nothing counts as lost, and the answer is whole; the next call has the number of returns.

    docs: routing
    """
    load = LoadReport(1_000_000, 0, 1, 8, 16, 1000.0, taken_at_s=1.0)
    handle = FakeHandle(at_first(1, always(output(error="rerouted", load=load))))
    assert ids(run(handle)) == whole()
    assert [route.rerouted for route in handle.calls] == [0, 1]
    assert len({route.request_id for route in handle.calls}) == len(set(handle.chosen)) == 2
    assert handle.core.loads.queue_ahead(handle.chosen[0]) == 1_000_000
    assert (handle.core.counters.rerouted, handle.after_first_token) == (1, [])


@pytest.mark.parametrize(("received", "shown", "reason"), [(6, (), "length"), (4, (whole()[3],), "stop")])
def test_an_answer_complete_before_the_loss_is_not_resent(received: int, shown: tuple[int, ...], reason: str) -> None:
    """A replica that dies after the last token, or a shown stop token, before its report needs no second call."""
    handle = FakeHandle(lost_once(received, error=ActorDiedError()))
    got = run(handle, shown_stop_token_ids=shown)
    assert (ids(got), got[-1].finish_reason) == (whole()[:received], reason)
    assert (len(handle.calls), handle.after_first_token) == (1, [])


@pytest.mark.parametrize("chunks", [always(ActorDiedError()), always(LEAVING)], ids=["die", "leave"])
def test_when_all_replicas_are_lost_the_client_is_told_to_come_back(chunks: Chunks) -> None:
    """After a bounded number of attempts, each avoiding the lost ones, the client gets 503 with Retry-After."""
    handle = FakeHandle(chunks)
    with pytest.raises(Overloaded) as caught:
        run(handle)
    assert caught.value.retry_after_s
    assert len(handle.calls) == MAX_ATTEMPTS
    assert len(handle.after_first_token) == MAX_ATTEMPTS - 1
    assert len(set(handle.calls[-1].avoid)) == MAX_ATTEMPTS - 1


@pytest.mark.parametrize(("apart_s", "attempts"), [(19.0, MAX_ATTEMPTS), (21.0, MOST_LOSSES)])
def test_losses_long_apart_are_no_outage(apart_s: float, attempts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long wait or answer may meet four deaths, also where machines are taken away now and then; ten end it."""
    now_s = time.perf_counter()

    async def dies(call: EngineRequest, replica: str) -> Any:
        nonlocal now_s
        now_s += apart_s
        raise ActorDiedError
        yield

    monkeypatch.setattr("serve_app.generation.dispatch.time.perf_counter", lambda: now_s)
    handle = FakeHandle(dies, replicas=[f"r{number}" for number in range(2 * MOST_LOSSES)])
    with pytest.raises(Overloaded):
        run(handle)
    assert len(handle.calls) == attempts


def test_a_stream_outlives_any_number_of_replicas_that_leave_in_order() -> None:
    """A rolling update moves a long stream once per replica: each replica's tokens before it left are progress.

    docs: failures
    """

    async def chunks(call: EngineRequest, replica: str) -> Any:
        async for chunk in answer(call, replica, 2 if call.sampling.max_tokens > 2 else None):
            yield chunk
        if call.sampling.max_tokens > 2:
            yield LEAVING

    handle = FakeHandle(chunks)
    assert ids(run(handle, max_tokens=4 * MAX_ATTEMPTS)) == whole(4 * MAX_ATTEMPTS)
    assert len({route.request_id for route in handle.calls}) == 2 * MAX_ATTEMPTS
    assert len(handle.after_first_token) == 2 * MAX_ATTEMPTS - 1
    assert not any(route.dead for route in handle.calls), "a leaving replica can export KV until it ends"


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        (always(output(error="too_long", message="too long")), ContextLengthExceeded),
        (always(output(error="failed", message="bad")), GenerationFailed),
        (always(output(error="timeout", message="took too long")), GenerationFailed),
        (always(RayTaskError("generate", "Traceback: secret", ValueError("x"))), GenerationFailed),
    ],
    ids=["too long", "failed", "timeout", "exception"],
)
def test_refusals_and_faults_become_client_errors(chunks: Chunks, error: type[Exception]) -> None:
    """Neither is retried, and a fault inside the replica's code reveals nothing of it."""
    handle = FakeHandle(chunks)
    with pytest.raises(error) as caught:
        run(handle)
    assert "secret" not in str(caught.value)
    assert len(handle.calls) == 1


@pytest.mark.parametrize("received", [0, 2])
def test_a_grammar_that_fails_in_the_answer_is_the_clients_to_change(received: int) -> None:
    """The error names the request's field; no other replica is asked."""

    async def chunks(call: EngineRequest, replica: str) -> Any:
        if received:
            yield output((5,) * received, FirstToken(0))
        yield output(error="grammar", message="it takes too much work")

    handle = FakeHandle(chunks)
    with pytest.raises(InvalidRequest, match="response_format cannot be followed: it takes too much work") as caught:
        run(handle)
    assert (caught.value.param, len(handle.calls)) == ("response_format", 1)


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
@pytest.mark.parametrize("before", [0, 3, 9])
def test_a_lost_replicas_part_of_a_prompts_logprobs_is_not_told_again(before: int, max_tokens: int) -> None:
    """The next replica tells all of them, from which the rest is taken; none at all once the answer has begun."""
    told = tuple(TokenLogprob(-float(token)) for token in range(1, 10))

    async def tells(call: EngineRequest, replica: str) -> Any:
        assert not call.reads_kv
        for at in range(0, len(told), 2):
            yield output(prompt_logprobs=told[at : at + 2])
        if call.sampling.max_tokens:
            async for chunk in answer(call, replica):
                yield chunk
        else:
            yield output((), FirstToken(0), "length")

    async def breaks(call: EngineRequest, replica: str) -> Any:
        if before:
            yield output(prompt_logprobs=told[:before])

    handle = FakeHandle(at_first(1, breaks, tells))
    got = run(handle, max_tokens, prompt_logprobs=0)
    assert tuple(one for tokens in got for one in tokens.prompt_logprobs) == told
    assert ids(got) == whole(max_tokens)
    assert (got[-1].finish_reason, len(handle.calls)) == ("length", 2)
    assert len([tokens for tokens in got if tokens.first is not None]) == 1


def test_an_answer_that_goes_on_elsewhere_asks_for_no_logprobs_of_its_prompt() -> None:
    """They are told before its first token, and its own tokens in the prompt are none of the client's."""
    handle = FakeHandle(lost_once(2))
    run(handle, prompt_logprobs=3)
    first, second = handle.calls
    assert [call.sampling.prompt_logprobs for call in (first, second)] == [3, None]
    assert (first.reads_kv, second.reads_kv) == (False, True)


BREAKS = st.lists(st.lists(st.integers(0, 33), max_size=MOST_BREAKS), min_size=1, max_size=6)
"""For each choice, the numbers of tokens after which its calls break."""


@pytest.fixture(scope="module")
def simulated(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CallCrashes]:
    directory = tmp_path_factory.mktemp("crashes")
    with call_crashes("simulated", demo_model_path, directory, random.Random(0)) as crashes:
        yield crashes


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), stops=st.booleans(), breaks=BREAKS)
def test_an_answer_whose_calls_break_is_the_undisturbed_one(
    simulated: CallCrashes, seed: int, stops: bool, breaks: list[list[int]]
) -> None:
    """Text, finish reasons, their order and usage, for every option at once; simulated tokens. (docs: failures)"""

    async def ask() -> tuple[Reply | Broken, Reply | Broken]:
        drawn = Questions(random.Random(seed))
        question = drawn.draw()
        wanted, generations = await simulated.prepare(question)
        expected = await simulated.answer(wanted, generations)
        if stops:
            assert isinstance(expected, Reply)
            wanted, _ = await simulated.prepare(drawn.with_stops(question, expected))
            expected = await simulated.answer(wanted, generations)
        return expected, await simulated.answer(wanted, generations, breaks)

    expected, got = asyncio.run(ask())
    assert isinstance(expected, Reply)
    assert got == expected


def test_the_real_engines_answers_survive_breaks(tiny_model_path: Path, tmp_path: Path) -> None:
    """The same holds for the real model in float32, with adapters: nothing is lost or cut.

    Nothing is altered either, because no two likeliest tokens of these answers are so close that rounding swaps them.
    """
    rng = random.Random(11)
    with call_crashes("torch", tiny_model_path, tmp_path, rng) as crashes:
        compared = asyncio.run(break_calls(crashes, Questions(rng, has_logits=True), rng, 20))
    assert len(compared) >= 16
    assert [answers for answers in compared if len(set(answers)) > 1] == []


def test_an_altered_answer_is_found(simulated: CallCrashes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: without sending the received tokens, answers differ."""
    monkeypatch.setattr("serve_app.generation.dispatch._resumed", lambda generation, *_: generation)
    rng = random.Random(3)
    compared = asyncio.run(break_calls(simulated, Questions(rng), rng, 20))
    assert all(isinstance(alone, Reply) and alone == under_load for alone, under_load, _ in compared)
    assert any(alone != with_breaks for alone, _, with_breaks in compared)
