"""From a prompt that missed the cache, and its tenant's earlier ones, to the reason."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from router.protocol.block_hash import PrefixScope, TokenArray, common_tokens
from serve_app.cache_diagnostics.difference import Difference, classify, value_there
from serve_app.generation.request_usage import RequestUsage
from serve_app.prompts.lock import first_difference

Reason = Difference | Literal["adapter", "salt", "evicted", "reasoning", "never_seen", "not_compared"]

MAX_PROMPT_TOKENS = 32_768
"""Remembered of one prompt, and compared."""
MIN_MISSED_TOKENS = 64
"""Fewer computed tokens are no miss: a question takes as many."""
MISSED_PART = 8
"""A miss computes at least one of so many tokens of its prompt: a new turn of a long conversation is none."""
MIN_LOST_TOKENS = 32
"""Fewer tokens computed again are not told."""
MAX_COMPARED = 4
"""Earlier prompts compared to their ends: those with the longest beginning in common."""
OPENING_TOKENS = 8
"""A template that opens reasoning ends a prompt with up to so many, which the next prompt does not have."""
GRAM = 8
"""So many equal tokens are the same place of two prompts."""
LONG_TOKENS, SAMPLED_PART = 2048, 8
"""Prompts so long are compared with those alone that share one of an eighth of their grams."""
BEFORE_TOKENS, BEHIND_TOKENS = 64, 1024
"""Read of both texts around their first difference."""

_MULTIPLIERS = np.random.default_rng(1).integers(1 << 63, size=3, dtype=np.uint64) | np.uint64(1)
"""For grams of 2, 4 and 8 tokens."""

_LARGEST = np.iinfo(np.uint64).max

Decode = Callable[[Sequence[int]], str]
"""Token ids -> their text, special tokens included."""

REMEDIES: dict[Reason, str] = {
    "time": "Move the date or time behind the parts that stay the same, best into the last user message, or leave it "
    "out.",
    "id": "Leave ids and numbers that change out of the prompt, or put them into the last user message.",
    "whitespace": "Write the prompt from one template: spaces and line ends must be the same each time.",
    "reordered": "Write JSON with sorted keys, and tools and lists in a fixed order.",
    "text": "The prompt was changed here. If it changes with each request, move the part behind what stays the same.",
    "adapter": "Each LoRA adapter has KV of its own: send requests with one prompt to one adapter.",
    "salt": "The same prompt came with another cache_salt, which keeps KV apart: use one salt where that is allowed.",
    "evicted": "The prompt was computed before, and its KV is gone or on a busier replica: see `warmpath plan`, pin it "
    "(cache_control, save_system_prompt_kv_cache), or give it more memory.",
    "reasoning": "Nothing to change: the chat template leaves the reasoning of earlier answers out, so what followed "
    "them is computed once more.",
    "never_seen": "None of the last prompts begins like this one: the first request with a prompt computes it.",
    "not_compared": "The prompts are equal as far as they are compared.",
}


class SeenPrompt:
    """The beginning of one prompt. ``seen_s``: when its first token came, by ``time.perf_counter``.

    ``usage``: of its answer, which goes on.
    """

    def __init__(
        self,
        token_ids: TokenArray,
        scope: PrefixScope,
        system_chars: int,
        seen_s: float,
        usage: RequestUsage | None = None,
    ) -> None:
        # A part of a long prompt would keep all of it.
        self.ids = token_ids if len(token_ids) <= MAX_PROMPT_TOKENS else token_ids[:MAX_PROMPT_TOKENS].copy()
        self.cache = scope.lora, scope.salt
        self.system_chars = system_chars
        self.seen_s = seen_s
        self._usage = usage

    def answer_after_reasoning(self) -> int:
        """Return how many tokens of its answer followed its reasoning, 0 where there was none."""
        used = self._usage.total() if self._usage is not None else None
        return used.completion_tokens - used.reasoning_tokens if used is not None and used.reasoning_tokens else 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prompt differs first. ``line``: from 1. ``found``: the text there, at most 64 characters."""

    part: Literal["system", "messages"]
    token: int
    char: int
    line: int
    found: str


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a prompt was computed. ``lost_tokens``: computed again, though an earlier prompt had them in this order."""

    reason: Reason
    lost_tokens: int
    first_difference: Place | None = None

    def shown(self) -> dict[str, Any]:
        """Return it for answers, without another prompt's text."""
        return {**asdict(self), "remedy": REMEDIES[self.reason]}


def is_miss(prompt_tokens: int, cached_tokens: int) -> bool:
    """Return whether enough was computed for a miss."""
    missed = prompt_tokens - cached_tokens
    return missed >= MIN_MISSED_TOKENS and missed * MISSED_PART >= prompt_tokens


def explain(prompt: SeenPrompt, cached_tokens: int, earlier: Sequence[SeenPrompt], decode: Decode) -> Miss:
    """Return why a prompt was not read beyond ``cached_tokens``.

    ``earlier``: its tenant's prompts that were answered before it came. O(tokens remembered), in numpy.
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
    # What was read further than an earlier prompt goes explains nothing by it.
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
            reason, place = _difference(prompt, seen, common[seen], decode)
            return Miss(reason, lost_tokens, place)
    return Miss("never_seen", 0)


def equal_behind(new: TokenArray, old: TokenArray, start: int) -> int:
    """Return how many tokens of ``new`` from ``start`` on stand in a gram that ``old`` has from there on, too."""
    equal = np.isin(_grams(new[start:]), _grams(old[start:]))
    return int(np.count_nonzero(np.convolve(equal, np.ones(GRAM)))) if equal.any() else 0


def _sample(ids: TokenArray, part: int) -> set[int]:
    """Return one of ``part`` grams: those with small hashes, so the same ones of every prompt."""
    grams = _grams(ids)
    return set(grams[grams <= _LARGEST // part].tolist())


def _grams(ids: TokenArray) -> npt.NDArray[np.uint64]:
    """Return a hash of the ``GRAM`` tokens from each token on; none where there are fewer."""
    hashes = ids.astype(np.uint64)
    for power, multiplier in enumerate(_MULTIPLIERS):
        tokens = 1 << power
        hashes = hashes[:-tokens] * multiplier + hashes[tokens:]
    return hashes


def _difference(prompt: SeenPrompt, seen: SeenPrompt, token: int, decode: Decode) -> tuple[Reason, Place]:
    start = max(0, token - BEFORE_TOKENS)
    before = decode(prompt.ids[:start].tolist())
    new, old = (decode(known.ids[start : token + BEHIND_TOKENS].tolist()) for known in (prompt, seen))
    at = first_difference(new, old)
    char = len(before) + at
    line = before.count("\n") + new.count("\n", 0, at) + 1
    part: Literal["system", "messages"] = "system" if char < prompt.system_chars else "messages"
    # The beginning of the value is what a reader looks for, not the first of its digits that changed.
    return classify(new, old, at), Place(part, token, char, line, value_there(new, at))
