"""Prefixes that stay in vLLM's pool: what requests save or keep, inside a pin budget and its tenants' shares.

Owns which and until when; their blocks are held by the connector. Belongs to the loop of vLLM's frontend, but for
``pins``' counts. A save that fails is a warning, never the request's failure.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from typing import Any

from router.protocol.block_hash import HASH_BYTES, hash_at, split_chain
from serve_app.cache.prefix.hot_prefixes import HashedTokens, SavedPrefix
from serve_app.cache.prefix.pins import PinOutcome, Pins
from serve_app.engine.metrics import EngineMeters
from serve_app.engine.protocol import Clock, EngineRequest, SaveOutcome, SaveResult
from serve_app.engine.vllm.events.held_blocks import HeldBlocks
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
    """One engine's. ``weights``: of the tenants' shares of ``budget_blocks``; ``held``: what the pool holds."""

    def __init__(
        self,
        budget_blocks: int,
        block_size: int,
        weights: Mapping[str, float],
        held: HeldBlocks,
        run: Run,
        meters: EngineMeters,
        clock: Clock,
    ) -> None:
        self.pins = Pins(budget_blocks, weights)
        self.recalled = 0
        self._size = block_size
        self._held = held
        self._run = run
        self._meters = meters
        self._clock = clock
        self._names: dict[bytes, str] = {}
        """What the connector knows a pin by: another name each time, as its end and its next beginning may overlap."""
        self._numbers = count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._under_way: dict[bytes, asyncio.Task[SaveOutcome]] = {}

    async def save(self, request: EngineRequest) -> SaveResult | None:
        """Let the time of what a request reads run anew; have what it asks to save computed and kept before it."""
        now_s, chain, save = self._clock(), request.block_hashes, request.save
        if not self.pins.budget_blocks:
            return None if save is None else SaveResult("off")
        if self.pins.next_expiry_s is not None:
            held = self._held.known(chain, len(chain) // HASH_BYTES)
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
            if key not in self._names and self.pins.of_tenant(request.tenant) >= MAX_KEPT_PREFIXES:
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
        root = self._held.root_of(hash_at(prefix.chain, 0))
        over = (saved.ttl_s or math.inf) <= saved.unread_s
        if not root or over or self._held.known(prefix.chain, blocks) < blocks:
            return None
        outcome = await self._pin(saved.key, prefix, root, saved.ttl_s, unread_s=saved.unread_s)
        return {"saved": "pinned", "present": "present", "over_budget": "over_budget"}.get(outcome)  # type: ignore[return-value]

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
        if key not in self._under_way:
            if not blocks:
                return SaveResult("too_short")
            if blocks > self.pins.budget_blocks:
                return SaveResult("too_large", blocks * self._size, 0, self.pins.budget_blocks * self._size)
        chain = request.block_hashes[: blocks * HASH_BYTES]
        prefix = HashedTokens(request.scope, request.token_ids, chain, request.tenant)
        outcome = await self._pin(key, prefix, request.root, ttl_s)
        return self._refused(blocks, request) if outcome == "over_budget" else SaveResult(outcome)

    async def _pin(
        self, key: bytes, prefix: HashedTokens, root: bytes, ttl_s: float | None, *, unread_s: float = 0.0
    ) -> SaveOutcome:
        """Pin a prefix, or wait for who does. It goes on to its end, whoever leaves meanwhile: others may wait."""
        task = self._under_way.get(key)
        if task is not None:
            outcome = await asyncio.shield(task)
            return "present" if outcome == "saved" else outcome
        task = self._under_way[key] = self._spawn(self._pinned(key, prefix, root, ttl_s, unread_s))
        task.add_done_callback(lambda _: self._under_way.pop(key))
        return await asyncio.shield(task)

    async def _pinned(
        self, key: bytes, prefix: HashedTokens, root: bytes, ttl_s: float | None, unread_s: float
    ) -> SaveOutcome:
        blocks = [block_number(block_hash) for block_hash in split_chain(prefix.chain)]
        while (added := self.pins.add(key, blocks, ttl_s, self._clock() - unread_s, prefix.tenant)) == "over_budget":
            lent = self.pins.recall(blocks, prefix.tenant)
            if lent is None:
                return "over_budget"
            self.recalled += 1
            await self._unpin(lent)
        if added == "present":
            return "present"
        name = self._names[key] = f"pin-{next(self._numbers)}"
        ids = prefix.token_ids[: len(blocks) * self._size].tolist()
        try:
            await self._run(Job("pin", name, 0, len(blocks)), [*ids, 0], root, prefix.scope.lora)
        except Exception:
            _log.exception("a prefix of %d blocks could not be kept", len(blocks))
            if self._names.get(key) == name:
                await self._unpin(key)
            return "failed"
        if self._names.get(key) != name:  # it was let go of meanwhile, when nothing was held yet
            await self._let_go(name)
            return "failed"
        return "saved"

    async def _unpin(self, key: bytes) -> None:
        self.pins.remove(key)
        name = self._names.pop(key, None)
        if name is not None:
            await self._let_go(name)

    async def _let_go(self, name: str) -> None:
        try:
            await self._run(Job("unpin", name), [0], bytes(HASH_BYTES), "")
        except Exception:
            _log.exception("vLLM did not let go of kept blocks")

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
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
