"""Cut-over of prompts over HTTP: warm, promote and roll back at every ingress, which stores the state in a file."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from serve_app.api.json_body import JsonBody, Text256
from serve_app.api.unknown import require_none
from serve_app.errors import InvalidRequest, NotFound, Overloaded, WarmpathError
from serve_app.generation.prepare import Preparer
from serve_app.ingress.prompts.warming import Warm, Warmer
from serve_app.prompts.cutover import Cutover, Cutovers, write_cutovers
from serve_app.prompts.lock import Prompt, PromptDirectory, PromptError
from serve_app.prompts.registry import Prompts
from serve_app.prompts.traffic import PromptTraffic, Use, VersionCounts, merged
from serve_app.tokenization.tokenizer import PromptTokenizer

logger = logging.getLogger(__name__)

PromptReport = tuple[dict[str, VersionCounts], dict[str, list[Use]]]


class PromptBody(JsonBody):
    """The body of ``POST /v1/prompts/...``."""

    prompt_ref: Text256 = Field(None, description="NAME@VERSION; for a rollback NAME")
    cold: bool = Field(False, description="switch at once, without computing the version first")


@dataclass(eq=False)
class PromptAdmin:
    """One ingress' part in changes of prompts. ``directory`` None: all prompts are from the settings.

    ``ingresses``: calls a method of every ingress, including this one; returns nothing if there is no other.
    """

    prompts: Prompts
    traffic: PromptTraffic
    warmer: Warmer
    preparer: Preparer
    tokenizer: PromptTokenizer
    directory: Path | None
    ingresses: Callable[..., Awaitable[list[Any]]]
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

    async def roll_back(self, body: bytes) -> dict[str, Any]:
        """Switch a name back to its previous version, even if that cannot be warmed."""
        ref, cold = _asked(body)
        async with self._one_at_a_time:
            name = ref.partition("@")[0]
            await self.learn()
            cutovers = self.prompts.cutovers.rolled_back(name)
            warm: list[Warm] = []
            if not cold:
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
            "versions": [
                {
                    "version": prompt.version,
                    "digest": prompt.digest or None,
                    "tokens": self.prompts.tokens(prompt.ref),
                    **figures.get(prompt.ref, VersionCounts()).to_json(),
                }
                for prompt in versions
            ],
        }


def _asked(body: bytes) -> tuple[str, bool]:
    """Return a body's ``prompt_ref`` and ``cold``."""
    asked = PromptBody.parse(body)
    require_none(asked.unknown())
    if asked.prompt_ref is None:
        raise InvalidRequest("prompt_ref must be given.", param="prompt_ref")
    return asked.prompt_ref, asked.cold
