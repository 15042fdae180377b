"""Chooses tokens by (seed, position), rules and grammars for the rows of a batch that vLLM hands over.

Owns the rows' state between steps. The choice is the built-in engine's own code, so that a seed gives the same tokens
on either engine, alone or in a batch, and goes on with them on another replica. Runs in vLLM's worker; imports no vllm.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from router.protocol.block_hash import TokenArray
from serve_app.engine.protocol import TokenMatcher
from serve_app.engine.runner.sampling import choose_tokens
from serve_app.engine.runner.token_rules import apply_rules
from serve_app.engine.step import History
from serve_app.engine.vllm.sampling.token_choice import TokenChoice
from serve_app.structured.matcher import Matchers

_log = logging.getLogger(__name__)

NOT_NUMBERS = "the model's logits are not numbers"


class Row:
    """One request in the batch. ``output``: vLLM's own list of the tokens it generated, which grows.

    ``prompt`` is as vLLM got it: its last ``resumed_tokens`` are the answer's first.
    """

    def __init__(
        self, choice: TokenChoice, prompt: Sequence[int], output: Sequence[int], matcher: TokenMatcher | None
    ) -> None:
        self.choice = choice
        self._output = output
        ids = np.asarray(prompt, dtype=np.int32)
        asked = len(ids) - choice.resumed_tokens
        self._prompt, self._known = ids[:asked], choice.resumed_tokens
        self._prompt_tokens = len(ids)
        self._answer: TokenArray = np.empty(self._known + choice.sampling.max_tokens + 1, dtype=np.int32)
        self._answer[: self._known] = ids[asked:]
        self._matcher = matcher
        self._ruled = choice.sampling.rules is not None or matcher is not None

    @property
    def position(self) -> int:
        """Where the next token will stand."""
        return self._prompt_tokens + len(self._output)

    def history(self) -> History | None:
        """Return prompt and answer as rules and grammar read them; None where nothing does."""
        if not self._ruled:
            return None
        length = self.choice.resumed_tokens + len(self._output)
        self._answer[self._known : length] = self._output[self._known - self.choice.resumed_tokens :]
        self._known = length
        return History(self._prompt, self._answer[:length], self._matcher)


class RowSampler:
    """The rows that need a choice, by their index in the batch."""

    def __init__(self, matchers: Matchers) -> None:
        self.rows: dict[int, Row] = {}
        self._matchers = matchers

    def new_row(self, choice: TokenChoice, prompt: Sequence[int], output: Sequence[int]) -> Row:
        """Return a row's state. Its grammar was compiled once by the replica, so that it is known to be one."""
        matcher = self._matchers.matcher(choice.grammar) if choice.grammar else None
        return Row(choice, prompt, output, matcher)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave one token in each of its rows of ``logits`` [n, vocab], float32, in place: that one is chosen then.

        A row that fails gets a token that ends it, or any: the reason lies in its file before anybody sees the token.
        """
        if not self.rows:
            return logits
        indices = sorted(self.rows)
        rows = [self.rows[index] for index in indices]
        own = logits[indices]
        histories = [row.history() for row in rows]
        ruled = [
            (i, row.choice.sampling, history)
            for i, (row, history) in enumerate(zip(rows, histories, strict=True))
            if history is not None
        ]
        failed = apply_rules(own, ruled) if ruled else {}
        tokens = choose_tokens(own, [row.choice.sampling for row in rows], [row.position for row in rows])
        chosen: list[int] = []
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            error = failed.get(i) or (NOT_NUMBERS if token is None else "")
            if error:
                _note_failure(row.choice, error)
            chosen.append((row.choice.sampling.stop_token_ids or (0,))[0] if error or token is None else token)
        logits[indices] = float("-inf")
        logits[indices, chosen] = 0.0
        return logits


def _note_failure(choice: TokenChoice, reason: str) -> None:
    """Write why a row failed, the first time: its request may have another step before it is cancelled."""
    try:
        with Path(choice.failure_file).open("x") as file:
            file.write(reason)
    except FileExistsError:
        pass
    except OSError:
        _log.exception("a failed request cannot be told so (%s)", reason)
