"""Computes a version's KV on the replicas that its requests will use: the holders of another version."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from msgspec import structs

from router.core import RoutingCore
from router.protocol.block_hash import HASH_BYTES
from router.protocol.request import RoutedRequest
from serve_app.api.request import ChatRequest, CompletionRequest, GenerateRequest
from serve_app.engine.protocol import EngineOutput, EngineRequest
from serve_app.errors import InvalidRequest, Overloaded, WarmpathError
from serve_app.generation.prepare import Preparer
from serve_app.prompts.lock import Prompt
from serve_app.prompts.registry import Prompts
from serve_app.prompts.traffic import Use
from serve_app.tenants.tenants import Tenants

logger = logging.getLogger(__name__)

WARM_TIMEOUT_S = 300.0
"""For one use of a prompt, over all replicas."""

HEARD_TIMEOUT_S = 10.0
"""The time for a router to learn a replica's blocks; the feed needs milliseconds."""

PIECE_TOKENS = 256
"""Tokens of a long prompt in one call, at least a block: an eighth of a step's default budget."""

_TRIES = 3
_MAX_VERSIONS = 4
_WORDS = "Hello"

Generate = Callable[[EngineRequest, tuple[str, ...]], AsyncGenerator[EngineOutput, None]]


class Warm(NamedTuple):
    """A warm version in one form of use: ``replica_ids`` hold at least ``tokens`` of ``route``'s prompt."""

    route: RoutedRequest
    tokens: int
    replica_ids: tuple[str, ...]


@dataclass(eq=False)
class Warmer:
    """Warms versions through one ingress' router. ``generate``: the dispatcher's function, with replicas to avoid."""

    prompts: Prompts
    preparer: Preparer
    tenants: Tenants
    core: RoutingCore
    generate: Generate
    model: str

    async def warm(self, prompt: Prompt, uses: Sequence[Use], others: Sequence[str]) -> list[Warm]:
        """Compute a prompt's KV, replica by replica, for each form of use; return its places.

        ``others``: versions with holders that will get its requests. Raises Overloaded, and a request's own errors.
        """
        if not self._least_tokens(prompt.ref):
            return []
        warm: list[Warm] = []
        refused: WarmpathError | None = None
        for use in uses or self._default_uses(prompt):
            try:
                warm.append(await asyncio.wait_for(self._warm(prompt.ref, use, others), WARM_TIMEOUT_S))
            except InvalidRequest as error:  # this use is no longer valid: a tenant or an adapter is gone
                refused = error
                logger.warning("%s is not warmed for %s: %s", prompt.ref, use, error.message)
            except TimeoutError:
                raise Overloaded(f"{prompt.ref} took over {WARM_TIMEOUT_S:.0f} s to compute.") from None
        if refused is not None and not warm:
            raise refused
        return warm

    async def heard(self, warm: Sequence[Warm]) -> bool:
        """Return whether this router knows all these holders, now or within ``HEARD_TIMEOUT_S``."""
        return await _becomes(
            lambda: all(set(way.replica_ids) <= self._holders(way.route, way.tokens) for way in warm), HEARD_TIMEOUT_S
        )

    async def _warm(self, ref: str, use: Use, others: Sequence[str]) -> Warm:
        least = self._least_tokens(ref)
        generation = await self._prepared(ref, use)
        wanted: set[str] = set()
        for other in others[:_MAX_VERSIONS]:
            tokens = self._least_tokens(other)
            if tokens:
                wanted |= self._holders(await self._prepared(other, use), tokens)
        wanted &= set(self.core.replica_ids)
        for replica_id in sorted(wanted) or (None,):
            await self._place(generation, least, replica_id)
        held = self._holders(generation, least)
        missing = wanted & set(self.core.replica_ids) - held
        if missing or not held:
            count = f"{len(missing)} of {len(wanted)} replicas" if missing else "any replica"
            raise Overloaded(
                f"{ref} is not in the cache of {count} after it was computed there: the KV pool may be too small, or "
                "prefix caching off. To use it all the same, send cold: true."
            )
        route = RoutedRequest("", generation.block_hashes, generation.prompt_tokens)
        return Warm(route, least, tuple(sorted(held)))

    async def _place(self, generation: EngineRequest, least: int, replica_id: str | None) -> None:
        """Compute a prompt on a replica, or (None) on the router's choice, unless that holds it already."""

        def held() -> bool:
            holders = self._holders(generation, least)
            return replica_id in holders or (replica_id is None and bool(holders))

        for _ in range(_TRIES):
            replica_ids = set(self.core.replica_ids)
            if held() or (replica_id is not None and replica_id not in replica_ids):
                return
            await self._prefill(generation, () if replica_id is None else tuple(replica_ids - {replica_id}))
            await _becomes(held, HEARD_TIMEOUT_S / _TRIES)

    async def _prefill(self, generation: EngineRequest, avoid: tuple[str, ...]) -> None:
        """Compute a prompt in pieces, so that other requests at the replica wait for a piece, not for a whole step."""
        size = self.core.settings.block_size
        piece_tokens = max(1, PIECE_TOKENS // size) * size
        for end in (*range(piece_tokens, len(generation.token_ids), piece_tokens), None):
            piece = structs.replace(
                generation,
                request_id=f"warm-{uuid.uuid4().hex}",
                deadline_s=time.perf_counter() + WARM_TIMEOUT_S,
            )
            if end is not None:
                blocks = end // size
                scope = replace(generation.scope, public_blocks=min(generation.scope.public_blocks, blocks))
                hashes = generation.block_hashes[: blocks * HASH_BYTES]
                piece = structs.replace(piece, token_ids=piece.token_ids[:end], block_hashes=hashes, scope=scope)
            async with aclosing(self.generate(piece, avoid)) as tokens:
                async for _ in tokens:
                    pass

    def _least_tokens(self, ref: str) -> int:
        return self.prompts.least_tokens(ref, self.core.settings.block_size)

    def _holders(self, route: RoutedRequest, tokens: int) -> set[str]:
        return {replica_id for replica_id, held in self.core.holders(route).items() if held >= tokens}

    async def _prepared(self, ref: str, use: Use) -> EngineRequest:
        tenant = self.tenants.by_name.get(use.tenant)
        if tenant is None:
            raise InvalidRequest(f"There is no tenant {use.tenant[:64]!r} to compute {ref} for.", param="prompt_ref")
        fields: dict[str, Any] = {
            "model": use.model, "lora_name": use.lora_name, "cache_salt": use.cache_salt, "prompt_ref": ref,
            "max_tokens": 0, "temperature": 0.0,
        }  # fmt: skip
        request: GenerateRequest
        if use.chat:
            request = ChatRequest(messages=({"role": "user", "content": _WORDS},), **fields)
        else:
            request = CompletionRequest(prompts=(_WORDS,), **fields)
        (generation,) = await self.preparer.prepare(request, tenant, "warm")
        return structs.replace(generation, charged=False)

    def _default_uses(self, prompt: Prompt) -> Iterable[Use]:
        tenants = [tenant for tenant in self.tenants.by_name.values() if tenant.store_kv]
        if prompt.tenant is not None:
            tenants = [tenant for tenant in tenants if tenant.name == prompt.tenant]
        if not tenants:
            raise InvalidRequest(f"No tenant that may use {prompt.ref} leaves KV in the cache.", param="prompt_ref")
        models = [tenant for tenant in tenants if tenant.models is None or self.model in tenant.models]
        return [Use((models or tenants)[0].name, self.model, None, None, chat=True)]


async def _becomes(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether a condition holds, or begins to hold in time."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(0.01)
    return True
