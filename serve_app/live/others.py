"""What one ingress tells another once a second while somebody watches, and what it has heard of all of them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.live.figures import Rings, joined
from serve_app.live.nodes import Rows
from serve_app.live.view import Occurrence, Total

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 2.0
FRESH_BUCKETS = 3
"""Of figures, for an ingress that has heard the earlier ones."""
FAILURES = 2
"""As many in a row, and the others do not answer; one may be that of an ingress that is just going."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one ingress tells another: all that it knows now, and ``news``, of which the last has this ``number``."""

    ingress: str
    number: int
    news: Sequence[Occurrence]
    rows: Rows
    totals: Mapping[str, Total]
    figures: Rings


class Others:
    """The other ingresses. ``batches``: what each told last; ``figures``: of each, as far back as they go."""

    def __init__(self, name: str, ingresses: Callable[..., Awaitable[list[Any]]]) -> None:
        """``name``: of this one; ``ingresses``: calls a method of every ingress, returns [] where there is no other."""
        self.batches: Sequence[Batch] = ()
        self.figures: dict[str, Rings] = {}
        self._name = name
        self._ingresses = ingresses
        self._failures = 0

    @property
    def heard(self) -> int | None:
        """How many ingresses tell what they do, this one too; None where the others cannot be asked."""
        return None if self._failures >= FAILURES else 1 + len(self.batches)

    async def ask(self) -> list[Occurrence]:
        """Learn what the others know, and return what happened there; nothing where they cannot be asked."""
        numbers = {batch.ingress: batch.number for batch in self.batches}
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                told: list[Batch] = await self._ingresses("recent_events", numbers, timeout_s=ASK_TIMEOUT_S)
        except Exception:
            logger.debug("the other ingresses do not tell what they decide", exc_info=True)
            self._failures += 1
            return []
        self._failures = 0
        self.batches = [batch for batch in told if batch.ingress != self._name]
        before = self.figures
        self.figures = {batch.ingress: joined(before.get(batch.ingress, {}), batch.figures) for batch in self.batches}
        return [occurrence for batch in self.batches for occurrence in batch.news]
