"""Why a prompt missed the cache: ``explain`` compares it with earlier prompts, by their tokens."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from router.protocol.block_hash import PrefixScope, TokenArray, common_tokens
from serve_app.api.format import Usage
from serve_app.cache_misses.rules import REMEDIES, MissReason, classify, value_there
from serve_app.prompts.lock import first_difference

MAX_PROMPT_TOKENS = 32_768
"""The maximum of one prompt's tokens that is remembered and compared."""
MIN_MISSED_TOKENS = 64
"""Fewer computed tokens are not a miss, because a new question needs as many."""
MISSED_PART = 8
"""A miss computes at least one in this many of its prompt's tokens. A new turn of a long conversation is not a miss."""
MIN_LOST_TOKENS = 32
"""Fewer recomputed tokens are not reported."""
MAX_COMPARED = 4
"""The number of earlier prompts compared in full: those with the longest common prefix."""
OPENING_TOKENS = 8
"""A template that opens reasoning ends a prompt with up to this many tokens, which the next prompt lacks."""
GRAM = 8
"""This many equal tokens identify the same place in two prompts."""
HEAD_CHARS = 64
"""A message is found in a prompt by this many characters at its beginning."""
LONG_TOKENS, SAMPLED_PART = 2048, 8
"""Prompts of this length are compared only with prompts that share a gram from a sample of an eighth."""
BEFORE_TOKENS, BEHIND_TOKENS = 64, 1024
"""The tokens of both texts read around their first difference."""

_MULTIPLIERS = np.random.default_rng(1).integers(1 << 63, size=3, dtype=np.uint64) | np.uint64(1)
"""For grams of 2, 4 and 8 tokens."""

_LARGEST = np.iinfo(np.uint64).max

Decode = Callable[[Sequence[int]], str]
"""Token ids -> their text, special tokens included."""


class SeenPrompt:
    """The beginning of one prompt. ``seen_s``: the time of its first token, by ``time.perf_counter``.

    ``usage``: returns that of its answer so far, which continues.
    """

    def __init__(
        self,
        token_ids: TokenArray,
        scope: PrefixScope,
        system_chars: int,
        seen_s: float,
        usage: Callable[[], Usage] | None = None,
    ) -> None:
        # A view of a long prompt would keep all of it in memory.
        self.ids = token_ids if len(token_ids) <= MAX_PROMPT_TOKENS else token_ids[:MAX_PROMPT_TOKENS].copy()
        self.cache = scope.lora, scope.salt
        self.system_chars = system_chars
        self.seen_s = seen_s
        self._usage = usage

    def answer_after_reasoning(self) -> int:
        """Return the number of its answer's tokens after the reasoning, or 0 without reasoning."""
        used = self._usage() if self._usage is not None else None
        return used.completion_tokens - used.reasoning_tokens if used is not None and used.reasoning_tokens else 0


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """A prompt's first difference. ``line``: of its message, from 1. ``found``: the text there, at most 64 characters.

    ``token``, ``char``: of the prompt as the chat template writes it.
    """

    part: Literal["system", "messages"]
    token: int
    char: int
    line: int
    found: str


@dataclass(frozen=True, slots=True)
class Miss:
    """The reason for a miss. ``lost_tokens``: recomputed, although an earlier prompt had them in this order."""

    reason: MissReason
    lost_tokens: int
    first_difference: FirstDifference | None = None

    def shown(self) -> dict[str, Any]:
        """Return the miss as fields of an answer, without another prompt's text."""
        return {**asdict(self), "remedy": REMEDIES[self.reason]}


def is_miss(prompt_tokens: int, cached_tokens: int) -> bool:
    """Return whether enough tokens were computed for a miss."""
    missed = prompt_tokens - cached_tokens
    return missed >= MIN_MISSED_TOKENS and missed * MISSED_PART >= prompt_tokens


def explain(
    prompt: SeenPrompt, cached_tokens: int, earlier: Sequence[SeenPrompt], decode: Decode, texts: Sequence[str] = ()
) -> Miss:
    """Return the reason for a prompt's miss beyond ``cached_tokens``.

    ``earlier``: its tenant's prompts that were answered before it arrived. ``texts``: of its messages, if it has any.
    O(remembered tokens), in numpy.
    """
    common = {seen: common_tokens(prompt.ids, seen.ids) for seen in earlier}
    siblings = [seen for seen in earlier if seen.cache == prompt.cache]
    own = max((common[seen] for seen in siblings), default=0)
    if own == MAX_PROMPT_TOKENS:
        return Miss("not_compared", 0)
    if own - cached_tokens >= MIN_MISSED_TOKENS:
        return Miss("evicted", own - cached_tokens)
    longest = max(earlier, key=lambda seen: common[seen], default=None)
    if longest is not None and common[longest] - max(own, cached_tokens) >= MIN_MISSED_TOKENS:
        return Miss("adapter" if longest.cache[0] != prompt.cache[0] else "salt", common[longest] - cached_tokens)
    # An earlier prompt with a common prefix far shorter than the cached one explains nothing.
    least = cached_tokens - len(prompt.ids) // MISSED_PART
    near = sorted((seen for seen in siblings if common[seen] >= least), key=lambda seen: (common[seen], seen.seen_s))
    if near and common[near[-1]] >= len(near[-1].ids) - OPENING_TOKENS and near[-1].answer_after_reasoning():
        return Miss("reasoning", min(len(prompt.ids) - cached_tokens, near[-1].answer_after_reasoning()))
    part = SAMPLED_PART if len(prompt.ids) >= LONG_TOKENS else 1
    sample = _sample(prompt.ids, part)
    for seen in near[: -MAX_COMPARED - 1 : -1]:
        if sample.isdisjoint(_sample(seen.ids[common[seen] :], part)):
            continue
        lost_tokens = equal_behind(prompt.ids, seen.ids, common[seen])
        if lost_tokens >= MIN_LOST_TOKENS:
            reason, place = _difference(prompt, seen, common[seen], decode, texts)
            return Miss(reason, lost_tokens, place)
    return Miss("never_seen", 0)


def equal_behind(new: TokenArray, old: TokenArray, start: int) -> int:
    """Return the number of tokens of ``new`` from ``start`` on that are in a gram of ``old`` from ``start`` on."""
    equal = np.isin(_grams(new[start:]), _grams(old[start:]))
    return int(np.count_nonzero(np.convolve(equal, np.ones(GRAM)))) if equal.any() else 0


def line_in_message(prompt: str, char: int, texts: Sequence[str]) -> int:
    """Return the line of a prompt's character in its message, from 1; the lines of the chat template do not count.

    ``texts``: of the messages in their order; a template may leave some out, or the space around them.
    """
    begin = end = space = 0
    for text in texts:
        inner = text.strip()
        found = prompt.find(inner[:HEAD_CHARS], end) if inner else -1
        if found > char:
            break
        if found >= 0:
            begin, end, space = found, found + len(inner), text.count("\n", 0, text.index(inner))
    return prompt.count("\n", begin, char) + space + 1


def _sample(ids: TokenArray, part: int) -> set[int]:
    """Return one in ``part`` grams: those with small hashes, which are the same in every prompt."""
    grams = _grams(ids)
    return set(grams[grams <= _LARGEST // part].tolist())


def _grams(ids: TokenArray) -> npt.NDArray[np.uint64]:
    """Return a hash of the ``GRAM`` tokens from each token on, as long as there are enough."""
    hashes = ids.astype(np.uint64)
    for power, multiplier in enumerate(_MULTIPLIERS):
        tokens = 1 << power
        hashes = hashes[:-tokens] * multiplier + hashes[tokens:]
    return hashes


def _difference(
    prompt: SeenPrompt, seen: SeenPrompt, token: int, decode: Decode, texts: Sequence[str]
) -> tuple[MissReason, FirstDifference]:
    start = max(0, token - BEFORE_TOKENS)
    before = decode(prompt.ids[:start].tolist())
    new, old = (decode(known.ids[start : token + BEHIND_TOKENS].tolist()) for known in (prompt, seen))
    at = first_difference(new, old)
    char = len(before) + at
    line = line_in_message(before + new, char, texts)
    part: Literal["system", "messages"] = "system" if char < prompt.system_chars else "messages"
    # A reader looks for the beginning of the value, not for its first changed digit.
    return classify(new, old, at), FirstDifference(part, token, char, line, value_there(new, at))
