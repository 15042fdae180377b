"""Registered public prompts: ``name@version`` -> text, and which tokens of any prompt they make public."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from datetime import date
from typing import TYPE_CHECKING

from serve_app.config.prompts import PublicPromptConfig
from serve_app.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from serve_app.tokenization.tokenizer import PromptTokenizer

logger = logging.getLogger(__name__)


class PromptNotFound(NotFound):
    """A request refers to a prompt that is not registered."""

    code = "prompt_not_found"


class PublicPrompts:
    """All public prompts of a deployment, and their formatted texts for one tokenizer.

    A chat template may write the date into a system prompt, so they are formatted anew each day.
    """

    def __init__(self, configs: Iterable[PublicPromptConfig] = (), *, today: Callable[[], date] = date.today) -> None:
        self._texts = {config.ref: config.text or "" for config in configs}
        self._today = today
        self._formatted: tuple[str, ...] = ()
        self._formatted_on: date | None = None
        self._lock = asyncio.Lock()

    def __bool__(self) -> bool:
        return bool(self._texts)

    def text(self, ref: str) -> str:
        """Return a prompt's text. Raises InvalidRequest for what is no reference, PromptNotFound for an unknown one."""
        name, separator, version = ref.partition("@")
        if not (name and separator and version):
            raise InvalidRequest("prompt_ref must be NAME@VERSION.", param="prompt_ref")
        found = self._texts.get(ref)
        if found is None:
            versions = [known for known in self._texts if known.startswith(f"{name}@")]
            hint = f"known versions: {', '.join(versions[:8])}" if versions else "no version of it is registered"
            raise PromptNotFound(f"There is no public prompt {ref[:160]!r}; {hint}.", param="prompt_ref")
        return found

    def is_public(self, system_text: str) -> bool:
        """Tell whether a formatted system prompt is a registered one and nothing else."""
        return system_text in self._formatted

    async def replace(self, configs: Iterable[PublicPromptConfig], tokenizer: PromptTokenizer) -> None:
        """Register these prompts in the place of all others; answers under way keep what they have."""
        async with self._lock:
            texts = {config.ref: config.text or "" for config in configs}
            if texts != self._texts:
                await asyncio.to_thread(self._install, texts, tokenizer)

    async def keep_current(self, tokenizer: PromptTokenizer) -> None:
        """Format the prompts, where that has not been done today."""
        if self._texts and self._formatted_on != self._today():
            async with self._lock:
                if self._formatted_on != self._today():
                    await asyncio.to_thread(self.install, tokenizer)

    def install(self, tokenizer: PromptTokenizer) -> None:
        """Format and tokenize every prompt, and have the tokenizer recognise them, in chats and as bare text."""
        self._install(self._texts, tokenizer)

    def _install(self, texts: dict[str, str], tokenizer: PromptTokenizer) -> None:
        today = self._today()
        chats = [text for text in (_chat_text(tokenizer, ref, text) for ref, text in texts.items()) if text]
        formatted = (*chats, *texts.values())
        if formatted != self._formatted:
            # What the tokenizer remembers of these calls is under a root that nobody has.
            root = secrets.token_bytes(16)
            ids = [tokenizer.encode(text, root).token_ids for text in chats]
            ids += [tokenizer.encode(text, root, add_special_tokens=True).token_ids for text in texts.values()]
            tokenizer.set_public(ids)
            self._formatted = formatted
        self._texts = texts
        self._formatted_on = today


def _chat_text(tokenizer: PromptTokenizer, ref: str, text: str) -> str:
    try:
        return tokenizer.render_chat([{"role": "system", "content": text}], add_generation_prompt=False).system_text
    except InvalidRequest as error:
        logger.warning("public prompt %s is not recognised in chats: %s", ref, error.message)
        return ""
