"""Matches one answer against a grammar by its token ids, and caches a replica's latest compiled grammars."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from router.protocol.block_hash import TokenArray, common_tokens
from serve_app.fairness.work import TenantsLru
from serve_app.structured.compiler import GrammarCompiler, GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_COMPILED = 64
"""The number of compiled grammars that a replica keeps, over all tenants."""

SPENT_AT_FIRST_S, SPENT_A_TOKEN_S = 0.05, 0.001
"""The CPU time limit of one answer's grammar, because every step waits for it. Honest ones need 25 us per token."""

_NOTHING: TokenArray = np.empty(0, dtype=np.int32)


class AnswerMatcher:
    """The allowed next tokens of one answer. Implements the engine's ``TokenMatcher``.

    ``clock``: CPU seconds of this thread, so that a busy machine does not end an answer. ``text``: the grammar, and
    ``tenant``: whose, for an engine with steps in another process.
    """

    def __init__(
        self, compiled: LLMatcher, clock: Callable[[], float] = time.thread_time, *, text: str = "", tenant: str = ""
    ) -> None:
        self.text, self.tenant = text, tenant
        self._compiled = compiled
        self._clock = clock
        self._matcher = compiled.deep_copy()
        self._read: TokenArray = _NOTHING
        self._left_s = SPENT_AT_FIRST_S

    def allowed(self, answer: TokenArray) -> NDArray[np.uint8] | None:
        """Return one bit per token id, lowest first, or None if ``answer`` does not match. Raises GrammarError."""
        begun_s = self._clock()
        if self._left_s < 0:
            raise GrammarError("the grammar takes too much time; make it less ambiguous")
        mask, tokens = self._read_on(answer)
        self._left_s += SPENT_A_TOKEN_S * tokens - (self._clock() - begun_s)
        return mask

    def _read_on(self, answer: TokenArray) -> tuple[NDArray[np.uint8] | None, int]:
        """Return the allowed tokens, and the number of newly read tokens, at least one."""
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
    """Creates matchers (any thread). The calling thread compiles a grammar that is new to its tenant.

    A tenant never gets another's compiled grammar, whose speed would tell that somebody uses it. Failures are kept too.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._compiled: TenantsLru[str, LLMatcher | GrammarError] = TenantsLru(MAX_COMPILED)

    def matcher(self, text: str, tenant: str = "") -> AnswerMatcher:
        """Return a new matcher for an answer, from a grammar in llguidance's form. Raises GrammarError."""
        compiled = self._compiled.get(tenant, text)
        if compiled is None:
            try:
                compiled = self._compiler.compile(text)
            except GrammarError as error:
                compiled = error
            self._compiled.put(tenant, text, compiled)
        if isinstance(compiled, GrammarError):
            raise GrammarError(str(compiled))
        return AnswerMatcher(compiled, text=text, tenant=tenant)
