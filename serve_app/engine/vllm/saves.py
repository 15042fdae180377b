"""Prefixes that stay in vLLM's pool: what requests save or keep, inside a pin budget and its tenants' shares.

Owns which and until when; their blocks are held by the connector. Belongs to the loop of vLLM's frontend, but for
``pins``' counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from itertools import count
from typing import Any

from router.protocol.block_hash import HASH_BYTES, hash_at, split_chain
from serve_app.cache.prefix.hot_prefixes import HashedTokens, SavedPrefix
from serve_app.cache.prefix.pins import PinOutcome, Pins
from serve_app.engine.metrics import EngineMeters
from serve_app.engine.pin_keeper import PinKeeper, WantedPin
from serve_app.engine.protocol import Clock, EngineRequest, SaveOutcome, SaveResult
from serve_app.engine.vllm.transfer.job import Job

_log = logging.getLogger(__name__)

Run = Callable[[Job, Sequence[int], bytes, str], Awaitable[int]]
"""Has vLLM run a job as a request of one token: job, prompt, root, adapter."""


def block_number(block_hash: bytes) -> int:
    """Return what ``Pins`` know a block by: vLLM's own numbers change hands."""
    return int.from_bytes(block_hash, "big")


class VllmSaves:
    """One engine's. ``weights``: of the tenants' shares of ``budget_blocks``."""

    def __init__(
        self,
        budget_blocks: int,
        block_size: int,
        weights: Mapping[str, float],
        run: Run,
        meters: EngineMeters,
        clock: Clock,
    ) -> None:
        self.pins = Pins(budget_blocks, weights)
        self.recalled = 0
        self._size = block_size
        self._run = run
        self._clock = clock
        self._keeper = PinKeeper(self.pins, block_size, meters, clock)
        self._names: dict[bytes, str] = {}
        self._numbers = count()
        self._under_way: dict[bytes, asyncio.Task[SaveOutcome]] = {}
        self._unpinning: set[asyncio.Task[None]] = set()

    async def keep(self, request: EngineRequest) -> SaveResult | None:
        """Keep the prefixes that a request asks for, as far as they fit, now that all of its prompt has KV."""
        results: list[SaveResult] = []
        blocks = len(request.token_ids) // self._size
        for wanted in self._keeper.wanted(request, request.block_hashes, blocks):
            results.append(await self._keep(wanted, request))
            if results[-1].refused:
                break
        return self._keeper.told(request, results)

    async def take_over(self, saved: SavedPrefix, prefix: HashedTokens, root: bytes) -> PinOutcome | None:
        """Keep what another replica kept, with what is left of its time; all of it is held here."""
        blocks = [block_number(one) for one in split_chain(prefix.chain)]
        ids = prefix.token_ids[: len(blocks) * self._size].tolist()
        outcome = await self._begin(
            saved.key,
            self._pin(
                saved.key, blocks, saved.ttl_s, saved.tenant, ids, root, prefix.scope.lora, unread_s=saved.unread_s
            ),
        )
        return {"saved": "pinned", "present": "present", "over_budget": "over_budget"}.get(outcome)  # type: ignore[return-value]

    def read(self, chain: bytes, blocks: int) -> None:
        """Let the time of what is wholly within the first ``blocks`` of a chain run anew."""
        if self.pins.next_expiry_s is not None:
            self.pins.read([block_number(hash_at(chain, i)) for i in range(blocks)], self._clock())

    def expire(self) -> None:
        """Let go of what nobody read for its time."""
        for key in self.pins.expired(self._clock()):
            task = asyncio.get_running_loop().create_task(self._unpin(key))
            self._unpinning.add(task)
            task.add_done_callback(self._unpinning.discard)

    async def clear(self) -> None:
        """Let go of everything."""
        for key in self.pins:
            await self._unpin(key)

    async def set_shares(self, weights: Mapping[str, float]) -> None:
        """Go by other weights of tenants from now on; what others have pinned ends."""
        self.pins.set_weights(weights)
        for key in self.pins.of_others(weights) if weights else ():
            await self._unpin(key)

    async def _keep(self, wanted: WantedPin, request: EngineRequest) -> SaveResult:
        numbers = [block_number(hash_at(request.block_hashes, i)) for i in range(wanted.blocks)]
        if wanted.key in self._under_way:
            outcome = await asyncio.shield(self._under_way[wanted.key])
            return self._keeper.pinned("present" if outcome == "saved" else outcome, request.tenant, numbers)
        result = self._keeper.without_pinning(wanted, request.tenant, numbers)
        if result is None:
            ids = request.token_ids[: wanted.blocks * self._size].tolist()
            pin = self._pin(wanted.key, numbers, wanted.ttl_s, request.tenant, ids, request.root, request.scope.lora)
            result = self._keeper.pinned(await self._begin(wanted.key, pin), request.tenant, numbers)
        return result

    async def _begin(self, key: bytes, pin: Coroutine[Any, Any, SaveOutcome]) -> SaveOutcome:
        """Run a pin to its end, whoever leaves meanwhile: others may wait for it."""
        task = self._under_way[key] = asyncio.get_running_loop().create_task(pin)
        task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return await asyncio.shield(task)

    async def _pin(
        self,
        key: bytes,
        blocks: Sequence[int],
        ttl_s: float | None,
        tenant: str,
        token_ids: list[int],
        root: bytes,
        lora: str,
        *,
        unread_s: float = 0.0,
    ) -> SaveOutcome:
        now_s = self._clock() - unread_s
        while (added := self.pins.add(key, blocks, ttl_s, now_s, tenant)) == "over_budget":
            lent = self.pins.recall(blocks, tenant)
            if lent is None:
                return "over_budget"
            self.recalled += 1
            await self._unpin(lent)
        if added == "present":
            return "present"
        name = self._names[key] = f"pin-{next(self._numbers)}"
        try:
            await self._run(Job("pin", name, 0, len(blocks)), [*token_ids, 0], root, lora)
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
            await self._run(Job("unpin", name, 0, 0), [0], bytes(HASH_BYTES), "")
        except Exception:
            _log.exception("vLLM did not let go of kept blocks")
