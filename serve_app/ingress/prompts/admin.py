"""Cut-over of prompts over HTTP: warm, promote, roll back, at every ingress. The caller has checked who asks.

The directory is read anew by every ingress before anything changes, and each one keeps the state in a file beside it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from serve_app.api.json_body import Flag, JsonBody, Text256
from serve_app.api.unknown import require_none
from serve_app.errors import InvalidRequest, NotFound, Overloaded, WarmpathError
from serve_app.generation.prepare import Preparer
from serve_app.ingress.prompts.warming import Warm, Warmer
from serve_app.prompts.cutover import Cutover, Cutovers, write_cutovers
from serve_app.prompts.lock import PromptDirectory, PromptError
from serve_app.prompts.registry import Prompt, Prompts
from serve_app.prompts.traffic import Figures, PromptTraffic, Use, merged
from serve_app.tokenization.tokenizer import PromptTokenizer

logger = logging.getLogger(__name__)

Report = tuple[dict[str, Figures], dict[str, list[Use]]]


class Everywhere(Protocol):
    """Calls a method of every ingress, this one too; returns nothing where there is no other."""

    def __call__(self, method: str, *arguments: Any, timeout_s: float = 30) -> Awaitable[list[Any]]:
        """Return the answers."""


class PromptBody(JsonBody):
    """The body of ``POST /v1/prompts/...``."""

    prompt_ref: Text256 = Field(None, description="NAME@VERSION; for a roll-back NAME")
    cold: Flag = Field(False, description="switch at once, without computing the version first")


class PromptAdmin:
    """One ingress' part in what becomes of prompts. ``directory`` None: prompts come from the settings alone."""

    def __init__(
        self,
        prompts: Prompts,
        traffic: PromptTraffic,
        warmer: Warmer,
        preparer: Preparer,
        tokenizer: PromptTokenizer,
        directory: Path | None,
        ingresses: Everywhere,
    ) -> None:
        self._prompts = prompts
        self._traffic = traffic
        self._warmer = warmer
        self._preparer = preparer
        self._tokenizer = tokenizer
        self._directory = directory
        self._ingresses = ingresses
        self._one_at_a_time = asyncio.Lock()

    async def status(self, name: str | None = None) -> dict[str, Any]:
        """Return every name's versions, what it means now, and how each version is used."""
        figures = merged(report for report, _ in await self._reports())
        by_name: dict[str, list[Prompt]] = {}
        for prompt in self._prompts.all().values():
            if name in (None, prompt.name):
                by_name.setdefault(prompt.name, []).append(prompt)
        if name is not None and not by_name:
            raise NotFound(f"There is no prompt {name[:64]!r}.", code="prompt_not_found", param="prompt_ref")
        return {
            "object": "list",
            "data": [
                {
                    "name": each,
                    "tenant": versions[0].tenant,
                    **_shown(self._prompts.cutovers.names.get(each)),
                    "versions": [
                        {
                            "version": prompt.version,
                            "digest": prompt.digest or None,
                            "tokens": self._prompts.tokens(prompt.ref),
                            **figures.get(prompt.ref, Figures()).to_json(),
                        }
                        for prompt in versions
                    ],
                }
                for each, versions in sorted(by_name.items())
            ],
        }

    async def warm(self, body: bytes) -> dict[str, Any]:
        """Compute a version where its requests will go. Raises a WarmpathError."""
        asked = self._asked(body)
        async with self._one_at_a_time:
            prompt = await self._prompt(asked)
            warm = await self._warmed(prompt)
        return self._done(await self.status(prompt.name), warm)

    async def promote(self, body: bytes) -> dict[str, Any]:
        """Let the name mean a version, once it is warm. Raises a WarmpathError."""
        return await self._change(self._asked(body), lambda now, prompt: now.promoted(prompt.name, prompt.version))

    async def roll_back(self, body: bytes) -> dict[str, Any]:
        """Let a name mean the version before; one that cannot be warmed is taken cold."""
        asked = self._asked(body)
        async with self._one_at_a_time:
            name = (asked.prompt_ref or "").partition("@")[0]
            cutovers = (await self._newest()).rolled_back(name)
            warm: list[Warm] = []
            if not asked.cold:
                try:
                    warm = await self._warmed(self._prompts.all()[f"{name}@{cutovers.names[name].promoted}"])
                except WarmpathError as error:
                    logger.warning("rolling back to a version that is not warm: %s", error.message)
            await self._switch(cutovers)
        return self._done(await self.status(name), warm)

    # What ingresses ask of each other.

    async def learn(self) -> None:
        """Take in what other ingresses go by, where it is newer."""
        for known in await self._ingresses("known_cutovers"):
            await self.take(known)

    async def reload(self) -> str:
        """Read the directory again; returns what is wrong with it, "" where nothing is, and else changes nothing."""
        if self._directory is None:
            return "prompts_dir is not set: prompts of the settings have no cut-over"
        try:
            locked = await asyncio.to_thread(PromptDirectory(self._directory).read)
            await self._prompts.replace(self._tokenizer, locked=locked)
        except PromptError as error:
            return str(error)
        self._preparer.prompts_changed()
        return ""

    async def heard(self, warm: Sequence[Warm]) -> bool:
        """Return whether this ingress' router knows who holds all that."""
        return await self._warmer.heard(warm)

    async def take(self, cutovers: Cutovers) -> str:
        """Go by a state from now on, if it is newer, and keep it; returns why it cannot be kept, or ""."""
        try:
            if self._prompts.switch(cutovers) and self._directory is not None:
                await asyncio.to_thread(write_cutovers, self._directory, cutovers)
        except (PromptError, OSError) as error:
            logger.warning("a change of prompts is not kept: %s", error)
            return str(error)
        return ""

    def known(self) -> Cutovers:
        """Return what this ingress goes by."""
        return self._prompts.cutovers

    def report(self) -> Report:
        """Return how prompts are used here."""
        return self._traffic.report()

    async def _change(self, asked: PromptBody, change: Callable[[Cutovers, Prompt], Cutovers]) -> dict[str, Any]:
        async with self._one_at_a_time:
            prompt = await self._prompt(asked)
            change(self._prompts.cutovers, prompt)  # what cannot be is refused before anything is computed
            warm = [] if asked.cold else await self._warmed(prompt)
            await self._switch(change(await self._newest(), prompt))
        return self._done(await self.status(prompt.name), warm)

    def _asked(self, body: bytes) -> PromptBody:
        asked = PromptBody.parse(body)
        require_none(asked.unknown())
        if asked.prompt_ref is None:
            raise InvalidRequest("prompt_ref must be given.", param="prompt_ref")
        return asked

    async def _prompt(self, asked: PromptBody) -> Prompt:
        """Return the version that is meant, once every ingress has it as it lies on disk."""
        problems = [problem for problem in await self._ingresses("reload_prompts") or [await self.reload()] if problem]
        if problems:
            raise InvalidRequest(f"The prompts cannot be used: {problems[0]}.", param="prompt_ref")
        found = self._prompts.all().get(asked.prompt_ref or "")
        if found is None or not found.digest:
            raise NotFound(
                f"There is no {(asked.prompt_ref or '')[:160]!r} in prompts_dir; see GET /v1/prompts.",
                code="prompt_not_found",
                param="prompt_ref",
            )
        return found

    async def _warmed(self, prompt: Prompt) -> list[Warm]:
        reports = await self._reports()
        uses = list(dict.fromkeys(use for _, by_name in reports for use in by_name.get(prompt.name, ())))
        figures = merged(report for report, _ in reports)
        cutover = self._prompts.cutovers.names.get(prompt.name)
        named = [f"{prompt.name}@{version}" for version in (cutover.versions() if cutover else ())]
        used = sorted(figures, key=lambda ref: -figures[ref].requests)
        others = dict.fromkeys(ref for ref in (*named, *used) if ref.partition("@")[0] == prompt.name)
        others.pop(prompt.ref, None)
        warm = await self._warmer.warm(prompt, uses, [ref for ref in others if ref in self._prompts.all()])
        if not all(await self._ingresses("prompts_heard", warm) or [await self.heard(warm)]):
            raise Overloaded(f"Not every router knows yet who holds {prompt.ref}; try again.", retry_after_s=2.0)
        return warm

    async def _newest(self) -> Cutovers:
        await self.learn()
        return self._prompts.cutovers

    async def _switch(self, cutovers: Cutovers) -> None:
        """Keep a state, then let every ingress go by it. Raises InvalidRequest where it cannot be kept here."""
        assert self._directory is not None
        try:
            await asyncio.to_thread(write_cutovers, self._directory, cutovers)
        except OSError as error:
            raise InvalidRequest(
                f"prompts_dir cannot be written to ({error.strerror}); nothing has changed."
            ) from error
        await self.take(cutovers)
        await self._ingresses("take_cutovers", cutovers)

    async def _reports(self) -> list[Report]:
        return await self._ingresses("prompt_report") or [self.report()]

    def _done(self, status: dict[str, Any], warm: Sequence[Warm]) -> dict[str, Any]:
        (shown,) = status["data"]
        return {**shown, "warm": [{"tokens": each.tokens, "replicas": list(each.replica_ids)} for each in warm]}


def _shown(cutover: Cutover | None) -> dict[str, Any]:
    if cutover is None:
        return {"promoted": None, "previous": None}
    return {"promoted": cutover.promoted, "previous": cutover.previous or None}
