"""A Serve handle with a real router, and replicas that are one function: sound, lost, or as a test defines."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs
from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import RequestMetadata
from ray.serve.handle import DeploymentResponse

from router.core import RoutingCore
from router.protocol.block_hash import PrefixScope, extend_chain
from router.serve.core_registry import RecentDecisions
from router.settings import RouterSettings
from serve_app.engine.protocol import (
    EngineOutput,
    EngineRequest,
    FirstToken,
    ReplyTo,
    SamplingParams,
    request_of_wire,
    to_wire,
)
from serve_app.engine.token_channel import TokenInbox
from serve_app.generation.dispatch import Dispatcher
from serve_app.tracing import Tracer
from tests.harness.eventually import let_others_run
from tests.serve_app.generation.outputs import output

BLOCK = 4
SCOPE = PrefixScope("m", "", b"salt")
ROOT = SCOPE.root(b"secret")
Chunks = Callable[[EngineRequest, str], AsyncIterator[EngineOutput]]


class FakeResult:
    """A replica's end of a call, behind Ray's own ``DeploymentResponse``: its chunks go to the inbox, then it ends."""

    def __init__(self, call_id: str, replica: str, chunks: AsyncIterator[EngineOutput], inbox: TokenInbox) -> None:
        self._call_id = call_id
        self._replica = replica
        self._chunks = chunks
        self._inbox = inbox
        self.cancelled = False

    async def get_async(self) -> bytes:
        sent = 0
        async for chunk in self._chunks:
            chunk = structs.replace(chunk, request_id=self._call_id, seq=sent)
            if chunk.error:
                return to_wire(chunk)
            self._inbox.deliver([chunk])
            sent += 1
            if chunk.finish_reason is not None:
                return to_wire(output(seq=sent, finish_reason=chunk.finish_reason))
            await let_others_run()
        raise ActorUnavailableError("it broke off", None)

    def cancel(self) -> None:
        self.cancelled = True


class FakeHandle:
    """A Serve handle with a real RoutingCore as router; counts the calls that were sent again."""

    def __init__(
        self, chunks: Chunks, replicas: Sequence[str] = ("a", "b", "c", "d", "e"), tracer: Tracer | None = None
    ) -> None:
        self.core = RoutingCore("router", RouterSettings(block_size=BLOCK))
        self.core.update_replicas(list(replicas))
        self.chunks = chunks
        self.decisions = RecentDecisions()
        self.calls: list[EngineRequest] = []
        self.results: list[FakeResult] = []
        self.chosen: list[str] = []
        self.after_first_token: list[bool] = []
        """An entry for each call that was sent again."""
        self.assigned = asyncio.Event()
        self.inbox = TokenInbox(ReplyTo())
        self.dispatcher = Dispatcher(
            self,  # type: ignore[arg-type]
            self.core, self.decisions, BLOCK, self.after_first_token.append, "me", self.inbox, tracer,
        )  # fmt: skip

    def options(self, **_: Any) -> FakeHandle:
        return self

    def remote(self, request: EngineRequest) -> Any:
        self.calls.append(request)
        decision = self.core.decide(request)
        assert decision is not None
        replica = decision.replica_id
        self.chosen.append(replica)
        self.decisions.add(request.request_id, decision)
        call = request_of_wire(to_wire(structs.replace(request, decision=decision)))
        self.results.append(FakeResult(request.request_id, replica, self.chunks(call, replica), self.inbox))
        return called(self._assign(self.results[-1]))

    async def _assign(self, result: FakeResult) -> FakeResult:
        self.assigned.set()
        return result


def called(assignment: Coroutine[Any, Any, Any]) -> Any:
    """Return the response of a Serve handle with its router in the caller's loop."""
    metadata = RequestMetadata(request_id="r", internal_request_id="r")
    task = asyncio.get_running_loop().create_task(assignment)
    return DeploymentResponse(task, metadata, _is_router_running_in_separate_loop=False)


def generation(max_tokens: int = 6, public_blocks: int = 0) -> EngineRequest:
    token_ids = np.arange(10, dtype=np.int32)
    return EngineRequest(
        request_id="r",
        token_ids=token_ids,
        block_hashes=extend_chain(root_of(public_blocks), public_blocks, token_ids, BLOCK),
        scope=replace(SCOPE, public_blocks=public_blocks),
        root=root_of(public_blocks),
        placement_key=b"k" * 16,
        tenant="t",
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=11),
        order=7,
        session="s",
        grammar_field="response_format",
    )


def root_of(public_blocks: int) -> bytes:
    return b"p" * 16 + ROOT if public_blocks else ROOT


def run(
    handle: FakeHandle,
    max_tokens: int = 6,
    public_blocks: int = 0,
    deadline_s: float = math.inf,
    **sampling: Any,
) -> list[EngineOutput]:
    """Dispatch one generation and return all of its tokens; nothing stays reserved, however it ends."""

    async def collect() -> list[EngineOutput]:
        asked = structs.replace(generation(max_tokens, public_blocks), deadline_s=deadline_s)
        asked = structs.replace(asked, sampling=replace(asked.sampling, **sampling))
        return [tokens async for tokens in handle.dispatcher.generate(asked)]

    try:
        return asyncio.run(collect())
    finally:
        assert handle.core.state()["open_reservations"] == 0


def token_at(position: int) -> int:
    """Return the token of these tests' deterministic model, which depends on the position only."""
    return 100 + position


def ids(got: Sequence[EngineOutput]) -> list[int]:
    return [token for tokens in got for token in tokens.token_ids]


def whole(max_tokens: int = 6) -> list[int]:
    """Return the tokens of an undisturbed answer."""
    return [token_at(10 + i) for i in range(max_tokens)]


async def answer(call: EngineRequest, replica: str, stop_after: int | None = None) -> Any:
    """Yield a sound replica's chunks, two tokens each; optionally only the first ``stop_after`` tokens."""
    start = len(call.token_ids)
    tokens = [token_at(start + i) for i in range(call.sampling.max_tokens)][:stop_after]
    for i in range(0, len(tokens), 2):
        last = stop_after is None and i + 2 >= len(tokens)
        yield output(
            tuple(tokens[i : i + 2]),
            FirstToken(8) if i == 0 else None,
            finish_reason="length" if last else None,
        )


def at_first(calls: int, chunks: Chunks, then: Chunks = answer) -> Chunks:
    """Return replicas that answer this many first calls differently from all others."""
    first = itertools.repeat(chunks, calls)
    return lambda *call: next(first, then)(*call)


def lost_once(received: int, then: Chunks = answer, error: Exception | None = None) -> Chunks:
    """Return replicas of which the first loses its call after some tokens, by ``error`` if given; then ``then``."""

    async def lost(call: EngineRequest, replica: str) -> Any:
        async for chunk in answer(call, replica, received):
            yield chunk
        if error is not None:
            raise error

    return at_first(1, lost, then)


def always(outcome: EngineOutput | Exception) -> Chunks:
    """Return replicas that raise at every call, or answer it with one chunk."""

    async def chunks(call: EngineRequest, replica: str) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        yield outcome

    return chunks
