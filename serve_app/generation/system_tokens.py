"""How many tokens of a prompt are its system prompt's, remembered so that a text is looked up once."""

from __future__ import annotations

from router.protocol.block_hash import system_prompt_key
from serve_app.tokenization.public_tokens import common_tokens
from serve_app.tokenization.tokenizer import EncodedPrompt, PromptTokenizer

REMEMBERED = 1024
"""System prompts; the oldest is forgotten first, and looked up again."""


class SystemTokens:
    """Counts for one tokenizer."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[bytes, bool], int] = {}

    async def count(self, encoded: EncodedPrompt, system_text: str, root: bytes, tenant: str, *, special: bool) -> int:
        """Return the leading tokens that a formatted system prompt alone has in common with a prompt; "": 0.

        In another prompt of the same system prompt it may be one token more or less, where the last one merges with
        what follows. ``special``: whether special tokens were added.
        """
        if not system_text:
            return 0
        key = system_prompt_key(root, system_text), special
        found = self._known.get(key)
        if found is None:
            alone = await self._tokenizer.encode_async(system_text, root, tenant, add_special_tokens=special)
            found = self._known[key] = common_tokens(alone.token_ids, encoded.token_ids)
            if len(self._known) > REMEMBERED:
                del self._known[next(iter(self._known))]
        return found
