"""Requests' saves: the prefixes to keep, the space for them, and the result for the client.

Used for explicit saves and cache breakpoints alike. A prefix that cannot be kept is a warning, never a failure.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from router.protocol.block_hash import hash_at
from serve_app.cache.prefix.pins import Pins
from serve_app.engine.protocol import Clock, EngineRequest, SaveOutcome, SaveResult
from serve_app.engine.reports import EngineMeters

_log = logging.getLogger(__name__)

MAX_BREAKPOINTS = 256
"""Pins that a tenant's cache breakpoints may add to its others: each pin remembers all of its blocks."""


@dataclass(frozen=True, slots=True)
class WantedPin:
    """A prefix of ``blocks`` blocks to keep under ``key``. ``explicit``: by a save, not by a cache breakpoint."""

    key: bytes
    blocks: int
    ttl_s: float | None
    explicit: bool


class PinKeeper:
    """The keeper of one engine with these ``pins``."""

    def __init__(self, pins: Pins, block_size: int, meters: EngineMeters, clock: Clock) -> None:
        self._pins = pins
        self._block_size = block_size
        self._meters = meters
        self._clock = clock

    def requested(self, request: EngineRequest, chain: bytes, blocks: int) -> Iterator[WantedPin]:
        """Yield the pins that a request wants among its first ``blocks`` blocks, which have KV and hashes ``chain``."""
        for save in request.saves:
            kept = min(save.tokens // self._block_size, blocks)
            if save.key or kept:
                # Equal prefixes are one pin; a request never renews another tenant's.
                key = save.key or hash_at(chain, kept - 1) + request.tenant.encode()
                yield WantedPin(key, kept, save.ttl_s, explicit=bool(save.key))

    def without_pinning(self, pin: WantedPin, tenant: str, numbers: Sequence[int]) -> SaveResult | None:
        """Return the result if nothing has to be pinned, else None. ``numbers``: the blocks' numbers in ``Pins``."""
        pins = self._pins
        if not pin.blocks:
            return SaveResult("too_short")
        if pins.renew(pin.key, pin.ttl_s, self._clock()):
            return SaveResult("present")
        if pin.blocks > pins.budget_blocks:
            return SaveResult("too_large", pin.blocks * self._block_size, 0, pins.budget_blocks * self._block_size)
        if not pin.explicit and pins.of_tenant(tenant) >= MAX_BREAKPOINTS:
            return self.pinned("over_budget", tenant, numbers)
        return None

    def pinned(self, outcome: SaveOutcome, tenant: str, numbers: Sequence[int]) -> SaveResult:
        """Return the result of pinning a prefix, with the available space if it does not fit."""
        if outcome != "over_budget":
            return SaveResult(outcome)
        pinned, budget = self._pins.room(tenant)
        more = len(numbers) - self._pins.pinned_leading(numbers, tenant)
        return SaveResult(outcome, *(blocks * self._block_size for blocks in (more, pinned, budget)))

    def answer(self, request: EngineRequest, results: Sequence[SaveResult]) -> SaveResult | None:
        """Return the client's result for all its prefixes, and count it; only the last result can be a refusal."""
        if not results:
            return None
        saved = (result for result in results if result.outcome == "saved")
        result = results[-1] if results[-1].refused else next(saved, results[-1])
        self._meters.saves[result.outcome] += 1
        if result.refused:
            _log.warning(
                "request %s: its prompt was not saved (%s); %d of %d blocks are pinned",
                request.request_id, result.outcome, self._pins.blocks, self._pins.budget_blocks,
            )  # fmt: skip
        return result
