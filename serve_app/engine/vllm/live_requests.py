"""A request between its submission and its end, and what goes to its submitter.

Owns each submitter's outputs of one turn of the loop. The engine's lock guards requests; outputs are the loop's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from serve_app.engine.protocol import EngineOutput, EngineRequest, OutputSink, SaveResult
from serve_app.engine.vllm.sampling.rows import TokenChoice

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request in vLLM. ``save``: what became of what it asked to keep."""

    request: EngineRequest
    sink: OutputSink
    choice: TokenChoice
    arrival_s: float
    begun: bool = False
    ended: bool = False
    save: SaveResult | None = None
    task: asyncio.Task[None] | None = None
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when what it waits for may be there."""


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
