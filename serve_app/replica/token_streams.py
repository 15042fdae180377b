"""Outputs of the engine's thread on their way to the event loop's consumers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from serve_app.engine.protocol import EngineOutput, TokenLogprob
from serve_app.tracing.replica import ReplicaTrace


class TokenStream:
    """Outputs of one request that its consumer has not taken yet; tokens that wait together leave together.

    Between the first output and the last one the consumer is woken every ``interval_s`` at most. ``trace`` sees each.
    """

    __slots__ = ("_due_s", "_interval_s", "_outputs", "_ready", "_trace")

    def __init__(self, interval_s: float = 0.0, trace: ReplicaTrace | None = None) -> None:
        self._outputs: deque[EngineOutput] = deque()
        self._ready = asyncio.Event()
        self._interval_s = interval_s
        self._due_s = 0.0
        self._trace = trace

    def push(self, output: EngineOutput) -> None:
        """Add one output, and wake the consumer where it is due."""
        self._outputs.append(output)
        if self._trace is not None:
            self._trace.saw(output)
        if output.finish_reason is not None or time.monotonic() >= self._due_s:
            self._ready.set()

    async def take(self) -> list[EngineOutput]:
        """Wait for outputs and return all that there are, oldest first."""
        await self._ready.wait()
        self._ready.clear()
        taken = list(self._outputs)
        self._outputs.clear()
        self._due_s = time.monotonic() + self._interval_s
        return taken


def merged(outputs: Sequence[EngineOutput]) -> EngineOutput:
    """Return outputs of one request, oldest first, as one: all tokens, the first one's figures, the last one's end."""
    if len(outputs) == 1:
        return outputs[0]
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
