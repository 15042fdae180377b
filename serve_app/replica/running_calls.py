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

from serve_app.engine.protocol import EngineOutput, EngineRequest, Prefilled, ReplyTo
from serve_app.engine.token_channel import TokenSender, TokenStream
from serve_app.ray_compat import find_serve_actor

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
    """A running request. ``sent``: number of its outputs so far, ``tokens``: of their tokens. ``end``: the call's.

    ``stream``: what holds outputs back or looks at them, None if nothing does.
    """

    request: EngineRequest
    stream: TokenStream | None
    end: asyncio.Future[EngineOutput]
    sent: int = 0
    tokens: int = 0

    def finish(self, last: EngineOutput) -> None:
        """End the call, unless it has ended before. ``last``: an output; the caller has its tokens already."""
        if not self.end.done():
            self.end.set_result(EngineOutput(
                self.request.request_id, finish_reason=last.finish_reason, error=last.error, message=last.message,
                seq=self.sent,
            ))  # fmt: skip


class RunningCalls:
    """The generations of the replica's loop. ``cancel`` ends one in the engine; ``closed``: the replica is ending."""

    def __init__(self, sender: TokenSender, cancel: Callable[[str], None]) -> None:
        self.closed = False
        self._sender = sender
        self._cancel = cancel
        self._calls: dict[str, RunningCall] = {}
        self._left: OrderedDict[str, None] = OrderedDict()
        self._prefilled: OrderedDict[str, asyncio.Future[Prefilled]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def begin(self, request: EngineRequest, stream: TokenStream | None = None) -> RunningCall:
        """Accept outputs of a request that is about to be submitted."""
        call = RunningCall(request, stream, asyncio.get_running_loop().create_future())
        self._calls[request.request_id] = call
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
            for caller in {call.request.caller for call in self._calls.values()}:
                if not await asyncio.to_thread(lives, caller):
                    ended = [call_id for call_id, call in self._calls.items() if call.request.caller == caller]
                    logger.warning("%s died; %d of its requests end", caller, len(ended))
                    for call_id in ended:
                        self._cancel(call_id)

    def break_off(self) -> None:
        """End every generation here, so that its ingress continues it on another replica."""
        self.closed = True
        calls, self._calls = self._calls, {}
        for call_id, call in calls.items():
            self._cancel(call_id)
            call.finish(EngineOutput(call_id, error="unavailable", message=STOPPING))

    def deliver(self, outputs: Sequence[EngineOutput]) -> None:
        """Send a step's outputs to their ingresses; outputs of other requests are dropped."""
        messages: dict[ReplyTo, list[EngineOutput]] = {}
        for output in outputs:
            if output.prefilled is not None:
                end = self._prefilled.get(output.request_id)
                if end is not None and not end.done():
                    end.set_result(output.prefilled)
            call = self._calls.get(output.request_id)
            if call is None:
                continue
            ready = output if call.stream is None else call.stream.push(output)
            if ready is None:
                continue
            call.tokens += len(ready.token_ids)
            if ready.error == "failed" and self.closed:
                # A stopping replica fails its unfinished requests; another replica can take them over.
                ready.error = "unavailable"
            if not ready.error and call.request.reply_to is not None:
                ready.seq = call.sent
                messages.setdefault(call.request.reply_to, []).append(ready)
                call.sent += 1
            if ready.finish_reason is not None:
                call.finish(ready)
        for reply_to, sent in messages.items():
            for output in self._unsent(reply_to, sent):
                self._lost(output)

    def _unsent(self, reply_to: ReplyTo, outputs: Sequence[EngineOutput]) -> Sequence[EngineOutput]:
        """Send outputs to an ingress, and return those that it does not get."""
        try:
            return () if self._sender.send(reply_to, outputs) else outputs
        except Exception:  # one that cannot be written down is of one request, and those beside it are of others
            if len(outputs) > 1:
                return [lost for output in outputs for lost in self._unsent(reply_to, [output])]
            logger.exception("an output of request %s cannot be sent", outputs[0].request_id)
            return outputs

    def _end_left(self) -> None:
        for call_id in self._calls.keys() & self._left.keys():
            self._cancel(call_id)

    def _lost(self, output: EngineOutput) -> None:
        """End a generation with tokens that its ingress did not get; it may ask another replica for the rest."""
        call = self._calls[output.request_id]
        if not call.end.done():
            call.sent = output.seq
            call.finish(EngineOutput("", error="unavailable", message="its ingress did not get its tokens"))
            self._cancel(output.request_id)
