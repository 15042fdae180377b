"""Outputs of one request on their way from the engine: those that become ready in an interval leave as one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from serve_app.engine.protocol import EngineOutput, TokenLogprob
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
