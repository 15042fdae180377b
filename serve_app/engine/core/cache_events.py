"""The events of an engine's pool and of the tiers below it, in the order in which they happened.

A digest among the events shows listeners whether their view is exact. Belongs to the engine's loop.
"""

import logging
from collections.abc import Sequence

from router.protocol.events import POOL_TIER, BlocksStored, CacheCleared, CacheDigest, Event, TierDigest
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.cache.tiers.tiers import Tiers
from serve_app.engine.protocol import EventSink

_log = logging.getLogger(__name__)


class CacheEvents:
    """The cache events of one engine."""

    def __init__(self, cache: PrefixCache, tiers: Tiers, sink: EventSink) -> None:
        self._cache = cache
        self._tiers = tiers
        self._sink = sink

    def send(self) -> tuple[Event, ...]:
        """Send the events since the last call, and return them."""
        events = (*self._cache.take_events(), *self._tiers.take_events())
        self._send(events)
        return events

    def send_digest(self, *, anew: bool) -> None:
        """Send the digest after all events so far; ``anew``: and before it all held blocks."""
        index = self._cache.index
        self.send()
        if anew:
            self._send((CacheCleared(), BlocksStored(b"".join(entry.block_hash for entry in index))))
            self._tiers.announce()
            self.send()
        pool = TierDigest(POOL_TIER, len(index), index.xor)
        self._send((CacheDigest((pool, *self._tiers.digests())),))

    def reset(self, *, tiers: bool) -> bool:
        """Drop all cached blocks not in use, and those of the tiers if ``tiers``; False if some were kept."""
        if tiers:
            self._tiers.clear()
            self.send()
        complete = self._cache.reset()
        # A cleared pool is announced as a cleared replica: blocks that stay in tiers are announced again.
        if CacheCleared() in self.send():
            self._tiers.announce()
        return complete

    def _send(self, events: Sequence[Event]) -> None:
        if events:
            try:
                self._sink(events)
            except Exception:
                _log.exception("the event sink failed; %d cache events are lost", len(events))
