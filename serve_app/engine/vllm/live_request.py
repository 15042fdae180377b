"""A request between its submission and its end. The engine's lock guards it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from serve_app.engine.protocol import EngineRequest, OutputSink, SaveResult
from serve_app.engine.vllm.sampling.rows import TokenChoice


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
