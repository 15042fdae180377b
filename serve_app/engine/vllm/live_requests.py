"""Requests between their submission and their end: who is live, and how many may be. The engine's lock guards it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from serve_app.engine.protocol import Clock, EngineRequest, OutputSink, QueueFull, SaveResult
from serve_app.engine.vllm.sampling.token_choice import TokenChoice
from serve_app.fairness.shares import Budget, Shares


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request in vLLM. ``failure``: a file that is there once its tokens could not be chosen.

    ``save``: what became of what it asked to keep.
    """

    request: EngineRequest
    sink: OutputSink
    choice: TokenChoice
    arrival_s: float
    failure: Path
    begun: bool = False
    ended: bool = False
    save: SaveResult | None = None
    task: asyncio.Task[None] | None = None
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when what it waits for may be there."""


class LiveRequests:
    """Live requests by id. One without a token yet counts as waiting, since vLLM says no more of a single one."""

    def __init__(self, max_waiting_requests: int, shares: Mapping[str, float], clock: Clock) -> None:
        self.waiting = Budget(Shares(shares, clock), lambda: max_waiting_requests)
        self._by_id: dict[str, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request_id: str) -> LiveRequest | None:
        """Return a live request."""
        return self._by_id.get(request_id)

    def all(self) -> list[LiveRequest]:
        """Return the live requests in the order of their arrival."""
        return list(self._by_id.values())

    def check(self, request_id: str, tenant: str, retry_after_s: float) -> None:
        """Raise ValueError for an id in use, QueueFull where the line (a ``Budget``) is full for a tenant."""
        if request_id in self._by_id:
            raise ValueError(f"request id {request_id!r} is in use")
        self.waiting.shares.touch(tenant)
        if self.waiting.verdict(tenant, 1) != "granted":
            raise QueueFull(f"{self.waiting.used} requests are waiting", retry_after_s)

    def add(self, live: LiveRequest) -> None:
        """Take in a request that was checked."""
        self._by_id[live.request.request_id] = live
        self.waiting.take(live.request.tenant, 1)

    def begin(self, live: LiveRequest) -> None:
        """Note a request's first token."""
        if not live.begun:
            live.begun = True
            self.waiting.give_back(live.request.tenant, 1)

    def remove(self, live: LiveRequest) -> None:
        """Note a request's end."""
        self.begin(live)
        live.ended = True
        del self._by_id[live.request.request_id]
