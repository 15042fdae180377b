"""Registered prompts: a reference -> the text a tenant gets; the tokens that public ones make public in any prompt.

They come from the settings (``public_prompts``) and from a directory with a lock (``prompts_dir``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from serve_app.config.prompts import PublicPromptConfig
from serve_app.errors import InvalidRequest, NotFound
from serve_app.prompts.cutover import Cutovers, read_cutovers
from serve_app.prompts.lock import Prompt, PromptDirectory, PromptError

if TYPE_CHECKING:
    from serve_app.tokenization.tokenizer import PromptTokenizer

logger = logging.getLogger(__name__)


class PromptNotFound(NotFound):
    """A request refers to a prompt that is not registered, or that is another tenant's."""

    code = "prompt_not_found"


class Prompts:
    """All prompts of a deployment, and the formatted texts of the public ones for one tokenizer.

    ``cutovers``: what names alone mean. A chat template may write the date into a system prompt, so they are formatted
    anew each day.
    """

    def __init__(
        self,
        configs: Iterable[PublicPromptConfig] = (),
        locked: Iterable[Prompt] = (),
        cutovers: Cutovers | None = None,
        *,
        today: Callable[[], date] = date.today,
    ) -> None:
        self._configs, self._locked = tuple(configs), tuple(locked)
        self._prompts = _merged(self._configs, self._locked)
        self.cutovers = cutovers or Cutovers()
        self.cutovers.check({prompt.ref for prompt in self._locked})
        self._today = today
        self._tokens: dict[str, int] = {}
        self._formatted: tuple[str, ...] = ()
        self._formatted_on: date | None = None
        self._lock = asyncio.Lock()

    @classmethod
    def of(cls, configs: Iterable[PublicPromptConfig], directory: Path | None) -> Prompts:
        """Return the prompts of settings, and of a directory where there is one. Raises PromptError."""
        if directory is None:
            return cls(configs)
        return cls(configs, PromptDirectory(directory).read(), read_cutovers(directory))

    def __bool__(self) -> bool:
        return any(prompt.tenant is None for prompt in self._prompts.values())

    def all(self) -> Mapping[str, Prompt]:
        """Return all prompts by reference, private ones too."""
        return self._prompts

    def tokens(self, ref: str) -> int:
        """Return how many tokens a prompt's own text has, 0 for one that is not registered."""
        return self._tokens.get(ref, 0)

    def least_tokens(self, ref: str, block_size: int) -> int:
        """Return how many cached tokens say that all of a prompt was cached, 0 where it fills no block.

        A block less than its own text fills: its last token may merge with what follows.
        """
        return max(0, self.tokens(ref) // block_size - 1) * block_size

    def find(self, ref: str, tenant: str = "") -> Prompt:
        """Return the prompt that a tenant means by NAME@VERSION or NAME.

        Raises InvalidRequest for what is no reference, and PromptNotFound, for one that is unknown and for one that is
        another tenant's in the same words.
        """
        name, separator, version = ref.partition("@")
        if not name or (separator and not version):
            raise InvalidRequest(
                "prompt_ref must be NAME@VERSION, or NAME for the version that is promoted.", param="prompt_ref"
            )
        cutover = self.cutovers.names.get(name)
        if not separator and cutover is not None:
            version = cutover.promoted
        prompt = self._prompts.get(f"{name}@{version}")
        if prompt is None or prompt.tenant not in (None, tenant):
            versions = [other for other in self._prompts.values() if other.name == name]
            visible = [other.ref for other in versions if other.tenant in (None, tenant)]
            what = "known versions" if separator else "none of it is promoted; name a version"
            hint = f"{what}: {', '.join(visible[:8])}" if visible else "no version of it is registered"
            raise PromptNotFound(f"There is no prompt {ref[:160]!r}; {hint}.", param="prompt_ref")
        return prompt

    def is_public(self, system_text: str) -> bool:
        """Tell whether a formatted system prompt is a registered public one and nothing else."""
        return system_text in self._formatted

    async def replace(
        self,
        tokenizer: PromptTokenizer,
        configs: Sequence[PublicPromptConfig] | None = None,
        locked: Sequence[Prompt] | None = None,
    ) -> None:
        """Register these prompts in the place of those from the same source; answers under way keep what they have.

        Raises PromptError where two have the same reference, or one that is in use is gone; then nothing changes.
        """
        async with self._lock:
            now = (
                tuple(self._configs if configs is None else configs),
                tuple(self._locked if locked is None else locked),
            )
            if now != (self._configs, self._locked):
                prompts = _merged(*now)
                self.cutovers.check({prompt.ref for prompt in now[1]})
                await asyncio.to_thread(self._install, prompts, tokenizer)
                self._configs, self._locked = now

    def switch(self, cutovers: Cutovers) -> bool:
        """Let names mean what a newer state says, from the next request on; False for one that is no newer.

        Raises PromptError where it names a version that is not here.
        """
        if not cutovers.newer_than(self.cutovers):
            return False
        cutovers.check({prompt.ref for prompt in self._locked})
        self.cutovers = cutovers
        return True

    async def keep_current(self, tokenizer: PromptTokenizer) -> None:
        """Format the prompts, where that has not been done today."""
        if self._prompts and self._formatted_on != self._today():
            async with self._lock:
                if self._formatted_on != self._today():
                    await asyncio.to_thread(self.install, tokenizer)

    def install(self, tokenizer: PromptTokenizer) -> None:
        """Format and tokenize every prompt, and have the tokenizer recognise public ones, in chats and as bare text."""
        self._install(self._prompts, tokenizer)

    def _install(self, prompts: dict[str, Prompt], tokenizer: PromptTokenizer) -> None:
        today = self._today()
        public = {ref: prompt.text for ref, prompt in prompts.items() if prompt.tenant is None}
        chats = [text for text in (_chat_text(tokenizer, ref, text) for ref, text in public.items()) if text]
        formatted = (*chats, *public.values())
        # What the tokenizer remembers of these calls is under a root that nobody has.
        root = secrets.token_bytes(16)
        if (prompts, formatted) != (self._prompts, self._formatted) or self._formatted_on is None:
            bare = {
                ref: tokenizer.encode(prompt.text, root, add_special_tokens=True).token_ids
                for ref, prompt in prompts.items()
            }
            self._tokens = {ref: len(ids) for ref, ids in bare.items()}
            if formatted != self._formatted:
                of_chats = (tokenizer.encode(text, root).token_ids for text in chats)
                tokenizer.set_public([*of_chats, *(bare[ref] for ref in public)])
                self._formatted = formatted
        self._prompts = prompts
        self._formatted_on = today


def _merged(configs: Iterable[PublicPromptConfig], locked: Iterable[Prompt]) -> dict[str, Prompt]:
    prompts = {config.ref: Prompt(config.name, config.version, config.text) for config in configs}
    for prompt in locked:
        if prompt.ref in prompts:
            raise PromptError(f"{prompt.ref} is in public_prompts and in prompts_dir; take one out")
        prompts[prompt.ref] = prompt
    return prompts


def _chat_text(tokenizer: PromptTokenizer, ref: str, text: str) -> str:
    try:
        return tokenizer.template.render([{"role": "system", "content": text}], add_generation_prompt=False).system_text
    except InvalidRequest as error:
        logger.warning("public prompt %s is not recognised in chats: %s", ref, error.message)
        return ""
