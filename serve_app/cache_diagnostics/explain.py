"""From a prompt that was not read from the cache, and its tenant's earlier ones, to the reason. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from router.protocol.block_hash import TokenArray
from serve_app.cache_diagnostics.difference import (
    Difference,
    classify,
    equal_behind,
    first_difference,
    value_there,
)
from serve_app.cache_diagnostics.memory import MAX_PROMPT_TOKENS, SeenPrompt
from serve_app.tokenization.public_tokens import common_tokens

Reason = Difference | Literal["adapter", "salt", "evicted", "never_seen", "not_compared"]

MIN_MISSED_TOKENS = 64
"""Fewer computed tokens are no miss: a question takes as many."""
MISSED_PART = 8
"""A miss computes at least one of so many tokens of its prompt: a turn added to a long conversation is none."""
MIN_LOST_TOKENS = 32
"""Fewer tokens that were there before are not worth a word."""
BEFORE_TOKENS, BEHIND_TOKENS = 64, 1024
"""What is read of both texts around their first difference."""

Decode = Callable[[Sequence[int]], str]
"""Token ids -> their text, special tokens included."""

REMEDIES: dict[Reason, str] = {
    "date": "Move the date behind the parts that stay the same, best into the last user message.",
    "time": "Move the time behind the parts that stay the same, best into the last user message, or leave it out.",
    "uuid": "Leave ids of requests and sessions out of the prompt, or put them into the last message.",
    "epoch": "Leave the timestamp out of the prompt, or put it into the last message.",
    "counter": "Move the number that counts behind the parts that stay the same, best into the last user message.",
    "whitespace": "Write the prompt from one template: spaces and line ends must be the same each time.",
    "reordered": "Write JSON with sorted keys, and tools and lists in a fixed order.",
    "text": "The prompt was changed here. If it changes with each request, move the part behind what stays the same.",
    "adapter": "Each LoRA adapter has KV of its own: send requests with one prompt to one adapter.",
    "salt": "The same prompt came with another cache_salt, which keeps KV apart: use one salt where that is allowed.",
    "evicted": "The prompt was computed before, and its KV is gone or on a busier replica: see `warmpath plan`, pin it "
    "(cache_control, save_system_prompt_kv_cache), or give it more memory.",
    "never_seen": "None of the last prompts begins like this one: the first request with a prompt computes it.",
    "not_compared": "The prompts are equal as far as they are compared.",
}


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a prompt was computed. ``token``, ``char``, ``line``: where it differs first, lines from 1; None: nowhere.

    ``part``: of the prompt. ``lost_tokens``: computed again, though an earlier prompt had them in this order.
    ``found``: what stands there in this prompt, at most 64 characters; never what another had.
    """

    reason: Reason
    lost_tokens: int
    part: Literal["system", "messages", ""] = ""
    token: int | None = None
    char: int | None = None
    line: int | None = None
    found: str = ""

    def shown(self) -> dict[str, Any]:
        """Return it as answers tell it."""
        difference = None
        if self.token is not None:
            difference = {
                "part": self.part, "token": self.token, "char": self.char, "line": self.line, "found": self.found,
            }  # fmt: skip
        return {
            "reason": self.reason,
            "lost_tokens": self.lost_tokens,
            "first_difference": difference,
            "remedy": REMEDIES[self.reason],
        }


def is_miss(prompt_tokens: int, cached_tokens: int) -> bool:
    """Return whether so much was computed that it is worth to ask why."""
    missed = prompt_tokens - cached_tokens
    return missed >= MIN_MISSED_TOKENS and missed * MISSED_PART >= prompt_tokens


def explain(prompt: SeenPrompt, cached_tokens: int, earlier: Sequence[SeenPrompt], decode: Decode) -> Miss:
    """Return why a prompt of which ``cached_tokens`` were read was not read further.

    ``earlier``: its tenant's prompts that were answered before it came. O(tokens remembered), in numpy.
    """
    new = prompt.ids
    common = [common_tokens(new, seen.ids) for seen in earlier]
    own = max((tokens for tokens, seen in zip(common, earlier, strict=True) if _one_cache(seen, prompt)), default=0)
    if own >= MAX_PROMPT_TOKENS:
        return Miss("not_compared", 0)
    if own - cached_tokens >= MIN_MISSED_TOKENS:
        return Miss("evicted", own - cached_tokens)
    elsewhere = max(range(len(earlier)), key=lambda index: common[index], default=None)
    if elsewhere is not None and common[elsewhere] - max(own, cached_tokens) >= MIN_MISSED_TOKENS:
        scope = earlier[elsewhere].scope
        reason: Reason = "adapter" if scope.lora != prompt.scope.lora else "salt"
        return Miss(reason, common[elsewhere] - cached_tokens)
    nearest = _nearest(prompt, earlier, common, cached_tokens)
    if nearest is None:
        return Miss("never_seen", 0)
    place = common[nearest]
    lost = equal_behind(new, earlier[nearest].ids, place)
    if lost < MIN_LOST_TOKENS:
        return Miss("never_seen", 0)
    return _difference(prompt, earlier[nearest], place, lost, decode)


def _one_cache(seen: SeenPrompt, prompt: SeenPrompt) -> bool:
    return (seen.scope.lora, seen.scope.salt) == (prompt.scope.lora, prompt.scope.salt)


def _nearest(
    prompt: SeenPrompt, earlier: Sequence[SeenPrompt], common: Sequence[int], cached_tokens: int
) -> int | None:
    """Return the index of the earlier prompt that has most in common with this one, wherever it stands.

    Of those with about as much (7/8) it is the one that differs last, and of these the latest.
    """
    # What was read further than an earlier prompt goes explains nothing by it.
    least = cached_tokens - len(prompt.ids) // MISSED_PART
    shared = {
        index: len(np.intersect1d(prompt.sketch, seen.sketch, assume_unique=True))
        for index, seen in enumerate(earlier)
        if _one_cache(seen, prompt) and common[index] >= least
    }
    most = max(shared.values(), default=0)
    near = [index for index, hashes in shared.items() if hashes and hashes * 8 >= most * 7]
    return max(near, key=lambda index: (common[index], index), default=None)


def _difference(prompt: SeenPrompt, seen: SeenPrompt, place: int, lost: int, decode: Decode) -> Miss:
    start = max(0, place - BEFORE_TOKENS)
    new, old = (_text(each.ids[start : place + BEHIND_TOKENS], decode) for each in (prompt, seen))
    at = first_difference(new, old)
    reason = classify(new, old, at)
    before = _text(prompt.ids[:start], decode)
    char = len(before) + at
    # The beginning of the value is what a reader looks for, not the first of its digits that changed.
    line = before.count("\n") + new.count("\n", 0, at) + 1
    part: Literal["system", "messages"] = "system" if char < prompt.system_chars else "messages"
    return Miss(reason, lost, part, place, char, line, value_there(new, at))


def _text(ids: TokenArray, decode: Decode) -> str:
    return decode(ids.tolist()) if len(ids) else ""
