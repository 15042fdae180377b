"""Outputs of the engine's thread on their way to the event loop's consumers."""

from __future__ import annotations

import asyncio
from collections import deque

from serve_app.engine.protocol import EngineOutput


class TokenStream:
    """Outputs of one request that its consumer has not taken yet; tokens that wait together leave together."""

    __slots__ = ("_outputs", "_ready")

    def __init__(self) -> None:
        self._outputs: deque[EngineOutput] = deque()
        self._ready = asyncio.Event()

    def push(self, output: EngineOutput) -> None:
        """Add one output and wake the consumer."""
        self._outputs.append(output)
        self._ready.set()

    async def take(self) -> list[EngineOutput]:
        """Wait for outputs and return all that there are, oldest first."""
        await self._ready.wait()
        self._ready.clear()
        taken = list(self._outputs)
        self._outputs.clear()
        return taken
