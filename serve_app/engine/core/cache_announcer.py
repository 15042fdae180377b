"""What an engine's caches hold in all: a digest, among the events that told of every change.

Whoever followed the events can see from it whether they missed, or made up, anything. Where they did, all is told anew.
Runs between two steps, so what it says is of one moment.
"""

from __future__ import annotations

from collections.abc import Callable

from router.protocol.events import BlocksStored, CacheCleared, CacheDigest, Event, TierDigest
from serve_app.cache.prefix.block_index import BlockIndex
from serve_app.cache.tiers.tiers import Tiers
from serve_app.engine.core.outbox import Outbox
from serve_app.engine.protocol import EventSink


class CacheAnnouncer:
    """Tells ``sink`` of an engine's pool and the tiers below it. ``deliver`` sends the events that are waiting."""

    def __init__(
        self,
        index: BlockIndex,
        tiers: Tiers | None,
        deliver: Callable[[], object],
        outbox: Outbox,
        sink: EventSink,
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        self._index = index
        self._tiers = tiers
        self._deliver = deliver
        self._outbox = outbox
        self._sink = sink
        self._call = call

    def tell_cache(self, *, anew: bool = False) -> None:
        """Send the digest after all events so far (any thread); ``anew``: and before it everything that is held."""
        self._call(lambda: self._tell(anew))

    def _tell(self, anew: bool) -> None:
        self._deliver()
        if anew:
            held = b"".join(entry.block_hash for entry in self._index)
            self._outbox.deliver((CacheCleared(), BlocksStored(held)), self._sink)
            if self._tiers is not None:
                self._tiers.announce()
            self._deliver()
        below = () if self._tiers is None else self._tiers.digests()
        pool = TierDigest("pool", len(self._index), self._index.xor)
        events: tuple[Event, ...] = (CacheDigest((pool, *below)),)
        self._outbox.deliver(events, self._sink)
