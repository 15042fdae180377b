"""Where a text can be cut so that its parts tokenize alone exactly as they do together.

The rule: before an added token that the tokenizer splits off raw text first. For some tokenizers no cut is exact.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

MIN_SEGMENT_BYTES = 1024
"""A segment closes at the first added token after this many bytes: short turns share one segment."""


class Segmenter:
    """Cuts text before added tokens. ``exact`` is False where that would change the ids: then nothing is cut.

    tokenizers splits raw text at the added tokens with ``normalized=False`` (leftmost, longest match) before
    anything else, and normalizes, pre-tokenizes and merges each part alone. So a cut at such a token changes
    nothing, unless a token swallows its neighbourhood (``lstrip``, ``rstrip``, ``single_word``), special tokens
    are not split at all, or the pre-tokenizer treats the very first part otherwise (Metaspace "first").
    Source: AddedVocabulary.extract_and_normalize and Metaspace in the tokenizers crate.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]
        cutting = [token for token in added if not token.normalized]
        contents = sorted((token.content for token in cutting), key=lambda content: (-len(content), content))
        self._pattern = re.compile(b"|".join(re.escape(content.encode()) for content in contents))
        self.exact = (
            bool(contents)
            and not any(token.lstrip or token.rstrip or token.single_word for token in added)
            and not tokenizer.encode_special_tokens
            and not _treats_first_part_otherwise(component_state(tokenizer.pre_tokenizer))
            and _agrees(tokenizer, contents[:8])
        )

    def cut(self, raw: bytes) -> list[int]:
        """Return where the segments of a UTF-8 text end, in bytes; the last end is the length of the text.

        Each but the last ends before an added token. Cuts depend only on the text before them, so a conversation
        that grows keeps its earlier segments.
        """
        ends: list[int] = []
        earliest = MIN_SEGMENT_BYTES
        for match in self._pattern.finditer(raw) if self.exact else ():
            if match.start() >= earliest:
                ends.append(match.start())
                earliest = match.start() + MIN_SEGMENT_BYTES
        if raw:
            ends.append(len(raw))
        return ends


def component_state(component: Any) -> Any:
    """Return a tokenizer component (decoder, pre-tokenizer, ...) as parsed JSON; None for None."""
    return None if component is None else json.loads(component.__getstate__())


def _treats_first_part_otherwise(state: Any) -> bool:
    if isinstance(state, list):
        return any(map(_treats_first_part_otherwise, state))
    if not isinstance(state, dict):
        return False
    if state.get("type") == "Metaspace" and state.get("prepend_scheme") == "first":
        return True
    return any(map(_treats_first_part_otherwise, state.values()))


def _agrees(tokenizer: Tokenizer, contents: list[str]) -> bool:
    """Try cuts on a few texts: a guard against rules this module does not know."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return all(
        ids(before + content + after) == ids(before) + ids(content + after)
        for content in contents
        for before, after in (("a b", "c d"), (" a \n", " b \n"), ("x", ""), ("é ", "\n\ny"))
    )
