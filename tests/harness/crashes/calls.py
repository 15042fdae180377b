"""Calls to engines in this process break at random tokens, in the ways in which Ray loses calls.

The ingress' own dispatcher, router and preparation of requests send them again, over a stand-in for the Serve handle.
A break loses the tokens that the replica computed after it, and sometimes the replica's cache, as a crash does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import structs
from ray.exceptions import ActorDiedError, ActorUnavailableError, NodeDiedError, OwnerDiedError, RpcError
from ray.serve._private.common import RequestMetadata
from ray.serve.handle import DeploymentResponse

from router.core import RoutingCore
from router.serve.core_registry import RecentDecisions
from router.settings import RouterSettings
from serve_app.api.openai.request import parse_chat, parse_completion
from serve_app.api.request import GenerateRequest
from serve_app.engine.protocol import (
    Engine,
    EngineOutput,
    EngineRequest,
    ReplyTo,
    outputs_of_wire,
    request_of_wire,
    to_wire,
)
from serve_app.engine.token_channel import TokenInbox, TokenStream
from serve_app.errors import WarmpathError
from serve_app.generation.answer import ChoiceReader, Piece, PieceSink, choice_pieces
from serve_app.generation.dispatch import MAX_ATTEMPTS, Dispatcher
from serve_app.generation.prepare import Preparer
from serve_app.replica.running_calls import RunningCalls
from serve_app.structured.matcher import Matchers
from serve_app.tenants import DEFAULT_TENANT, Tenant
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.harness.crashes.questions import CHAT, MOST_TOKENS, Broken, Question, Questions, Reply

LOSSES = (
    ActorDiedError(), ActorUnavailableError("gone", None), NodeDiedError("gone"), OwnerDiedError("00", None, ""),
    RpcError("broken"), None,
)  # fmt: skip
"""The errors of a lost call; None: it ends as if it were complete."""

MOST_BREAKS = MAX_ATTEMPTS - 1
"""The breaks of one generation; one more is an outage."""
AT_ONCE = 16
Answers = tuple[Reply | Broken, Reply | Broken, Reply | Broken]
"""The answers to one question: alone, beside others, and beside others with breaks."""


class BreakingReplicas:
    """A Serve handle of engines in this process, for one event loop.

    ``breaks``: by generation id, the tokens after which each of its calls breaks; later calls are not broken.
    """

    def __init__(self, engines: Sequence[Engine], core: RoutingCore, matchers: Matchers, rng: random.Random) -> None:
        self._matchers = matchers
        self._engines = {f"replica-{number}": engine for number, engine in enumerate(engines)}
        self._core = core
        self._random = rng
        self._breaks: dict[str, _Break] = {}
        self._running = {
            name: RunningCalls(self, engine.cancel)  # type: ignore[arg-type]
            for name, engine in self._engines.items()
        }
        self.inbox = TokenInbox(ReplyTo())
        self.decisions = RecentDecisions()
        self.breaks: dict[str, list[int]] = {}
        self.broken = 0
        core.update_replicas(list(self._engines))

    def options(self, **_: Any) -> BreakingReplicas:
        """Return the handle itself: the method is always the same."""
        return self

    def remote(self, request: EngineRequest) -> DeploymentResponse[bytes]:
        """Send a call to the engine that the router chooses."""
        name, decision = request.request_id, self._core.decide(request)
        assert decision is not None
        self.decisions.add(name, decision)
        call = request_of_wire(to_wire(structs.replace(request, decision=decision)))
        own = self.breaks.get(name.rpartition(".")[0], [])
        result = _Result(self._answer(call, decision.replica_id, own.pop(0) if own else None))
        metadata = RequestMetadata(request_id=name, internal_request_id=name)
        assigned = asyncio.get_running_loop().create_task(result.assigned())
        return DeploymentResponse(assigned, metadata, _is_router_running_in_separate_loop=False)

    def send(self, to: ReplyTo, outputs: Sequence[EngineOutput]) -> bool:
        """Deliver a step's outputs to the ingress, unless their calls are broken."""
        assert to == self.inbox.reply_to
        for output in outputs_of_wire(to_wire(outputs)):
            planned = self._breaks.get(output.request_id)
            if planned is None:
                self.inbox.deliver([output])
            elif not planned.reached.is_set():
                self.inbox.deliver(planned.pass_on(output))
        return True

    async def _answer(self, call: EngineRequest, replica_id: str, after: int | None) -> bytes:
        """Return the replica's result of the call, or break the call after this many tokens."""
        engine, loop, calls = self._engines[replica_id], asyncio.get_running_loop(), self._running[replica_id]
        call_id, planned = call.request_id, _Break(after or 0)
        running = calls.begin(call, TokenStream(call.interval_s))
        if after is not None:
            self._breaks[call_id] = planned

        def hear(outputs: Sequence[EngineOutput]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(calls.deliver, outputs)

        waiting = asyncio.ensure_future(planned.reached.wait())
        try:
            matcher = self._matchers.matcher(call.grammar) if call.grammar else None
            engine.submit(structs.replace(call, matcher=matcher), hear)
            await asyncio.wait((waiting, running.end), return_when=asyncio.FIRST_COMPLETED)
            if planned.reached.is_set():
                self._break(engine)
                return to_wire(EngineOutput(call_id, seq=planned.sent))
            end = running.end.result()
            assert not end.error, end
            return to_wire(end)
        finally:
            waiting.cancel()
            self._breaks.pop(call_id, None)
            calls.forget(call_id)
            engine.cancel(call_id)

    def _break(self, engine: Engine) -> None:
        self.broken += 1
        if self._random.random() < 0.2:
            engine.reset_prefix_cache()
        loss = self._random.choice(LOSSES)
        if loss is not None:
            raise loss.with_traceback(None)


class _Break:
    """The point where a call breaks, in tokens. ``sent``: the chunks before it."""

    def __init__(self, after: int) -> None:
        self.reached = asyncio.Event()
        self.sent = 0
        self._left = after

    def pass_on(self, chunk: EngineOutput) -> list[EngineOutput]:
        """Return the part of a chunk that still arrives."""
        kept = chunk.token_ids[: self._left]
        self._left -= len(kept)
        if len(kept) < len(chunk.token_ids) or chunk.finish_reason is not None:
            self.reached.set()
            if not kept:
                return []
        self.sent += 1
        return [structs.replace(chunk, token_ids=kept, logprobs=chunk.logprobs[: len(kept)], finish_reason=None)]


class _Result:
    """A replica's result of a call, in the form that Ray Serve's response expects."""

    def __init__(self, end: Coroutine[Any, Any, bytes]) -> None:
        self._end = asyncio.get_running_loop().create_task(end)

    async def assigned(self) -> _Result:
        return self

    async def get_async(self) -> bytes:
        return await self._end

    def cancel(self) -> None:
        """End the call, as Serve does at the replica."""
        self._end.cancel()


class CallCrashes:
    """Engines behind one dispatcher: answers questions, undisturbed and with breaks. For use in one event loop."""

    def __init__(
        self,
        engines: Sequence[Engine],
        block_size: int,
        preparer: Preparer,
        tokenizer: PromptTokenizer,
        matchers: Matchers,
        rng: random.Random,
        kind: type[BreakingReplicas] = BreakingReplicas,
    ) -> None:
        self.core = core = RoutingCore("crashes", RouterSettings(block_size=block_size))
        self.replicas = kind(engines, core, matchers, rng)
        self._preparer = preparer
        self._tokenizer = tokenizer
        self._number = 0
        self._dispatcher = Dispatcher(
            self.replicas,
            core, self.replicas.decisions, block_size, lambda _: None, "", self.replicas.inbox,
        )  # fmt: skip

    async def prepare(self, question: Question) -> tuple[GenerateRequest, list[EngineRequest]]:
        """Return a question as the ingress parses it, with the seed that it gets."""
        parse = parse_chat if question.path == CHAT else parse_completion
        wanted = parse(msgspec.json.encode(dict(question.body)))
        return wanted, await self._preparer.prepare(wanted, Tenant(DEFAULT_TENANT), "prepared")

    async def answer(
        self, wanted: GenerateRequest, generations: Sequence[EngineRequest], breaks: Sequence[Sequence[int]] = ()
    ) -> Reply | Broken:
        """Answer. ``breaks``: for each choice, the tokens after which each of its calls breaks."""
        return (await self.answered(wanted, generations, breaks))[0]

    async def answered(
        self, wanted: GenerateRequest, generations: Sequence[EngineRequest], breaks: Sequence[Sequence[int]] = ()
    ) -> tuple[Reply | Broken, list[str]]:
        """Return what ``answer`` does, and the name of each choice's generation."""
        asked = []
        for index, generation in enumerate(generations):
            self._number += 1
            request_id = f"call-{self._number}"
            if index < len(breaks):
                self.replicas.breaks[request_id] = list(breaks[index][:MOST_BREAKS])
            asked.append(structs.replace(generation, request_id=request_id))
        names = [generation.request_id for generation in asked]
        try:
            read = await asyncio.gather(
                *(self._choice(index, generation, wanted) for index, generation in enumerate(asked))
            )
        except WarmpathError as error:
            return Broken(repr(error)), names
        finally:
            for generation in asked:
                self.replicas.breaks.pop(generation.request_id, None)
        choices = tuple((text, reason) for text, reason, _ in read)
        prompt_tokens = sum(len(generation.token_ids) for generation in asked[:: wanted.n])
        return Reply(choices, prompt_tokens, sum(tokens for _, _, tokens in read)), names

    async def _choice(self, index: int, generation: EngineRequest, wanted: GenerateRequest) -> tuple[str, str, int]:
        text, reason, tokens = "", "", 0

        def write(piece: Piece) -> None:
            nonlocal text, reason, tokens
            text += piece.text
            tokens += piece.new_tokens
            reason = piece.finish_reason or reason

        sink, moods = PieceSink(), random.Random(generation.request_id)
        sink.open, sink.write = lambda: moods.random() < 0.8, write  # a client that mostly keeps up
        decoder, include_stop = self._tokenizer.decoder(), wanted.include_stop_str_in_output
        reader = ChoiceReader(index, generation, decoder, wanted.stop, include_stop=include_stop)
        async for piece in choice_pieces(generation, self._dispatcher, reader, sink):
            write(piece)
        return text, reason, tokens


async def break_calls(crashes: CallCrashes, questions: Questions, rng: random.Random, breaks: int) -> list[Answers]:
    """Ask questions alone, then many at once, then many at once with breaks, until this many calls have broken."""
    compared: list[Answers] = []
    before = crashes.replicas.broken
    while crashes.replicas.broken - before < breaks:
        asked = []
        for number in range(AT_ONCE):
            question = questions.draw()
            prepared = await crashes.prepare(question)
            alone = await crashes.answer(*prepared)
            if number % 2 and isinstance(alone, Reply):
                question = questions.with_stops(question, alone)
                # A missing seed is drawn once, so that all compared answers use the same one.
                prepared = (await crashes.prepare(question))[0], prepared[1]
                alone = await crashes.answer(*prepared)
            asked.append((prepared, alone))
        loaded = await asyncio.gather(*(crashes.answer(*prepared) for prepared, _ in asked))
        breaking = (crashes.answer(*prepared, break_points(rng, len(prepared[1]))) for prepared, _ in asked)
        broken = await asyncio.gather(*breaking)
        compared.extend(zip((alone for _, alone in asked), loaded, broken, strict=True))
    return compared


def break_points(rng: random.Random, choices: int) -> list[list[int]]:
    """Return, for each choice, the numbers of tokens after which its successive calls break."""
    return [[rng.randrange(MOST_TOKENS // 2) for _ in range(rng.randrange(MOST_BREAKS + 1))] for _ in range(choices)]
