"""Prefixes that stay in vLLM's pool for requests' saves, inside a pin budget and its tenants' shares.

The connector holds their blocks. Belongs to the frontend's loop, except ``pins``' counts. A failed save is a warning.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal
from weakref import WeakValueDictionary

from router.protocol.block_hash import HASH_BYTES, hash_at, split_chain
from router.vllm_events.pool import FollowedPool
from serve_app.cache.prefix.hot_prefixes import HashedTokens, SavedPrefix
from serve_app.cache.prefix.pins import PinOutcome, Pins
from serve_app.engine.pin_keeper import PinKeeper, WantedPin
from serve_app.engine.protocol import Clock, EngineRequest, SaveResult
from serve_app.engine.reports import EngineMeters
from serve_app.engine.vllm.frontend import ModelFacts
from serve_app.engine.vllm.settings import VllmSettings
from serve_app.engine.vllm.transfer.job import TransferJob

_log = logging.getLogger(__name__)

RunTransfer = Callable[[TransferJob, Sequence[int], bytes, str], Awaitable[int]]
"""``JobRunner.run``."""

Pinned = Literal["saved", "present", "over_budget", "failed"]


def block_number(block_hash: bytes) -> int:
    """Return a block's number in ``Pins``: vLLM's own block ids are reused for other content."""
    return int.from_bytes(block_hash, "big")


class VllmSaves:
    """The saves of one engine. Each block of a prefix counts as one in every group of layers: windows keep less."""

    def __init__(
        self,
        settings: VllmSettings,
        facts: ModelFacts,
        pool: FollowedPool,
        run: RunTransfer,
        meters: EngineMeters,
        clock: Clock = time.monotonic,
    ) -> None:
        budget = settings.pin_budget
        most = int(budget * facts.num_blocks if budget < 1 else budget) // max(1, len(facts.groups))
        self.pins = Pins(most, settings.tenant_shares)
        self.recalled = 0
        self._size = settings.block_size
        self._pool = pool
        self._run = run
        self._keeper = PinKeeper(self.pins, settings.block_size, meters, clock)
        self._clock = clock
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        """Serialises a pin's beginning and end, so that the connector can know it by its key alone."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self.on_saved: Callable[[bytes, float | None], None] | None = None
        """Called with the chain of a prefix that a save keeps from now on, and its remaining time."""

    def renew(self, request: EngineRequest) -> None:
        """Restart the time of the pins that a request reads, and release those unread for their time."""
        if self.pins.next_expiry_s is not None:
            now_s, chain = self._clock(), request.block_hashes
            cached = self._pool.count_held(chain, len(chain) // HASH_BYTES)
            self.pins.read([block_number(hash_at(chain, i)) for i in range(cached)], now_s)
            for key in self.pins.expired(now_s):
                self._spawn(self._unpin(key))

    async def keep(self, request: EngineRequest) -> SaveResult | None:
        """Keep a request's prefixes as far as they fit, now that its whole prompt has KV."""
        results: list[SaveResult] = []
        if request.saves and not self.pins.budget_blocks:
            results.append(SaveResult("off"))
        else:
            for pin in self._keeper.requested(request, request.block_hashes, len(request.token_ids) // self._size):
                # Runs to the end even if this request is cancelled: others may wait for it.
                results.append(await asyncio.shield(self._spawn(self._keep(pin, request))))
                if results[-1].refused:
                    break
        return self._keeper.answer(request, results)

    async def take_over(self, saved: SavedPrefix, prefix: HashedTokens) -> PinOutcome | None:
        """Keep another replica's save for its remaining time; None if part of it is missing here."""
        blocks = len(prefix.chain) // HASH_BYTES
        root = self._pool.roots_of(prefix.chain, prefix.scope.public_blocks)
        over = (saved.ttl_s or math.inf) <= saved.unread_s
        if not root or over or self._pool.count_held(prefix.chain, blocks) < blocks:
            return None
        owned = replace(prefix, tenant=saved.tenant)  # the last block may be public
        outcome = await asyncio.shield(self._spawn(self._take_over(saved, owned, root)))
        return None if outcome == "failed" else "pinned" if outcome == "saved" else outcome

    async def clear(self) -> None:
        """Release all saves."""
        for key in self.pins:
            await self._unpin(key)

    async def set_shares(self, weights: Mapping[str, float]) -> None:
        """Use these tenants' weights from now on; other tenants' pins end."""
        self.pins.set_weights(weights)
        for key in self.pins.of_others(weights) if weights else ():
            await self._unpin(key)

    async def _keep(self, pin: WantedPin, request: EngineRequest) -> SaveResult:
        chain = request.block_hashes[: pin.blocks * HASH_BYTES]
        numbers = list(map(block_number, split_chain(chain)))
        async with self._lock(pin.key):
            result = self._keeper.without_pinning(pin, request.tenant, numbers)
            if result is None:
                prefix = HashedTokens(request.scope, request.identity, chain, request.tenant)
                outcome = await self._pin(pin.key, prefix, request.root, pin.ttl_s)
                if outcome == "saved" and pin.explicit and self.on_saved is not None:
                    self.on_saved(chain, pin.ttl_s)
                result = self._keeper.pinned(outcome, request.tenant, numbers)
        return result

    async def _take_over(self, saved: SavedPrefix, prefix: HashedTokens, root: bytes) -> Pinned:
        async with self._lock(saved.key):
            outcome = await self._pin(saved.key, prefix, root, saved.ttl_s, saved.unread_s)
            if outcome == "saved" and self.on_saved is not None:
                self.on_saved(prefix.chain, None if saved.ttl_s is None else saved.ttl_s - saved.unread_s)
            return outcome

    async def _pin(
        self, key: bytes, prefix: HashedTokens, root: bytes, ttl_s: float | None, unread_s: float = 0.0
    ) -> Pinned:
        """Pin a prefix while holding the lock of its key."""
        blocks = list(map(block_number, split_chain(prefix.chain)))
        while (added := self.pins.add(key, blocks, ttl_s, self._clock() - unread_s, prefix.tenant)) != "pinned":
            lent = self.pins.recall(blocks, prefix.tenant) if added == "over_budget" else None
            if lent is None:
                return added
            self.recalled += 1
            await self._unpin(lent)
        ids = [*prefix.token_ids[: len(blocks) * self._size].tolist(), 0]
        try:
            public = min(prefix.scope.public_blocks, len(blocks))
            job = TransferJob("pin", key.hex(), 0, len(blocks), prefix.tenant, public * self._size)
            await self._run(job, ids, root, prefix.scope.lora)
        except Exception:
            _log.exception("a prefix of %d blocks could not be kept", len(blocks))
            await self._let_go(key)
            return "failed"
        return "saved"

    def _lock(self, key: bytes) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    async def _unpin(self, key: bytes) -> None:
        async with self._lock(key):
            await self._let_go(key)

    async def _let_go(self, key: bytes) -> None:
        if self.pins.remove(key):
            try:
                await self._run(TransferJob("unpin", key.hex()), [0], bytes(HASH_BYTES), "")
            except Exception:
                _log.exception("vLLM did not release kept blocks")

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
