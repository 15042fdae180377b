"""The generations that run in a replica: an engine's step leaves in one message for each ingress that waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from serve_app.engine.protocol import EngineOutput, TokenLogprob
from serve_app.replica import messages as wire
from serve_app.replica.token_channel import Addressed, TokenSender
from serve_app.tracing.replica import ReplicaTrace


class TokenStream:
    """Holds outputs back: between the first and the last one something leaves every ``interval_s`` at most.

    ``trace`` sees each.
    """

    __slots__ = ("_due_s", "_interval_s", "_outputs", "_trace")

    def __init__(self, interval_s: float = 0.0, trace: ReplicaTrace | None = None) -> None:
        self._outputs: list[EngineOutput] = []
        self._interval_s = interval_s
        self._due_s = 0.0
        self._trace = trace

    def push(self, output: EngineOutput) -> EngineOutput | None:
        """Add one output; return all that may leave now as one, None where they wait for more."""
        if self._trace is not None:
            self._trace.saw(output)
        if self._interval_s:
            now_s = time.monotonic()
            if output.finish_reason is None and now_s < self._due_s:
                self._outputs.append(output)
                return None
            self._due_s = now_s + self._interval_s
        if not self._outputs:
            return output
        outputs, self._outputs = [*self._outputs, output], []
        return merged(outputs)


def merged(outputs: Sequence[EngineOutput]) -> EngineOutput:
    """Return outputs of one request, oldest first, as one: all tokens, the first one's figures, the last one's end."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    for output in outputs:
        token_ids += output.token_ids
        logprobs += output.logprobs
    first = next((output for output in outputs if output.cached_tokens is not None), None)
    last = replace(outputs[-1], token_ids=token_ids, logprobs=logprobs)
    if first is None:
        return last
    return replace(last, cached_tokens=first.cached_tokens, queue_s=first.queue_s, save=first.save)


class RunningCall:
    """One generation. ``sent``: its chunks so far. ``end``: the last one, once no more tokens come.

    ``reply_to``: None where nobody reads it.
    """

    __slots__ = ("end", "reply_to", "sent", "stream")

    def __init__(self, reply_to: wire.ReplyTo | None, stream: TokenStream) -> None:
        self.reply_to = reply_to
        self.stream = stream
        self.sent = 0
        self.end: asyncio.Future[wire.GenerateChunk] = asyncio.get_running_loop().create_future()

    def finish(self, chunk: wire.GenerateChunk) -> None:
        """Say how it ended; what ended before stays as it is."""
        if not self.end.done():
            self.end.set_result(chunk)


class RunningCalls:
    """All of them, for the replica's loop. ``cancel`` ends one in the engine; ``leaving``: whether the replica ends."""

    def __init__(
        self, replica_id: str, sender: TokenSender, cancel: Callable[[str], None], leaving: Callable[[], bool]
    ) -> None:
        self._replica_id = replica_id
        self._sender = sender
        self._cancel = cancel
        self._leaving = leaving
        self._calls: dict[str, RunningCall] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def begin(self, call_id: str, reply_to: wire.ReplyTo | None, stream: TokenStream) -> RunningCall:
        """Take outputs of a generation that is about to be submitted."""
        call = self._calls[call_id] = RunningCall(reply_to, stream)
        return call

    def forget(self, call_id: str) -> None:
        """Take no more outputs of a generation."""
        self._calls.pop(call_id, None)

    def break_off(self, message: str) -> None:
        """End every generation, so that its ingress goes on with it elsewhere; nothing of it runs on here."""
        calls, self._calls = self._calls, {}
        for call_id, call in calls.items():
            self._cancel(call_id)
            call.finish(self._failure("unavailable", message, call))

    def deliver(self, outputs: Sequence[EngineOutput]) -> None:
        """Send a step's outputs to those who wait for them; those of other requests are nobody's."""
        messages: dict[wire.ReplyTo, list[Addressed]] = {}
        for output in outputs:
            call = self._calls.get(output.request_id)
            ready = call.stream.push(output) if call is not None else None
            if call is None or ready is None:
                continue
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

    def _lost(self, call_id: str, chunk: wire.GenerateChunk) -> None:
        """End a generation whose tokens its ingress does not take; it may ask another replica for the rest."""
        call = self._calls[call_id]
        if not call.end.done():
            call.sent = chunk.seq
            call.finish(self._failure("unavailable", "its tokens are not taken in time", call))
            self._cancel(call_id)

    def _chunk(self, output: EngineOutput, call: RunningCall) -> wire.GenerateChunk:
        if output.finish_reason == "timeout":
            return self._failure("timeout", output.error, call)
        if output.finish_reason == "error":
            # A stopping replica fails what it could not finish; another replica can take it over.
            return self._failure("unavailable" if self._leaving() else "failed", output.error, call)
        return wire.GenerateChunk(
            token_ids=output.token_ids,
            seq=call.sent,
            replica_id=self._replica_id if output.cached_tokens is not None else "",
            cached_tokens=output.cached_tokens,
            queue_s=output.queue_s,
            finish_reason=output.finish_reason,
            save=output.save,
            logprobs=output.logprobs,
        )

    def _failure(self, error: wire.ChunkError, message: str, call: RunningCall) -> wire.GenerateChunk:
        return wire.GenerateChunk(seq=call.sent, replica_id=self._replica_id, error=error, message=message)
