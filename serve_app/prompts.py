"""Registered public prompts: ``name@version`` -> text with a digest, and which tokens of any prompt they make public.

Owns the registry, its bounds, and the prompts' formatted texts. Knows nothing of tenants, scopes or caches. In: the
settings; out: a prompt's text by reference, and token ids for the tokenizer to recognise in whoever's prompt.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from serve_app.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from serve_app.tokenizer import PromptTokenizer

logger = logging.getLogger(__name__)

MAX_PROMPTS = 256
MAX_PROMPT_BYTES = 1 << 20
MAX_TOTAL_BYTES = 8 << 20

_WORD = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"


class PromptNotFound(NotFound):
    """A request refers to a prompt that is not registered."""

    code = "prompt_not_found"


class PublicPromptConfig(BaseModel):
    """One public prompt as the settings name it: its ``text``, or a UTF-8 ``file`` that is read once, here.

    After validation the text is there, the file is forgotten and ``sha256`` is the text's: every process of a
    deployment gets the same bytes, whatever becomes of the file. Raises ValueError when they are not those expected.
    """

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=f"^{_WORD}$", description="clients refer to the prompt as name@version")
    version: str = Field(pattern=f"^{_WORD}$")
    text: str | None = Field(None, description="the prompt; or:")
    file: Path | None = Field(None, description="a UTF-8 file that holds it, to the last byte")
    sha256: str | None = Field(None, description="digest of its UTF-8 bytes; another one stops the start")

    @property
    def ref(self) -> str:
        """What a request calls it."""
        return f"{self.name}@{self.version}"

    @model_validator(mode="after")
    def _read(self) -> Self:
        if (self.text is None) == (self.file is None):
            raise ValueError(f"public prompt {self.ref} needs either text or file")
        if self.file is not None:
            try:
                if self.file.stat().st_size > MAX_PROMPT_BYTES:
                    raise ValueError(f"public prompt {self.ref}: {self.file} is over {MAX_PROMPT_BYTES} bytes")
                self.text = self.file.read_bytes().decode()
            except OSError as error:
                raise ValueError(f"public prompt {self.ref}: cannot read {self.file} ({error.strerror})") from error
            except UnicodeDecodeError as error:
                raise ValueError(f"public prompt {self.ref}: {self.file} is not UTF-8 at byte {error.start}") from error
            self.file = None
        assert self.text is not None
        try:
            raw = self.text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"public prompt {self.ref} holds a lone surrogate") from error
        if not 0 < len(raw) <= MAX_PROMPT_BYTES:
            raise ValueError(f"public prompt {self.ref} has {len(raw)} bytes; it may have 1 to {MAX_PROMPT_BYTES}")
        digest = sha256(raw).hexdigest()
        expected = (self.sha256 or digest).removeprefix("sha256:").lower()
        if expected != digest:
            raise ValueError(f"public prompt {self.ref} has sha256 {digest}, and {expected} was expected")
        self.sha256 = digest
        return self


def check_prompts(configs: Iterable[PublicPromptConfig]) -> None:
    """Raise ValueError where a reference is given twice, or the registry is over its bounds."""
    configs = list(configs)
    refs = [config.ref for config in configs]
    if len(set(refs)) < len(refs):
        raise ValueError(f"public prompt {next(ref for ref in refs if refs.count(ref) > 1)} is given twice")
    if len(configs) > MAX_PROMPTS:
        raise ValueError(f"{len(configs)} public prompts are too many; at most {MAX_PROMPTS}")
    total = sum(len((config.text or "").encode()) for config in configs)
    if total > MAX_TOTAL_BYTES:
        raise ValueError(f"the public prompts have {total} bytes together; at most {MAX_TOTAL_BYTES}")


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

    async def keep_current(self, tokenizer: PromptTokenizer) -> None:
        """Format the prompts, where that has not been done today."""
        if self._texts and self._formatted_on != self._today():
            async with self._lock:
                if self._formatted_on != self._today():
                    await asyncio.to_thread(self.install, tokenizer)

    def install(self, tokenizer: PromptTokenizer) -> None:
        """Format and tokenize every prompt, and have the tokenizer recognise them, in chats and as bare text."""
        today = self._today()
        chats = [text for text in (_chat_text(tokenizer, ref, text) for ref, text in self._texts.items()) if text]
        formatted = (*chats, *self._texts.values())
        if formatted != self._formatted:
            # What the tokenizer remembers of these calls is under a root that nobody has.
            root = secrets.token_bytes(16)
            ids = [tokenizer.encode(text, root).token_ids for text in chats]
            ids += [tokenizer.encode(text, root, add_special_tokens=True).token_ids for text in self._texts.values()]
            tokenizer.set_public(ids)
            self._formatted = formatted
        self._formatted_on = today


def _chat_text(tokenizer: PromptTokenizer, ref: str, text: str) -> str:
    try:
        return tokenizer.render_chat([{"role": "system", "content": text}], add_generation_prompt=False).system_text
    except InvalidRequest as error:
        logger.warning("public prompt %s is not recognised in chats: %s", ref, error.message)
        return ""
