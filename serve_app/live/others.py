"""Data that ingresses exchange once a second while there are watchers, and the data received so far."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.live.figures import Rings, joined
from serve_app.live.nodes import NodeRows
from serve_app.live.view import Occurrence, Total

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 2.0
FRESH_BUCKETS = 3
"""The buckets of figures for an ingress that already has the earlier ones."""
FAILURES = 2
"""The failures in a row after which the others count as silent. A single one may come from a stopping ingress."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One ingress' answer to another: its current state, and ``news``, the last of which has this ``number``."""

    ingress: str
    number: int
    news: Sequence[Occurrence]
    rows: NodeRows
    totals: Mapping[str, Total]
    figures: Rings


class Others:
    """The other ingresses. ``batches``: the latest of each; ``figures``: all known ones of each."""

    def __init__(self, name: str, ingresses: Callable[..., Awaitable[list[Any]]]) -> None:
        """``name``: this ingress; ``ingresses``: calls a method of every ingress, and returns [] if there is one."""
        self.batches: Sequence[Batch] = ()
        self.figures: dict[str, Rings] = {}
        self._name = name
        self._ingresses = ingresses
        self._failures = 0

    @property
    def heard(self) -> int | None:
        """The number of ingresses that answer, including this one, or None if the others cannot be asked."""
        return None if self._failures >= FAILURES else 1 + len(self.batches)

    async def ask(self) -> list[Occurrence]:
        """Ask the other ingresses, and return their new events, or none if they cannot be asked."""
        numbers = {batch.ingress: batch.number for batch in self.batches}
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                told: list[Batch] = await self._ingresses("recent_events", numbers, timeout_s=ASK_TIMEOUT_S)
        except Exception:
            logger.debug("the other ingresses did not send their events", exc_info=True)
            self._failures += 1
            return []
        self._failures = 0
        self.batches = [batch for batch in told if batch.ingress != self._name]
        before = self.figures
        self.figures = {batch.ingress: joined(before.get(batch.ingress, {}), batch.figures) for batch in self.batches}
        return [occurrence for batch in self.batches for occurrence in batch.news]
