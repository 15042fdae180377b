"""Registered prompts: a reference -> a tenant's text. The tokens of public ones are public in any prompt."""

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
    """A request refers to a prompt that is not registered or belongs to another tenant."""

    code = "prompt_not_found"


class Prompts:
    """All prompts of a deployment, formatted daily because templates may write the date. ``cutovers``: by name."""

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
        """Return the prompts of the settings, and of a directory if given. Raises PromptError."""
        if directory is None:
            return cls(configs)
        return cls(configs, PromptDirectory(directory).read(), read_cutovers(directory))

    def __bool__(self) -> bool:
        return any(prompt.tenant is None for prompt in self._prompts.values())

    def all(self) -> Mapping[str, Prompt]:
        """Return all prompts by reference, including private ones."""
        return self._prompts

    def tokens(self, ref: str) -> int:
        """Return the number of tokens of a prompt's own text, 0 for an unregistered one."""
        return self._tokens.get(ref, 0)

    def least_tokens(self, ref: str, block_size: int) -> int:
        """Return the cached tokens that imply a fully cached prompt: one block less, as the last token may merge."""
        return max(0, self.tokens(ref) // block_size - 1) * block_size

    def find(self, ref: str, tenant: str = "") -> Prompt:
        """Return a tenant's prompt for NAME@VERSION or NAME. Raises InvalidRequest and PromptNotFound."""
        name, separator, version = ref.partition("@")
        if not name or (separator and not version):
            raise InvalidRequest(
                "prompt_ref must be NAME@VERSION, or NAME for the promoted version.", param="prompt_ref"
            )
        cutover = self.cutovers.names.get(name)
        if not separator and cutover is not None:
            version = cutover.promoted
        prompt = self._prompts.get(f"{name}@{version}")
        if prompt is None or prompt.tenant not in (None, tenant):
            versions = [other for other in self._prompts.values() if other.name == name]
            visible = [other.ref for other in versions if other.tenant in (None, tenant)]
            lead = "known versions" if separator else "none of it is promoted; name a version"
            hint = f"{lead}: {', '.join(visible[:8])}" if visible else "no version of it is registered"
            raise PromptNotFound(f"There is no prompt {ref[:160]!r}; {hint}.", param="prompt_ref")
        return prompt

    def is_public(self, system_text: str) -> bool:
        """Return whether a formatted system prompt equals a registered public one."""
        return system_text in self._formatted

    async def replace(
        self,
        tokenizer: PromptTokenizer,
        configs: Sequence[PublicPromptConfig] | None = None,
        locked: Sequence[Prompt] | None = None,
    ) -> None:
        """Replace the prompts of the same source. Raises PromptError, and then changes nothing."""
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
        """Use a newer state from the next request on. Return False for an older one. Raises PromptError."""
        if not cutovers.newer_than(self.cutovers):
            return False
        cutovers.check({prompt.ref for prompt in self._locked})
        self.cutovers = cutovers
        return True

    async def keep_current(self, tokenizer: PromptTokenizer) -> None:
        """Format the prompts, unless that was already done today."""
        if self._prompts and self._formatted_on != self._today():
            async with self._lock:
                if self._formatted_on != self._today():
                    await asyncio.to_thread(self.install, tokenizer)

    def install(self, tokenizer: PromptTokenizer) -> None:
        """Format and tokenize every prompt, and register public ones with the tokenizer, for chats and bare text."""
        self._install(self._prompts, tokenizer)

    def _install(self, prompts: dict[str, Prompt], tokenizer: PromptTokenizer) -> None:
        today = self._today()
        public = {ref: prompt.text for ref, prompt in prompts.items() if prompt.tenant is None}
        chats = [text for text in (_chat_text(tokenizer, ref, text) for ref, text in public.items()) if text]
        formatted = (*chats, *public.values())
        # The tokenizer caches these calls under a random root that no request uses.
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
            raise PromptError(f"{prompt.ref} is in public_prompts and in prompts_dir; remove one")
        prompts[prompt.ref] = prompt
    return prompts


def _chat_text(tokenizer: PromptTokenizer, ref: str, text: str) -> str:
    try:
        return tokenizer.template.render([{"role": "system", "content": text}], add_generation_prompt=False).system_text
    except InvalidRequest as error:
        logger.warning("public prompt %s is not recognised in chats: %s", ref, error.message)
        return ""
