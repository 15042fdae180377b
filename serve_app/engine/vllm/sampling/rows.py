"""Chooses tokens by (seed, position), rules and grammars for the rows of a batch in vLLM.

Owns the data that this needs in vLLM's worker, plain values in ``SamplingParams.extra_args``, and the rows' state
between steps there. The choice is the built-in engine's own code. So a seed gives the same tokens on either engine,
alone or in a batch, and continues with them on another replica. Penalties, bans and grammars run here too, because
vLLM's own would start anew for an answer that another replica began. Imports no vllm.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from router.protocol.block_hash import TokenArray
from serve_app.engine.protocol import EngineRequest, SamplingParams
from serve_app.engine.runner.sampling import choose_on_device, choose_tokens
from serve_app.engine.runner.token_rules import apply_rules
from serve_app.engine.step import History, Kept
from serve_app.structured.matcher import AnswerMatcher, Matchers

_log = logging.getLogger(__name__)

NOT_NUMBERS = "the model's logits are not numbers"

_EXTRA_ARG = "warmpath"
_LIKELIEST = SamplingParams(1, temperature=0.0)
_SEED_MASK = (1 << 64) - 1


class TokenChoice(msgspec.Struct, frozen=True):
    """How one request's tokens are chosen. ``resumed_tokens``: the prompt's last ones that belong to the answer.

    ``grammar``: in llguidance's form, "" for none, and ``tenant``: whose. ``failure_file``: where to write the reason
    of a failed choice.
    """

    sampling: SamplingParams
    resumed_tokens: int
    grammar: str
    failure_file: str
    tenant: str = ""

    def to_extra_args(self) -> dict[str, Any]:
        """Return it in plain types."""
        return {_EXTRA_ARG: msgspec.to_builtins(self)}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> TokenChoice | None:
        """Return the choice that ``to_extra_args`` packed, or None."""
        packed = (extra_args or {}).get(_EXTRA_ARG)
        return None if packed is None else msgspec.convert(packed, cls)


def choice_of(request: EngineRequest, failure_file: str) -> TokenChoice:
    """Return a request's token choice. Greedy ones need it too: vLLM picks any token if logits are not numbers.

    Raises ValueError for a matcher that cannot be sent to another process.
    """
    sampling, matcher = request.sampling, request.matcher
    if matcher is not None and not isinstance(matcher, AnswerMatcher):
        raise ValueError("engine: vllm accepts grammars compiled by the replica, and no other matcher")
    # The noise depends on a seed's lowest 64 bits, and a message can hold no more.
    sampling = replace(sampling, seed=sampling.seed & _SEED_MASK)
    text, tenant = ("", "") if matcher is None else (matcher.text, matcher.tenant)
    return TokenChoice(sampling, request.resumed_tokens, text, failure_file, tenant)


def drafts_wanted(extra_args: Mapping[str, Any] | None) -> bool:
    """Return whether drafts may be verified for the request with these arguments."""
    packed = (extra_args or {}).get(_EXTRA_ARG)
    return packed is None or not packed["sampling"]["disable_spec_decode"]


def vllm_sampling(sampling: SamplingParams, choice: TokenChoice, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's own sampling fields: greedy, and at least one token, which is dropped if ``max_tokens`` is 0.

    ``told``: more of ``extra_args``.
    """
    return {
        "max_tokens": max(sampling.max_tokens, 1),
        "temperature": 0.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": None if sampling.logprob_token_ids else sampling.logprobs,
        "logprob_token_ids": list(sampling.logprob_token_ids) or None,
        "prompt_logprobs": sampling.prompt_logprobs,  # vLLM then reads no cached blocks
        "extra_args": {**choice.to_extra_args(), **told},
    }


class SamplingRow:
    """``prompt``'s last ``resumed_tokens`` are the answer's; ``output``: vLLM's own list of generated tokens."""

    def __init__(self, choice: TokenChoice, prompt: Sequence[int], output: Sequence[int], matchers: Matchers) -> None:
        self.choice = choice
        # The replica has compiled the grammar before, so it is valid.
        self._matcher = matchers.matcher(choice.grammar, choice.tenant) if choice.grammar else None
        self.ruled = choice.sampling.rules is not None or self._matcher is not None
        self._output, self._kept = output, Kept()
        ids = np.asarray(prompt, dtype=np.int32)
        asked = len(ids) - choice.resumed_tokens
        self._prompt, self._known = ids[:asked], choice.resumed_tokens
        self._answer: TokenArray = np.empty(self._known + choice.sampling.max_tokens + 1, dtype=np.int32)
        self._answer[: self._known] = ids[asked:]

    @property
    def position(self) -> int:
        """Position of the next token."""
        return len(self._prompt) + self.choice.resumed_tokens + len(self._output)

    @property
    def ended(self) -> bool:
        """Whether the last token ended the answer. vLLM may plan one step more before it knows that."""
        return bool(self._output) and self._output[-1] in self.choice.sampling.stop_token_ids

    def history(self) -> History:
        """Return prompt and answer for rules and grammar."""
        resumed = self.choice.resumed_tokens
        length = resumed + len(self._output)
        self._answer[self._known : length] = self._output[self._known - resumed :]
        self._known = length
        return History(self._prompt, self._answer[:length], self._matcher, kept=self._kept)

    def fail(self, reason: str) -> None:
        """Write the reason of a failed choice once: the request may have another step before it is cancelled."""
        try:
            with Path(self.choice.failure_file).open("x") as file:
                file.write(reason)
        except FileExistsError:
            pass
        except OSError:
            _log.exception("a failed request cannot be reported (%s)", reason)


def choose_rows(
    rows: Mapping[int, SamplingRow], logits: torch.Tensor, drafts: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return each request's next tokens: its drafts as long as they equal the chosen tokens, and one token more.

    ``logits`` [requests + drafts, vocab], float32, changed by rules: a request's row and one after each of its drafts,
    then the next request's. A draft below 0 is padding, which no chosen token equals. A request without a row, or with
    an ended one, gets the likeliest token; the reason of a failure is in the request's file.
    """
    rows = {at: row for at, row in rows.items() if not row.ended}  # a grammar would fail the token after its end
    asked = [(rows.get(i), guess[:end]) for i, guess in enumerate(drafts) for end in range(len(guess) + 1)]
    ruled = [
        (at, row.choice.sampling, row.history().guess(guess) if guess else row.history())
        for at, (row, guess) in enumerate(asked)
        if row is not None and row.ruled and min(guess, default=0) >= 0
    ]
    failed = apply_rules(logits, ruled) if ruled else {}
    params = [_LIKELIEST if row is None else row.choice.sampling for row, _ in asked]
    tokens = choose_tokens(logits, params, [row.position + len(guess) if row else 0 for row, guess in asked])
    answers: list[list[int]] = []
    at = 0
    for i, guess in enumerate(drafts):
        answers.append([])
        for place, draft in enumerate((*guess, None), at):
            token, row = tokens[place], rows.get(i)
            if row is not None and (token is None or place in failed):
                row.fail(failed.get(place, NOT_NUMBERS))
                token = (row.choice.sampling.stop_token_ids or (0,))[0]
            answers[-1].append(token or 0)
            if token != draft:
                break
        at += len(guess) + 1
    return answers


class LateChecks:
    """Rows that a GPU is still choosing tokens for. They fail once it is known that their logits are no numbers.

    The scheduler settles them before it sends a step's tokens: it has these only when the GPU is past the step.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[Any, list[SamplingRow | None], torch.Tensor]] = deque()

    def choose(self, rows: Mapping[int, SamplingRow], logits: torch.Tensor) -> torch.Tensor:
        """Return the tokens [n] of rows without rules, on the GPU and without waiting for it."""
        chosen_for = [rows.get(i) for i in range(len(logits))]
        params = [_LIKELIEST if row is None else row.choice.sampling for row in chosen_for]
        tokens, numbers = choose_on_device(logits, params, [row.position if row else 0 for row in chosen_for])
        told = torch.empty(len(numbers), dtype=torch.bool, pin_memory=True)
        told.copy_(numbers, non_blocking=True)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._steps.append((event, chosen_for, told))
        return tokens

    def settle(self) -> None:
        """Report the failed rows of all steps that the GPU is past."""
        while self._steps and self._steps[0][0].query():
            _, chosen_for, told = self._steps.popleft()
            if not bool(told.all()):
                for row, fine in zip(chosen_for, told.tolist(), strict=True):
                    if row is not None and not fine:
                        row.fail(NOT_NUMBERS)


late_checks = LateChecks()
"""Of this process, where both the scheduler and the only rank are."""
