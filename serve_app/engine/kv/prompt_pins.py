"""Prompts pinned in the pool once a request has computed them; saves also go to disk. Used by the loop alone."""

import logging
from collections.abc import Callable, Sequence

from serve_app.cache.prefix.blocks import CachedBlock
from serve_app.cache.prefix.hot_prefixes import SavedPrefix
from serve_app.cache.prefix.pins import PinOutcome
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.pin_keeper import PinKeeper, WantedPin
from serve_app.engine.protocol import Clock, SaveResult
from serve_app.engine.reports import EngineMeters
from serve_app.engine.scheduling.sequence import SequenceState

_log = logging.getLogger(__name__)

Write = Callable[[list[CachedBlock], float | None], bool]
"""See ``TierSpiller.save``."""


class PromptPins:
    """The pinned prompts of one engine."""

    def __init__(self, cache: PrefixCache, meters: EngineMeters, clock: Clock, write: Write) -> None:
        self._cache = cache
        self._keeper = PinKeeper(cache.pins, cache.block_size, meters, clock)
        self._write = write

    def keep(self, sequence: SequenceState) -> SaveResult | None:
        """Pin a request's prefixes to keep, as far as they fit, once its whole prompt has KV; return the result."""
        request = sequence.request
        results: list[SaveResult] = []
        if request.saves and not self._cache.enabled:
            results.append(SaveResult("off"))
        else:
            for pin in self._keeper.requested(request, sequence.chain, sequence.published):
                results.append(self._pin(pin, request.tenant, sequence.blocks[: pin.blocks]))
                if results[-1].refused:
                    break
        return self._keeper.answer(request, results)

    def take_over(self, saved: SavedPrefix, blocks: list[int]) -> PinOutcome:
        """Keep another replica's save here; ``blocks``: the whole prefix."""
        outcome = self._cache.pin(saved.key, blocks, saved.ttl_s, tenant=saved.tenant, unread_s=saved.unread_s)
        if outcome == "pinned":
            self._write_to_disk(blocks, None if saved.ttl_s is None else saved.ttl_s - saved.unread_s)
        return outcome

    def _pin(self, pin: WantedPin, tenant: str, blocks: Sequence[int]) -> SaveResult:
        result = self._keeper.without_pinning(pin, tenant, blocks)
        if result is None:
            outcome = self._cache.pin(pin.key, blocks, pin.ttl_s, tenant=tenant)
            if outcome == "pinned" and pin.explicit:
                self._write_to_disk(blocks, pin.ttl_s)
            result = self._keeper.pinned("saved" if outcome == "pinned" else outcome, tenant, blocks)
        return result

    def _write_to_disk(self, blocks: Sequence[int], ttl_s: float | None) -> None:
        entries = [self._cache.index.of_block(block) for block in reversed(blocks)]
        if not self._write([entry for entry in entries if entry is not None], ttl_s):
            _log.info(
                "a saved prompt of %d blocks is not on disk: there is no disk tier, or its queue is full", len(blocks)
            )
