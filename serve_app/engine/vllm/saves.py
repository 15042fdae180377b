"""Prefixes that stay in vLLM's pool: what requests save or keep, inside a pin budget and its tenants' shares.

Owns which and until when; their blocks are held by the connector. Belongs to the loop of vLLM's frontend, but for
``pins``' counts. A save that fails is a warning, never the request's failure.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from router.protocol.block_hash import HASH_BYTES, hash_at, split_chain
from serve_app.cache.prefix.hot_prefixes import HashedTokens, SavedPrefix
from serve_app.cache.prefix.pins import PinOutcome, Pins
from serve_app.engine.metrics import EngineMeters
from serve_app.engine.protocol import Clock, EngineRequest, SaveOutcome, SaveResult
from serve_app.engine.vllm.events.pool import VllmPool
from serve_app.engine.vllm.settings import VllmSettings
from serve_app.engine.vllm.transfer.job import Job

_log = logging.getLogger(__name__)

MAX_KEPT_PREFIXES = 256
"""Pins that one tenant's requests may add to its others: each remembers all of its blocks."""

Run = Callable[[Job, Sequence[int], bytes, str], Awaitable[int]]
"""``JobRunner.run``."""


def block_number(block_hash: bytes) -> int:
    """Return what ``Pins`` know a block by: vLLM's own numbers change hands."""
    return int.from_bytes(block_hash, "big")


class VllmSaves:
    """One engine's, whose pool has ``num_blocks``."""

    def __init__(
        self,
        settings: VllmSettings,
        num_blocks: int,
        pool: VllmPool,
        run: Run,
        meters: EngineMeters,
        clock: Clock = time.monotonic,
    ) -> None:
        budget = settings.pin_budget
        self.pins = Pins(int(budget * num_blocks if budget < 1 else budget), settings.tenant_shares)
        self.recalled = 0
        self._size = settings.block_size
        self._pool = pool
        self._run = run
        self._meters = meters
        self._clock = clock
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        """A pin's beginning and its end wait for each other, so that the connector knows it by its key alone."""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def save(self, request: EngineRequest) -> SaveResult | None:
        """Let the time of what a request reads run anew; have what it asks to save computed and kept before it."""
        now_s, chain, save = self._clock(), request.block_hashes, request.save
        if not self.pins.budget_blocks:
            return None if save is None else SaveResult("off")
        if self.pins.next_expiry_s is not None:
            held = self._pool.known(chain, len(chain) // HASH_BYTES)
            self.pins.read([block_number(hash_at(chain, i)) for i in range(held)], now_s)
            for key in self.pins.expired(now_s):
                self._spawn(self._unpin(key))
        if save is None:
            return None
        blocks = min(save.tokens, len(request.token_ids)) // self._size
        return self._counted(await self._keep(save.key, blocks, save.ttl_s, request))

    async def keep(self, request: EngineRequest) -> SaveResult | None:
        """Keep the prefixes that a request asks for, as far as they fit, now that all of its prompt has KV."""
        if request.keep and not self.pins.budget_blocks:
            return SaveResult("off")
        results: dict[SaveOutcome, SaveResult] = {}
        for kept in request.keep:
            blocks = min(kept.tokens, len(request.token_ids)) // self._size
            if not blocks:
                continue
            # Equal prefixes are one pin; nobody's request renews another tenant's.
            key = hash_at(request.block_hashes, blocks - 1) + request.tenant.encode()
            if self.pins.of_tenant(request.tenant) >= MAX_KEPT_PREFIXES and key not in self.pins:
                result = self._refused(blocks, request)
            else:
                result = await self._keep(key, blocks, kept.ttl_s, request)
            if result.outcome not in ("saved", "present"):
                return self._counted(result)
            results[result.outcome] = result
        return self._counted(results.get("saved") or results["present"]) if results else None

    async def take_over(self, saved: SavedPrefix, prefix: HashedTokens) -> PinOutcome | None:
        """Keep what another replica kept, with what is left of its time; None where not all of it is held here."""
        blocks = len(prefix.chain) // HASH_BYTES
        root = self._pool.root_of(hash_at(prefix.chain, 0))
        over = (saved.ttl_s or math.inf) <= saved.unread_s
        if not root or over or self._pool.known(prefix.chain, blocks) < blocks:
            return None
        return await self._pin(saved.key, prefix, root, saved.ttl_s, saved.unread_s)

    async def clear(self) -> None:
        """Let go of everything."""
        for key in self.pins:
            await self._unpin(key)

    async def set_shares(self, weights: Mapping[str, float]) -> None:
        """Go by other weights of tenants from now on; what others have pinned ends."""
        self.pins.set_weights(weights)
        for key in self.pins.of_others(weights) if weights else ():
            await self._unpin(key)

    async def _keep(self, key: bytes, blocks: int, ttl_s: float | None, request: EngineRequest) -> SaveResult:
        if not blocks:
            return SaveResult("too_short")
        if blocks > self.pins.budget_blocks:
            return SaveResult("too_large", blocks * self._size, 0, self.pins.budget_blocks * self._size)
        chain = request.block_hashes[: blocks * HASH_BYTES]
        prefix = HashedTokens(request.scope, request.token_ids, chain, request.tenant)
        outcome = await self._pin(key, prefix, request.root, ttl_s)
        if outcome == "over_budget":
            return self._refused(blocks, request)
        return SaveResult("failed" if outcome is None else "saved" if outcome == "pinned" else outcome)

    async def _pin(
        self, key: bytes, prefix: HashedTokens, root: bytes, ttl_s: float | None, unread_s: float = 0.0
    ) -> PinOutcome | None:
        """Pin a prefix, to the end, whoever leaves meanwhile: others may wait for it. None: vLLM failed."""
        return await asyncio.shield(self._spawn(self._pin_alone(key, prefix, root, ttl_s, unread_s)))

    async def _pin_alone(
        self, key: bytes, prefix: HashedTokens, root: bytes, ttl_s: float | None, unread_s: float
    ) -> PinOutcome | None:
        blocks = [block_number(block_hash) for block_hash in split_chain(prefix.chain)]
        ids = [*prefix.token_ids[: len(blocks) * self._size].tolist(), 0]
        async with self._locks.setdefault(key, asyncio.Lock()):
            while (added := self.pins.add(key, blocks, ttl_s, self._clock() - unread_s, prefix.tenant)) != "pinned":
                lent = self.pins.recall(blocks, prefix.tenant) if added == "over_budget" else None
                if lent is None:
                    return added
                self.recalled += 1
                await self._unpin(lent)
            try:
                await self._run(Job("pin", key.hex(), 0, len(blocks)), ids, root, prefix.scope.lora)
            except Exception:
                _log.exception("a prefix of %d blocks could not be kept", len(blocks))
                await self._let_go(key)
                return None
            return "pinned"

    async def _unpin(self, key: bytes) -> None:
        async with self._locks.setdefault(key, asyncio.Lock()):
            await self._let_go(key)

    async def _let_go(self, key: bytes) -> None:
        if self.pins.remove(key):
            try:
                await self._run(Job("unpin", key.hex()), [0], bytes(HASH_BYTES), "")
            except Exception:
                _log.exception("vLLM did not let go of kept blocks")

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _refused(self, blocks: int, request: EngineRequest) -> SaveResult:
        """Return what a client is told of a save for which there is no room."""
        numbers = (block_number(hash_at(request.block_hashes, i)) for i in range(blocks))
        more = blocks - self.pins.pinned_leading(numbers, request.tenant)
        held, budget = self.pins.room(request.tenant)
        return SaveResult("over_budget", more * self._size, held * self._size, budget * self._size)

    def _counted(self, result: SaveResult) -> SaveResult:
        self._meters.saves[result.outcome] += 1
        return result
