"""A version's KV is computed where its requests will go, before they come.

Those replicas are the ones that hold another version of the same prompt now; where none does, the router places it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple

from router.core import RoutingCore
from router.protocol.block_hash import HASH_BYTES
from router.protocol.request import RoutedRequest
from serve_app.api.request import ChatRequest, CompletionRequest, GenerateRequest
from serve_app.errors import InvalidRequest, Overloaded, WarmpathError
from serve_app.generation.dispatch import route_of
from serve_app.generation.generation import Generation, Tokens
from serve_app.generation.prepare import Preparer
from serve_app.prompts.registry import Prompt, Prompts
from serve_app.prompts.traffic import Use
from serve_app.tenants.tenants import Tenants

logger = logging.getLogger(__name__)

WARM_TIMEOUT_S = 300.0
"""For one way of asking, over all replicas."""

HEARD_TIMEOUT_S = 10.0
"""Until a router has heard what a replica holds; news takes milliseconds."""

PIECE_TOKENS = 256
"""Of a long prompt in one call, at least a block: an eighth of what a step may have by default."""

_POLL_S = 0.01
_TRIES = 3
_MAX_VERSIONS = 4
_WORDS = "Hello"

Generate = Callable[[Generation, tuple[str, ...]], AsyncGenerator[Tokens, None]]


class Warm(NamedTuple):
    """A version as one way of asking has it: ``replica_ids`` hold ``tokens`` of ``route``'s prompt or more."""

    route: RoutedRequest
    tokens: int
    replica_ids: tuple[str, ...]


class Warmer:
    """Warms versions through one ingress' router. ``generate``: the dispatcher's, with the replicas to avoid."""

    def __init__(
        self, prompts: Prompts, preparer: Preparer, tenants: Tenants, core: RoutingCore, generate: Generate, model: str
    ) -> None:
        self._prompts = prompts
        self._preparer = preparer
        self._tenants = tenants
        self._core = core
        self._generate = generate
        self._model = model

    def least_tokens(self, ref: str) -> int:
        """Return how many cached tokens say that all of a prompt was cached, 0 where it fills no block."""
        return self._prompts.least_tokens(ref, self._core.settings.block_size)

    async def warm(self, prompt: Prompt, uses: Sequence[Use], others: Sequence[str]) -> list[Warm]:
        """Compute a prompt's KV, replica by replica, for each way it is asked for; returns where it is then.

        ``others``: versions whose holders will get this one's requests. Nothing is computed where it is held already.
        Raises Overloaded where a replica does not hold it in the end, and what a request itself would be refused with.
        """
        least = self.least_tokens(prompt.ref)
        if not least:
            return []
        found: list[Warm] = []
        refused: WarmpathError | None = None
        for use in uses or self._default_uses(prompt):
            try:
                found.append(await asyncio.wait_for(self._warm(prompt.ref, use, others, least), WARM_TIMEOUT_S))
            except InvalidRequest as error:  # this way is open no more: a tenant or an adapter has gone
                refused = error
                logger.warning("%s is not warmed for %s: %s", prompt.ref, use, error.message)
            except TimeoutError:
                raise Overloaded(f"{prompt.ref} took over {WARM_TIMEOUT_S:.0f} s to compute.") from None
        if refused is not None and not found:
            raise refused
        return found

    async def heard(self, warm: Sequence[Warm]) -> bool:
        """Return whether this router knows, or comes to know, who holds all that."""
        deadline_s = time.monotonic() + HEARD_TIMEOUT_S
        while not all(set(each.replica_ids) <= self._holders(each.route, each.tokens) for each in warm):
            if time.monotonic() > deadline_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def _warm(self, ref: str, use: Use, others: Sequence[str], least: int) -> Warm:
        generation = await self._prepared(ref, use)
        route = route_of(generation)
        wanted: set[str] = set()
        for other in others[:_MAX_VERSIONS]:
            tokens = self.least_tokens(other)
            if tokens:
                wanted |= self._holders(route_of(await self._prepared(other, use)), tokens)
        wanted &= set(self._core.replica_ids)
        if not wanted and not self._holders(route, least):
            await self._prefill(generation, ())
            await self._until_held(route, least, None)
        for replica_id in sorted(wanted):
            for _ in range(_TRIES):
                if replica_id in self._holders(route, least) or replica_id not in self._core.replica_ids:
                    break
                await self._prefill(generation, tuple(set(self._core.replica_ids) - {replica_id}))
                await self._until_held(route, least, replica_id)
        held = self._holders(route, least)
        missing = wanted & set(self._core.replica_ids) - held
        if missing or not held:
            count = f"{len(missing)} of {len(wanted)} replicas" if missing else "any replica"
            raise Overloaded(
                f"{ref} is not in the cache of {count} after it was computed there: the KV pool may be too small, or "
                "prefix caching off. To use it all the same, send cold: true."
            )
        return Warm(route, least, tuple(sorted(held)))

    async def _prefill(self, generation: Generation, avoid: tuple[str, ...]) -> None:
        """Compute a prompt in pieces: whoever asks the replica meanwhile waits for a piece, not for a whole step."""
        size = self._core.settings.block_size
        piece_tokens = max(1, PIECE_TOKENS // size) * size
        for end in range(piece_tokens, len(generation.token_ids), piece_tokens):
            blocks = end // size
            scope = generation.scope
            if scope.public_blocks:
                scope = replace(scope, public_blocks=min(scope.public_blocks, blocks))
            hashes = generation.block_hashes[: blocks * HASH_BYTES]
            piece = replace(generation, token_ids=generation.token_ids[:end], block_hashes=hashes, scope=scope)
            await self._compute(piece, avoid)
        await self._compute(generation, avoid)

    async def _compute(self, generation: Generation, avoid: tuple[str, ...]) -> None:
        own = replace(
            generation, request_id=f"warm-{uuid.uuid4().hex}", deadline_s=time.perf_counter() + WARM_TIMEOUT_S
        )
        async with aclosing(self._generate(own, avoid)) as tokens:
            async for _ in tokens:
                pass

    async def _until_held(self, route: RoutedRequest, least: int, replica_id: str | None) -> None:
        deadline_s = time.monotonic() + HEARD_TIMEOUT_S / _TRIES
        while time.monotonic() < deadline_s:
            held = self._holders(route, least)
            if replica_id in held or (replica_id is None and held):
                return
            await asyncio.sleep(_POLL_S)

    def _holders(self, route: RoutedRequest, tokens: int) -> set[str]:
        return {replica_id for replica_id, held in self._core.holders(route).items() if held >= tokens}

    async def _prepared(self, ref: str, use: Use) -> Generation:
        tenant = self._tenants.by_name.get(use.tenant)
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
        (generation,) = await self._preparer.prepare(request, tenant, "warm")
        return generation

    def _default_uses(self, prompt: Prompt) -> Iterable[Use]:
        tenants = [tenant for tenant in self._tenants.by_name.values() if tenant.store_kv]
        if prompt.tenant is not None:
            tenants = [tenant for tenant in tenants if tenant.name == prompt.tenant]
        if not tenants:
            raise InvalidRequest(f"No tenant that may use {prompt.ref} leaves KV in the cache.", param="prompt_ref")
        models = [tenant for tenant in tenants if tenant.models is None or self._model in tenant.models]
        return [Use((models or tenants)[0].name, self._model, None, None, chat=True)]
