"""One request's usage so far, for its answer, and the result of its save."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Protocol

from serve_app.api.agent_rules import keeping
from serve_app.api.format import Usage
from serve_app.api.request import ChatRequest, GenerateRequest
from serve_app.engine.protocol import EngineRequest, Save, SaveResult
from serve_app.generation.answer import Piece

SAVE_FIELD = "save_system_prompt_kv_cache"

_NOT_SAVED = {
    "over_budget": "not saved: it needs {needed_tokens} tokens of KV beside the {held_tokens} that your saves hold, "
    "and your part of a replica's pin budget (pin_budget) is {budget_tokens}",
    "too_large": "not saved: it needs {needed_tokens} tokens of KV, and a replica's whole pin budget (pin_budget) is "
    "{budget_tokens}",
    "too_short": "not saved, because the system prompt does not fill a KV block",
    "failed": "not saved, because vLLM did not hold it",
    "off": "not saved, because prefix caching is switched off, or it is vLLM's and has no pin budget (pin_budget)",
}

MISS_WAIT_S = 1.0
"""A complete answer waits at most this long for the reason of its cache miss; then it is sent without it."""


class ShownMiss(Protocol):
    """The reason of a cache miss."""

    def shown(self) -> dict[str, Any]:
        """Return it in the form shown in answers."""


class RequestUsage:
    """Adds up a request's usage; a prompt counts once for all its choices.

    ``completion_tokens``: of each sequence. ``save``: the result of a save; ``asked_by``: the field that requested it.
    ``miss``: the reason of its cache miss. ``written_tokens``: tokens of its prompts that were newly put in the cache.
    """

    def __init__(self, request: GenerateRequest, generations: list[EngineRequest]) -> None:
        self._choices = request.n
        self._rules_off = request.rules_off
        self._prompt_tokens = sum(len(generation.token_ids) for generation in generations[:: request.n])
        self.completion_tokens = [0] * len(generations)
        self._cached_tokens = self._reasoning_tokens = self.written_tokens = 0
        self._keep = [save for save in generations[0].saves if not save.key]
        self._kept = (0, 0)
        self.save: SaveResult | None = None
        self.miss: Awaitable[ShownMiss] | None = None
        self._cache_miss: Mapping[str, Any] | None = None
        self.asked_by = SAVE_FIELD
        if self._keep and isinstance(request, ChatRequest):
            self.asked_by = request.breakpoint_field

    def add(self, piece: Piece) -> None:
        """Count one piece of an answer."""
        self.completion_tokens[piece.index] += piece.new_tokens
        self._reasoning_tokens += piece.reasoning_tokens
        first = piece.first
        if first is None:
            return
        self.save = self.save or first.save
        if piece.index % self._choices == 0:
            self._cached_tokens += first.cached_tokens
            if self._keep and not first.correction and (first.save is None or first.save.outcome != "off"):
                self._kept = kept_tokens(self._keep, first.cached_tokens)

    async def know_miss(self) -> None:
        """Wait for the reason of the cache miss, if it was requested."""
        if self.miss is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(MISS_WAIT_S):
                    shown = (await asyncio.shield(self.miss)).shown()
                    if self._rules_off and shown["first_difference"] is not None:
                        shown = {**shown, "remedy": f"{keeping(self._rules_off)} {shown['remedy']}"}
                    self._cache_miss = shown

    def total(self) -> Usage:
        """Return the current usage."""
        counted = self._prompt_tokens, sum(self.completion_tokens), self._cached_tokens
        return Usage(*counted, *self._kept, self._cache_miss, self._reasoning_tokens, self.written_tokens)


def kept_tokens(keep: Sequence[Save], cached_tokens: int) -> tuple[int, int]:
    """Return how many tokens that were not cached are newly kept: for minutes, and for an hour."""
    hour = max((kept.tokens for kept in keep if kept.ttl_s is not None and kept.ttl_s >= 3600), default=0)
    most = max((kept.tokens for kept in keep), default=0)
    return max(0, most - max(hour, cached_tokens)), max(0, hour - cached_tokens)


def save_warning(save: SaveResult | None, asked_by: str = SAVE_FIELD) -> str:
    """Return why a save failed, "" if it succeeded or none was requested; ``asked_by``: the requesting field."""
    reason = _NOT_SAVED.get(save.outcome) if save is not None else None
    return f"{asked_by}: {reason.format(**asdict(save))}" if save is not None and reason else ""
