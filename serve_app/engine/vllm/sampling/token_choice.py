"""What a logits processor must know of a request to choose its tokens as the built-in engine does.

Plain data: it crosses to vLLM's worker as ``SamplingParams.extra_args``. Penalties, bans and grammars go this way too,
for vLLM's own begin anew with an answer that another replica began.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from serve_app.engine.protocol import EngineRequest, SamplingParams
from serve_app.structured.matcher import AnswerMatcher

EXTRA_ARG = "warmpath"
"""The name in ``extra_args``."""

_SEED_MASK = (1 << 64) - 1


class TokenChoice(msgspec.Struct, frozen=True):
    """How one request's tokens are chosen. ``resumed_tokens``: the prompt's last ones that belong to the answer.

    ``grammar``: in llguidance's form, "" for none. ``failure_file``: where to write why no token could be chosen.
    """

    sampling: SamplingParams
    resumed_tokens: int
    grammar: str
    failure_file: str

    def to_extra_args(self) -> dict[str, Any]:
        """Return it in plain types."""
        return {EXTRA_ARG: msgspec.to_builtins(self)}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> TokenChoice | None:
        """Return what ``to_extra_args`` packed, None where nothing was."""
        packed = (extra_args or {}).get(EXTRA_ARG)
        return None if packed is None else msgspec.convert(packed, cls)


def choice_of(request: EngineRequest, failure_file: str) -> TokenChoice:
    """Return how a request's tokens are chosen: the likeliest too, as vLLM takes any for it where none is a number.

    Raises ValueError for a matcher that cannot cross to another process.
    """
    sampling, matcher = request.sampling, request.matcher
    if matcher is not None and not isinstance(matcher, AnswerMatcher):
        raise ValueError("engine: vllm takes grammars as the replica compiles them, and no other matcher")
    # The noise depends on a seed's lowest 64 bits, and a message holds no more.
    sampling = replace(sampling, seed=sampling.seed & _SEED_MASK)
    return TokenChoice(sampling, request.resumed_tokens, "" if matcher is None else matcher.text, failure_file)


def vllm_sampling(sampling: SamplingParams, choice: TokenChoice) -> dict[str, Any]:
    """Return the fields of vLLM's own ``SamplingParams``: greedy, as a processor leaves one token.

    vLLM computes a prompt only to sample from it: without ``max_tokens`` one token is made, which nobody gets.
    """
    return {
        "max_tokens": max(sampling.max_tokens, 1),
        "temperature": 0.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": sampling.logprobs,
        "extra_args": choice.to_extra_args(),
    }
