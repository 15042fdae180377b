"""The shutdown of an ingress: refuse new requests, and give running answers time until their last byte is sent."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from serve_app.errors import GenerationFailed, Overloaded

LAST_EVENT_S = 2.0
"""The time for a client to receive the last event of a stream after its deadline."""

CODE = "server_stopping"


class Drain:
    """Stops an ingress. ``begun``: requests are refused; ``over``: running ones end; ``limits``: their timeouts."""

    def __init__(self) -> None:
        self.stopping = False
        self.over = False
        self.limits: set[asyncio.Timeout] = set()
        self._answers = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def refuse(self) -> None:
        """Raise Overloaded once the stop has begun."""
        if self.stopping:
            raise Overloaded("The server is stopping; send the request again later.", code=CODE, retry_after_s=5)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count an answer, from its request to its last byte."""
        self._answers += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._answers -= 1
            if not self._answers:
                self._idle.set()

    async def run(self, timeout_s: float) -> int:
        """Refuse requests from now on; return when no answer is running, with the number of answers ended early."""
        self.stopping = True
        if await self._idle_within(timeout_s):
            return 0
        self.over = True
        ended, now_s = self._answers, asyncio.get_running_loop().time()
        for limit in self.limits:
            limit.reschedule(now_s)
        await self._idle_within(LAST_EVENT_S)
        return ended

    async def _idle_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Deadline:
    """A request's deadline on ``time.perf_counter``, ``timeout_s`` after its arrival."""

    drain: Drain
    at_s: float
    timeout_s: float

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """End the block at the deadline, or when the ingress stops, with a WarmpathError."""
        drain = self.drain
        try:
            async with asyncio.timeout(0 if drain.over else self.at_s - time.perf_counter()) as limit:
                drain.limits.add(limit)
                try:
                    yield
                finally:
                    drain.limits.discard(limit)
        except TimeoutError as error:
            if drain.over:
                message = "The server stopped before the answer was whole; send the request again."
                raise Overloaded(message, code=CODE, retry_after_s=5) from error
            message = f"The answer took over {self.timeout_s:.0f} s; ask for fewer tokens."
            raise GenerationFailed(message, code="timeout") from error
