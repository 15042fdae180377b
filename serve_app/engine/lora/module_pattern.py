"""Which modules a key of PEFT's ``rank_pattern`` or ``alpha_pattern`` means.

PEFT takes a key for a regular expression, and some of those keep Python's matching busy for ever. What PEFT and people
write is understood and matched in time proportional to both lengths at most; anything else is refused.
"""

from __future__ import annotations

import re
from functools import lru_cache

from serve_app.engine.protocol import AdapterError

MAX_KEYS = 2048
"""Keys of one pattern: an entry for every layer of the largest models is fewer."""
MAX_KEY_CHARS = 256

_KEY = re.compile(r"\^?((?:\.\*|\\[.d-]|[\w.-]|\[(?:\w(?:-\w)?)+\])+)\$?", re.ASCII)


@lru_cache(maxsize=2 * MAX_KEYS)
def module_pattern(key: str) -> re.Pattern[str]:
    """Return what matches, from their beginning, the names of the modules that ``key`` means.

    Source: PEFT's ``get_pattern_key``, ``(.*\\.)?(KEY)$``. Raises AdapterError for a key that is not understood.
    """
    parsed = _KEY.fullmatch(key) if len(key) <= MAX_KEY_CHARS else None
    if parsed is None:
        raise AdapterError(_refusal(key))
    prefix = "" if key.startswith("^") else r"(?:.*?\.)??"
    first, *others = parsed[1].split(".*")
    # Every piece has one length, so between runs of any characters the first place of each is the best one: atomic
    # groups never try another.
    if not others:
        pattern = f"{prefix}{first}$"
    else:
        between = "".join(f"(?>.*?{piece})" for piece in others[:-1])
        pattern = f"(?>{prefix}{first}){between}.*{others[-1]}$"
    try:
        return re.compile(pattern)
    except re.error as error:  # a range like [9-0]
        raise AdapterError(_refusal(key)) from error


def _refusal(key: str) -> str:
    return (
        f"{key[:64]!r} is no pattern that is understood here: names with . .* \\. \\d [0-9] ^ and $ are; "
        "give each module an entry of its own"
    )
