"""The sink of everything that an engine under churn says. Knows no engine; outputs and events come from any thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from router.protocol.block_hash import split_chain
from router.protocol.events import BlocksRemoved, BlocksStored, CacheCleared, Event
from serve_app.engine.protocol import EngineOutput

CANARY = "canary"
"""The id of the request that is asked again at every check."""


class Ledger:
    """The sink of all outputs and events: who is alive, how requests ended, and which blocks were announced."""

    def __init__(self) -> None:
        self.live: set[str] = set()
        self.ended: Counter[str] = Counter()
        self.announced: dict[str, set[bytes]] = {}
        self.canary: list[int] = []
        self._changed = threading.Condition()

    def outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Take one step's outputs (the engine's thread)."""
        with self._changed:
            for output in outputs:
                if output.request_id == CANARY:
                    self.canary.extend(output.token_ids)
                if output.finish_reason is not None:
                    self.live.discard(output.request_id)
                    self.ended[output.finish_reason] += 1
            self._changed.notify_all()

    def events(self, events: Sequence[Event]) -> None:
        """Take cache events (the engine's thread)."""
        for event in events:
            if isinstance(event, BlocksStored):
                self.announced.setdefault(event.tier, set()).update(split_chain(event.hashes))
            elif isinstance(event, BlocksRemoved):
                self.announced[event.tier].difference_update(split_chain(event.hashes))
            elif isinstance(event, CacheCleared):
                self.announced.clear()

    def wait(self, most_live: int) -> None:
        """Wait until at most so many requests are alive. Raises TimeoutError after two minutes."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.live) <= most_live, 120):
                raise TimeoutError(f"{len(self.live)} requests did not end, {sorted(self.live)[:3]} among them")

    def born(self, name: str) -> None:
        """Count a request as alive."""
        with self._changed:
            self.live.add(name)

    def stillborn(self, name: str) -> None:
        """Forget a request that was refused."""
        with self._changed:
            self.live.discard(name)
