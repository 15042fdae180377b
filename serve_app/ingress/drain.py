"""The shutdown of an ingress: refuse new requests, and give running answers time until their last byte is sent."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from serve_app.errors import GenerationFailed, Overloaded, WarmpathError

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

    def limit(self) -> "Limit":
        """Return a context: its block ends at the deadline, or when the ingress stops, with a WarmpathError."""
        return Limit(self)


class Limit:
    """``Deadline.limit``. No generator: each request has several."""

    __slots__ = ("_deadline", "_timeout")

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    async def __aenter__(self) -> None:
        deadline = self._deadline
        left_s = 0 if deadline.drain.over else deadline.at_s - time.perf_counter()
        self._timeout = asyncio.timeout(left_s)
        await self._timeout.__aenter__()
        deadline.drain.limits.add(self._timeout)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadline.drain.limits.discard(self._timeout)
        try:
            await self._timeout.__aexit__(kind, error, trace)
            if isinstance(error, TimeoutError):
                raise error
        except TimeoutError as late:
            raise self._over() from late

    def _over(self) -> WarmpathError:
        if self._deadline.drain.over:
            message = "The server stopped before the answer was whole; send the request again."
            return Overloaded(message, code=CODE, retry_after_s=5)
        message = f"The answer took over {self._deadline.timeout_s:.0f} s; ask for fewer tokens."
        return GenerationFailed(message, code="timeout")
