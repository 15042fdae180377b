"""A replica's running generations: the outputs of an engine's step leave in one message per waiting ingress.

They end when their ingress has died or reports them as abandoned. For calls between actors, Ray lets a streaming call
continue after its caller's death. Ray, not the ingress, is asked whether it lives, as a busy ingress is not dead. Ray
also loses one cancellation in some thousands, at the moment of the call's start, and the call would run on. So the
ingress reports abandoned calls again.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ray.exceptions import RayError

from serve_app.engine.protocol import GRAMMAR_FAILED, EngineOutput, Prefilled
from serve_app.ray_compat import find_serve_actor
from serve_app.replica import messages as wire
from serve_app.replica.token_channel import Addressed, TokenSender, TokenStream

logger = logging.getLogger(__name__)

STOPPING = "the replica is being stopped"

LOOK_EVERY_S = 1.0

END_S = 10.0
"""How long an abandoned generation may take to end: a long step of the engine."""

_MAX_LEFT = 8192
"""Number of abandoned calls to remember, for those that have not arrived yet; and of ended ones."""


def actor_lives(name: str) -> bool:
    """Return False once Ray knows that a Serve actor of that name has died; "" is no actor, and always lives."""
    if not name:
        return True
    try:
        find_serve_actor(name)
    except ValueError:
        return False
    except RayError:
        logger.warning("Ray does not know whether %s lives", name, exc_info=True)
    return True


@dataclass(slots=True, eq=False)
class RunningCall:
    """One generation. ``sent``: number of its chunks so far, ``tokens``: of their tokens. ``end``: its last chunk.

    ``reply_to``: None if no ingress reads it. ``caller``: the calling Serve actor, "" if there is none.
    """

    reply_to: wire.ReplyTo | None
    stream: TokenStream
    caller: str
    end: asyncio.Future[wire.GenerateChunk]
    sent: int = 0
    tokens: int = 0

    def finish(self, chunk: wire.GenerateChunk) -> None:
        """Set its end, unless it has ended before."""
        if not self.end.done():
            self.end.set_result(chunk)


class RunningCalls:
    """The generations of the replica's loop. ``cancel`` ends one in the engine; ``closed``: the replica is ending."""

    def __init__(self, replica_id: str, sender: TokenSender, cancel: Callable[[str], None]) -> None:
        self.closed = False
        self._replica_id = replica_id
        self._sender = sender
        self._cancel = cancel
        self._calls: dict[str, RunningCall] = {}
        self._left: OrderedDict[str, None] = OrderedDict()
        self._prefilled: OrderedDict[str, asyncio.Future[Prefilled]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def begin(self, call_id: str, reply_to: wire.ReplyTo | None, stream: TokenStream, caller: str = "") -> RunningCall:
        """Accept outputs of a generation that is about to be submitted."""
        call = RunningCall(reply_to, stream, caller, asyncio.get_running_loop().create_future())
        self._calls[call_id] = call
        return call

    def submitted(self, call_id: str) -> None:
        """Note that the engine has a generation, and will report how far its prompt was computed."""
        self._prefilled[call_id] = asyncio.get_running_loop().create_future()
        if len(self._prefilled) > _MAX_LEFT:
            self._prefilled.popitem(last=False)

    async def prefilled(self, call_ids: Sequence[str]) -> list[Prefilled | None]:
        """Return what was done for the prompts of abandoned generations, once they ended in the engine.

        None: the engine never had it, it is too long ago, or its end is not known in time.
        """
        ends = [self._prefilled.get(call_id) for call_id in call_ids]
        if pending := [end for end in ends if end is not None]:
            await asyncio.wait(pending, timeout=END_S)
        for call_id in call_ids:
            self._prefilled.pop(call_id, None)
        return [end.result() if end is not None and end.done() else None for end in ends]

    def forget(self, call_id: str) -> None:
        """Accept no more outputs of a generation."""
        self._calls.pop(call_id, None)
        self._left.pop(call_id, None)

    def leave(self, call_ids: Sequence[str]) -> None:
        """End abandoned generations, also those that have not begun."""
        for call_id in call_ids:
            self._left[call_id] = None
            if len(self._left) > _MAX_LEFT:
                self._left.popitem(last=False)
        self._end_left()

    async def watch(self, lives: Callable[[str], bool] = actor_lives) -> None:
        """Repeatedly end abandoned generations and those of dead callers; ``lives`` may block."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._end_left()
            for caller in {call.caller for call in self._calls.values()}:
                if not await asyncio.to_thread(lives, caller):
                    ended = [call_id for call_id, call in self._calls.items() if call.caller == caller]
                    logger.warning("%s died; %d of its requests end", caller, len(ended))
                    for call_id in ended:
                        self._cancel(call_id)

    def break_off(self) -> None:
        """End every generation here, so that its ingress continues it on another replica."""
        self.closed = True
        calls, self._calls = self._calls, {}
        for call_id, call in calls.items():
            self._cancel(call_id)
            call.finish(self._failure("unavailable", STOPPING, call))

    def deliver(self, outputs: Sequence[EngineOutput]) -> None:
        """Send a step's outputs to their ingresses; outputs of other requests are dropped."""
        messages: dict[wire.ReplyTo, list[Addressed]] = {}
        for output in outputs:
            if output.prefilled is not None:
                end = self._prefilled.get(output.request_id)
                if end is not None and not end.done():
                    end.set_result(output.prefilled)
            call = self._calls.get(output.request_id)
            ready = call.stream.push(output) if call is not None else None
            if call is None or ready is None:
                continue
            call.tokens += len(ready.token_ids)
            chunk = self._chunk(ready, call)
            if not chunk.error and call.reply_to is not None:
                messages.setdefault(call.reply_to, []).append((output.request_id, chunk))
                call.sent += 1
            if chunk.error or chunk.finish_reason is not None:
                call.finish(wire.GenerateChunk(
                    seq=call.sent, replica_id=self._replica_id, finish_reason=chunk.finish_reason,
                    error=chunk.error, message=chunk.message,
                ))  # fmt: skip
        for reply_to, chunks in messages.items():
            if not self._sender.send(reply_to, chunks):
                for call_id, chunk in chunks:
                    self._lost(call_id, chunk)

    def _end_left(self) -> None:
        for call_id in self._calls.keys() & self._left.keys():
            self._cancel(call_id)

    def _lost(self, call_id: str, chunk: wire.GenerateChunk) -> None:
        """End a generation with tokens that its ingress did not accept; it may ask another replica for the rest."""
        call = self._calls[call_id]
        if not call.end.done():
            call.sent = chunk.seq
            call.finish(self._failure("unavailable", "its ingress does not read tokens in time", call))
            self._cancel(call_id)

    def _chunk(self, output: EngineOutput, call: RunningCall) -> wire.GenerateChunk:
        if output.finish_reason == "timeout":
            return self._failure("timeout", output.error, call)
        if output.finish_reason == "error" and output.error.startswith(GRAMMAR_FAILED):
            return self._failure("grammar", output.error.removeprefix(GRAMMAR_FAILED), call)
        if output.finish_reason == "error":
            # A stopping replica fails its unfinished requests; another replica can take them over.
            return self._failure("unavailable" if self.closed else "failed", output.error, call)
        return wire.GenerateChunk(
            token_ids=output.token_ids,
            seq=call.sent,
            replica_id=self._replica_id if output.first is not None else "",
            first=output.first,
            finish_reason=output.finish_reason,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
        )

    def _failure(self, error: wire.ChunkError, message: str, call: RunningCall) -> wire.GenerateChunk:
        return wire.GenerateChunk(seq=call.sent, replica_id=self._replica_id, error=error, message=message)
