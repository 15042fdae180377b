"""Clients that keep what they see and when, and compare it with what an undisturbed run answered.

Speaks OpenAI's completions over httpx. A request is lost (no answer began), cut short (it began and did not end),
altered (it ended with another text), or whole.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from benchmarks.common.client import RequestFailed, stream_events

Outcome = Literal["whole", "lost", "cut short", "altered"]
PATIENCE_S = 300.0


@dataclass(slots=True)
class Seen:
    """What one client has had so far. ``token_times_s``: of ``time.perf_counter``, one for each event with text."""

    body: dict[str, Any]
    began_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    problem: str = ""


class Clients:
    """Asks one server; ``expected`` remembers each request's undisturbed answer by prompt and seed."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/completions"
        self.expected: dict[tuple[str, int], Seen] = {}

    async def undisturbed(self, bodies: Sequence[dict[str, Any]]) -> None:
        """Ask all at once under a salt, which leaves the caches of the others cold; remember the answers.

        Raises RuntimeError when one fails.
        """
        for seen in await self.at_once([{**body, "cache_salt": "undisturbed"} for body in bodies]):
            if seen.problem:
                raise RuntimeError(f"an undisturbed request failed: {seen.problem}")
            self.expected[_key(seen.body)] = seen

    async def at_once(self, bodies: Iterable[dict[str, Any]]) -> list[Seen]:
        """Ask all at once; return what was seen."""
        async with _connections() as client:
            all_seen = [Seen(body) for body in bodies]
            await asyncio.gather(*(self._ask(client, seen) for seen in all_seen))
        return all_seen

    async def disturbed(
        self,
        bodies: Iterable[dict[str, Any]],
        ready: Callable[[Sequence[Seen]], Awaitable[bool]],
        strike: Callable[[], Any],
    ) -> tuple[list[Seen], float]:
        """Ask all at once, strike as soon as all is ``ready``; return what was seen, and the moment of the strike."""
        async with _connections() as client:
            all_seen = [Seen(body) for body in bodies]
            asking = [asyncio.create_task(self._ask(client, seen)) for seen in all_seen]
            while not await ready(all_seen):
                if all(task.done() for task in asking):
                    raise RuntimeError("every request was done before anything could fail")
                await asyncio.sleep(0.01)
            struck_s = await asyncio.to_thread(strike)
            await asyncio.gather(*asking)
        return all_seen, struck_s

    async def under_load(self, bodies: Sequence[dict[str, Any]], clients: int, during: Callable[[], Any]) -> list[Seen]:
        """Ask again and again, ``clients`` at a time, until ``during`` returns; return all that was seen."""
        seen: list[Seen] = []
        over = asyncio.Event()

        async def keep_asking(client: httpx.AsyncClient, first: int) -> None:
            turn = first
            while not over.is_set():
                mine = Seen(bodies[turn % len(bodies)])
                seen.append(mine)
                await self._ask(client, mine)
                turn += clients

        async with _connections() as client:
            asking = [asyncio.create_task(keep_asking(client, first)) for first in range(clients)]
            try:
                await asyncio.to_thread(during)
            finally:
                over.set()
                await asyncio.gather(*asking)
        return seen

    def outcome(self, seen: Seen) -> Outcome:
        """Compare what was seen with the undisturbed answer."""
        if not seen.token_times_s:
            return "lost"
        if seen.problem or seen.finish_reason is None:
            return "cut short"
        return "whole" if seen.text == self.expected[_key(seen.body)].text else "altered"

    def outcomes(self, all_seen: Iterable[Seen]) -> dict[str, int]:
        """Count the outcomes; every kind is there."""
        counted = Counter(self.outcome(seen) for seen in all_seen)
        return {kind: counted[kind] for kind in ("whole", "lost", "cut short", "altered")}

    async def _ask(self, client: httpx.AsyncClient, seen: Seen) -> None:
        seen.began_s = time.perf_counter()
        try:
            async for event in stream_events(client, self._url, {**seen.body, "stream": True}):
                for choice in event["choices"]:
                    seen.token_times_s.append(time.perf_counter())
                    seen.text += choice["text"]
                    seen.finish_reason = choice["finish_reason"] or seen.finish_reason
        except (httpx.HTTPError, RequestFailed) as error:
            seen.problem = f"{type(error).__name__}: {error}"


def _key(body: dict[str, Any]) -> tuple[str, int]:
    return body["prompt"], body["seed"]


def _connections() -> httpx.AsyncClient:
    # A connection for each request: those that share one would break together.
    return httpx.AsyncClient(timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))
