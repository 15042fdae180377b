"""One answer's place in a grammar, told from its token ids alone; and the latest compiled grammars of a replica."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from router.protocol.block_hash import TokenArray, common_tokens
from serve_app.structured.compiler import GrammarCompiler, GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_COMPILED = 64
"""Grammars that a replica keeps compiled."""

SPENT_AT_FIRST_S, SPENT_A_TOKEN_S = 0.05, 0.001
"""Of a core, what one answer's grammar may take in all, for every step waits for it; honest ones take 25 us a token."""

_NOTHING: TokenArray = np.empty(0, dtype=np.int32)


class AnswerMatcher:
    """Which tokens may come next in one answer; satisfies the engine's ``TokenMatcher``.

    ``clock``: CPU seconds of this thread, for a busy machine must end no answer. ``text``: the grammar, for an engine
    with steps in another process.
    """

    def __init__(self, compiled: LLMatcher, clock: Callable[[], float] = time.thread_time, *, text: str = "") -> None:
        self.text = text
        self._compiled = compiled
        self._clock = clock
        self._matcher = compiled.deep_copy()
        self._read: TokenArray = _NOTHING
        self._left_s = SPENT_AT_FIRST_S

    def allowed(self, answer: TokenArray) -> NDArray[np.uint8] | None:
        """Return a bit a token id, lowest first; None where ``answer`` does not match. Raises GrammarError."""
        begun_s = self._clock()
        if self._left_s < 0:
            raise GrammarError("the grammar takes too much time; make it less ambiguous")
        mask, tokens = self._read_on(answer)
        self._left_s += SPENT_A_TOKEN_S * tokens - (self._clock() - begun_s)
        return mask

    def _read_on(self, answer: TokenArray) -> tuple[NDArray[np.uint8] | None, int]:
        """Return what is allowed, and for how many tokens that was work: those that were read, one at least."""
        same = common_tokens(self._read, answer)
        if same < len(self._read) and not self._matcher.rollback(len(self._read) - same):
            self._restart()
            same = 0
        new = answer[same:].tolist()
        taken = self._matcher.try_consume_tokens(new) if new else 0
        self._read = answer[: same + taken].copy()
        mask = self._matcher.compute_bitmask() if taken == len(new) else b""
        if self._matcher.is_error():
            reason = self._matcher.get_error().splitlines()[0][:200]
            self._restart()
            raise GrammarError(f"the grammar takes too much work here: {reason}")
        return np.frombuffer(mask, dtype=np.uint8) if mask else None, max(1, len(new))

    def _restart(self) -> None:
        self._matcher = self._compiled.deep_copy()
        self._read = _NOTHING


class Matchers:
    """Makes matchers (any thread); what is not known is compiled, by the thread that asks."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiled = lru_cache(MAX_COMPILED)(compiler.compile)

    def matcher(self, text: str) -> AnswerMatcher:
        """Return a matcher of its own for an answer, by a grammar in llguidance's form. Raises GrammarError."""
        return AnswerMatcher(self._compiled(text), text=text)
