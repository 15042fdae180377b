"""Requests between their submission and their end: who is live, how many may be, and what goes to whom.

Owns each submitter's outputs of one turn of the loop. The engine's lock guards requests; outputs are the loop's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from serve_app.engine.protocol import EngineOutput, EngineRequest, OutputSink, SaveResult
from serve_app.engine.vllm.sampling.token_choice import TokenChoice
from serve_app.engine.waiting import WaitingByTenant

_log = logging.getLogger(__name__)


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

    def __init__(self, max_waiting_requests: int, tenants: int) -> None:
        self.waiting = WaitingByTenant(max_waiting_requests, tenants)
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
        """Raise ValueError for an id in use, QueueFull for a full line."""
        if request_id in self._by_id:
            raise ValueError(f"request id {request_id!r} is in use")
        self.waiting.check(tenant, retry_after_s)

    def add(self, live: LiveRequest) -> None:
        """Take in a request that was checked."""
        self._by_id[live.request.request_id] = live
        self.waiting.add(live.request.tenant)

    def begin(self, live: LiveRequest) -> None:
        """Note a request's first token."""
        if not live.begun:
            live.begun = True
            self.waiting.remove(live.request.tenant)

    def remove(self, live: LiveRequest) -> None:
        """Note a request's end."""
        self.begin(live)
        live.ended = True
        del self._by_id[live.request.request_id]


class Outbox:
    """Outputs that wait for the end of the loop's turn: each submitter gets those of a step together."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._call_soon = call_soon
        self._batches: dict[OutputSink, list[EngineOutput]] = {}

    def add(self, sink: OutputSink, output: EngineOutput) -> None:
        """Put an output in; it leaves with the others of this turn."""
        if not self._batches:
            self._call_soon(self.flush)
        self._batches.setdefault(sink, []).append(output)

    def flush(self) -> None:
        """Give out what is in it. A sink that fails harms nobody else."""
        batches, self._batches = self._batches, {}
        for sink, batch in batches.items():
            try:
                sink(batch)
            except Exception:
                _log.exception("an output sink failed for %s", ", ".join(output.request_id for output in batch))
