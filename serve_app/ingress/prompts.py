"""Cut-over of prompts over HTTP: warm, promote and roll back at every ingress, which stores the state in a file.

``Warmer`` computes a version's KV on the replicas that its requests will use: the holders of another version.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import structs
from pydantic import Field

from router.core import RoutingCore
from router.protocol.block_hash import HASH_BYTES
from router.protocol.request import RoutedRequest
from serve_app.api.json_body import JsonBody, Must, Text256
from serve_app.api.request import ChatRequest, CompletionRequest, GenerateRequest, require_none
from serve_app.config.tenants import PriceConfig
from serve_app.engine.protocol import EngineOutput, EngineRequest
from serve_app.errors import InvalidRequest, NotFound, Overloaded, WarmpathError
from serve_app.generation.prepare import Preparer
from serve_app.prompts.lock import Prompt, PromptDirectory, PromptError
from serve_app.prompts.registry import (
    Cutover,
    Cutovers,
    Prompts,
    PromptTraffic,
    Use,
    VersionCounts,
    merged,
    write_cutovers,
)
from serve_app.prompts.worth import too_few_reads, too_short
from serve_app.tenants import Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer

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
    """Warms versions through one ingress' router. ``generate``: the dispatcher's function, with replicas to avoid.

    ``asks``: while it is entered, a model at zero gets a replica.
    """

    prompts: Prompts
    preparer: Preparer
    tenants: Tenants
    core: RoutingCore
    generate: Generate
    model: str
    asks: Callable[[], AbstractContextManager[None]] = nullcontext

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
        with self.asks():
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


PromptReport = tuple[dict[str, VersionCounts], dict[str, list[Use]]]


class PromptBody(JsonBody):
    """The body of ``POST /v1/prompts/...``."""

    prompt_ref: Text256 = Field(None, description="NAME@VERSION; for a rollback NAME")
    cold: bool = Field(False, description="switch at once, without computing the version first")


class CutoverBody(PromptBody):
    """The body of ``POST /v1/prompts/cutover``."""

    percent: Annotated[float | None, Field(ge=0, le=100), Must("a number from 0 to 100")] = Field(
        None, description="of the conversations that get the version; 0: none, so all are back; 100: it is promoted"
    )


@dataclass(eq=False)
class PromptAdmin:
    """One ingress' part in changes of prompts. ``directory`` None: all prompts are from the settings.

    ``ingresses``: calls a method of every ingress, including this one; returns nothing if there is no other.
    ``price``: of the model's tokens.
    """

    prompts: Prompts
    traffic: PromptTraffic
    warmer: Warmer
    preparer: Preparer
    tokenizer: PromptTokenizer
    directory: Path | None
    ingresses: Callable[..., Awaitable[list[Any]]]
    price: Callable[[], PriceConfig | None] = lambda: None
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def status(self, name: str | None = None) -> dict[str, Any]:
        """Return every name's versions, its current version, and the usage of each version."""
        figures = merged(report for report, _ in await self._reports())
        by_name: dict[str, list[Prompt]] = {}
        for prompt in self.prompts.all().values():
            if name in (None, prompt.name):
                by_name.setdefault(prompt.name, []).append(prompt)
        if name is not None and not by_name:
            raise NotFound(f"There is no prompt {name[:64]!r}.", code="prompt_not_found", param="prompt_ref")
        return {
            "object": "list",
            "data": [self._shown(versions, figures) for _, versions in sorted(by_name.items())],
        }

    async def warm(self, body: bytes) -> dict[str, Any]:
        """Compute a version on the replicas that will get its requests. Raises a WarmpathError."""
        ref, _ = _asked(body)
        async with self._one_at_a_time:
            prompt = await self._prompt(ref)
            return await self._done(prompt.name, await self._warmed(prompt))

    async def promote(self, body: bytes) -> dict[str, Any]:
        """Switch the name to a version, once it is warm. Raises a WarmpathError."""
        ref, cold = _asked(body)
        async with self._one_at_a_time:
            prompt = await self._prompt(ref)
            warm = [] if cold else await self._warmed(prompt)
            await self.learn()
            await self._switch(self.prompts.cutovers.promoted(prompt.name, prompt.version))
            return await self._done(prompt.name, warm)

    async def cut_over(self, body: bytes) -> dict[str, Any]:
        """Move a part of a name's conversations to a version, once it is warm; or all back. Raises a WarmpathError."""
        asked = CutoverBody.parse(body)
        ref, cold = _asked(asked)
        percent = asked.percent
        if percent is None:
            raise InvalidRequest("percent must be given: a number from 0 to 100.", param="percent")
        async with self._one_at_a_time:
            name, _, version = ref.partition("@")
            if percent:
                prompt = await self._prompt(ref)
                self.prompts.cutovers.cut_over(prompt.name, prompt.version, percent)  # refused before it is computed
                warm = [] if cold else await self._warmed(prompt)
                await self.learn()
                await self._switch(self.prompts.cutovers.cut_over(prompt.name, prompt.version, percent))
                return await self._done(prompt.name, warm)
            await self.learn()
            cutover = self.prompts.cutovers.names.get(name, Cutover(""))
            if not cutover.coming or version not in ("", cutover.coming):
                raise InvalidRequest(
                    f"No part of {ref[:160]!r} is cut over; there is nothing to take back.", param="prompt_ref"
                )
            await self._switch(self.prompts.cutovers.rolled_back(name))
            return await self._done(name, [])

    async def roll_back(self, body: bytes) -> dict[str, Any]:
        """End a cut-over in part; else switch a name back to its previous version, even if that cannot be warmed."""
        ref, cold = _asked(body)
        async with self._one_at_a_time:
            name = ref.partition("@")[0]
            await self.learn()
            cutovers = self.prompts.cutovers.rolled_back(name)
            warm: list[Warm] = []
            if not cold and not self.prompts.cutovers.names[name].coming:
                try:
                    warm = await self._warmed(self.prompts.all()[cutovers.refs(name)[0]])
                except WarmpathError as error:
                    logger.warning("rolling back to a version that is not warm: %s", error.message)
            await self._switch(cutovers)
            return await self._done(name, warm)

    async def learn(self) -> None:
        """Exchange the cut-overs with other ingresses: the newer state wins on both sides."""
        for known in await self.ingresses("exchange_cutovers", self.prompts.cutovers):
            await self.exchange(known)

    # Calls between ingresses.

    async def reload(self) -> str:
        """Reload the directory; return its problem, "" for none. With a problem, nothing changes."""
        if self.directory is None:
            return "prompts_dir is not set: prompts of the settings have no cut-over"
        try:
            locked = await asyncio.to_thread(PromptDirectory(self.directory).read)
            await self.prompts.replace(self.tokenizer, locked=locked)
        except PromptError as error:
            return str(error)
        self.preparer.prompts_changed()
        return ""

    async def exchange(self, cutovers: Cutovers) -> Cutovers:
        """Apply and store a state if it is newer; return this ingress' resulting state."""
        try:
            if self.prompts.switch(cutovers) and self.directory is not None:
                await asyncio.to_thread(write_cutovers, self.directory, cutovers)
        except (PromptError, OSError) as error:
            logger.warning("a change of prompts was not stored: %s", error)
        return self.prompts.cutovers

    async def _prompt(self, ref: str) -> Prompt:
        """Return the referenced version, once every ingress has reloaded it from disk."""
        problems = [problem for problem in await self.ingresses("reload_prompts") or [await self.reload()] if problem]
        if problems:
            raise InvalidRequest(f"The prompts cannot be used: {problems[0]}.", param="prompt_ref")
        prompt = self.prompts.all().get(ref)
        if prompt is None or not prompt.digest:
            raise NotFound(
                f"There is no {ref[:160]!r} in prompts_dir; see GET /v1/prompts.",
                code="prompt_not_found",
                param="prompt_ref",
            )
        return prompt

    async def _warmed(self, prompt: Prompt) -> list[Warm]:
        reports = await self._reports()
        uses = list(dict.fromkeys(use for _, by_name in reports for use in by_name.get(prompt.name, ())))
        figures = merged(report for report, _ in reports)
        used = sorted(figures, key=lambda ref: -figures[ref].requests)
        versions = self.prompts.all()
        others = [
            ref
            for ref in dict.fromkeys((*self.prompts.cutovers.refs(prompt.name), *used))
            if ref in versions and versions[ref].name == prompt.name and ref != prompt.ref
        ]
        warm = await self.warmer.warm(prompt, uses, others)
        if not all(await self.ingresses("prompts_heard", warm) or [await self.warmer.heard(warm)]):
            raise Overloaded(f"Not every router knows the holders of {prompt.ref} yet; try again.", retry_after_s=2.0)
        return warm

    async def _switch(self, cutovers: Cutovers) -> None:
        """Store a state, then apply it at every ingress. Raises InvalidRequest if it cannot be stored here."""
        assert self.directory is not None
        try:
            await asyncio.to_thread(write_cutovers, self.directory, cutovers)
        except OSError as error:
            raise InvalidRequest(
                f"prompts_dir cannot be written to ({error.strerror}); nothing has changed."
            ) from error
        await self.exchange(cutovers)
        await self.ingresses("exchange_cutovers", cutovers)

    def _advice(self, prompt: Prompt, counted: VersionCounts) -> str:
        """Return whether a version is worth caching, "" if it is."""
        cold = counted.requests - counted.warm_requests
        price = self.price()
        return too_short(self.prompts.tokens(prompt.ref), self.warmer.core.settings.block_size) or too_few_reads(
            counted.warm_requests, cold, price.break_even_reads if price is not None else None
        )

    async def _reports(self) -> list[PromptReport]:
        return await self.ingresses("prompt_report") or [self.traffic.report()]

    async def _done(self, name: str, warm: Sequence[Warm]) -> dict[str, Any]:
        (shown,) = (await self.status(name))["data"]
        return {**shown, "warm": [{"tokens": way.tokens, "replicas": list(way.replica_ids)} for way in warm]}

    def _shown(self, versions: Sequence[Prompt], figures: Mapping[str, VersionCounts]) -> dict[str, Any]:
        name = versions[0].name
        cutover = self.prompts.cutovers.names.get(name, Cutover(""))
        return {
            "name": name,
            "tenant": versions[0].tenant,
            "promoted": cutover.promoted or None,
            "previous": cutover.previous or None,
            "coming": cutover.coming or None,
            "percent": cutover.coming_percent if cutover.coming else None,
            "versions": [
                {
                    "version": prompt.version,
                    "digest": prompt.digest or None,
                    "tokens": self.prompts.tokens(prompt.ref),
                    **(counted := figures.get(prompt.ref, VersionCounts())).to_json(),
                    "advice": self._advice(prompt, counted) or None,
                }
                for prompt in versions
            ],
        }


def _asked(body: bytes | PromptBody) -> tuple[str, bool]:
    """Return a body's ``prompt_ref`` and ``cold``."""
    asked = PromptBody.parse(body) if isinstance(body, bytes) else body
    require_none(asked.unknown())
    if asked.prompt_ref is None:
        raise InvalidRequest("prompt_ref must be given.", param="prompt_ref")
    return asked.prompt_ref, asked.cold
