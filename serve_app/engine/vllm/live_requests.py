"""Requests between their submission and their end: who is live, how many may be, and what goes to whom.

Owns the bound of the waiting line and each submitter's outputs of one turn of the loop. The engine's lock guards the
requests; outputs belong to the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from serve_app.engine.protocol import EngineOutput, EngineRequest, OutputSink, QueueFull, SaveResult
from serve_app.engine.vllm.sampling.token_choice import TokenChoice
from serve_app.fairness.shares import UNBORROWED_PART

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
        self.tenants = tenants
        """How many there can be."""
        self._by_id: dict[str, LiveRequest] = {}
        self._max_waiting = max_waiting_requests
        self._unbegun: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request_id: str) -> LiveRequest | None:
        """Return a live request."""
        return self._by_id.get(request_id)

    def all(self) -> list[LiveRequest]:
        """Return the live requests in the order of their arrival."""
        return list(self._by_id.values())

    def check(self, request_id: str, tenant: str, retry_after_s: float) -> None:
        """Raise ValueError for an id in use, QueueFull for a full line.

        Among several tenants the last eighth of the line is for those that do not fill more than their part of it.
        """
        if request_id in self._by_id:
            raise ValueError(f"request id {request_id!r} is in use")
        most = self._max_waiting
        others = sum(1 for other in self._unbegun if other != tenant)
        if self.tenants > 1 and self._unbegun[tenant] >= max(1, most // (others + 2)):
            most -= most // UNBORROWED_PART
        if self._unbegun.total() >= most:
            raise QueueFull(f"{self._unbegun.total()} requests are waiting", retry_after_s)

    def add(self, live: LiveRequest) -> None:
        """Take in a request that was checked."""
        self._by_id[live.request.request_id] = live
        self._unbegun[live.request.tenant] += 1

    def begin(self, live: LiveRequest) -> None:
        """Note a request's first token."""
        if not live.begun:
            live.begun = True
            self._count_off(live.request.tenant)

    def remove(self, live: LiveRequest) -> None:
        """Note a request's end."""
        self.begin(live)
        live.ended = True
        del self._by_id[live.request.request_id]

    def _count_off(self, tenant: str) -> None:
        self._unbegun[tenant] -= 1
        if not self._unbegun[tenant]:
            del self._unbegun[tenant]


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
