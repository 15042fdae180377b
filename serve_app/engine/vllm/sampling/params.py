"""A request's sampling as vLLM's own parameters, and in ``extra_args`` what those cannot say. Imports no vllm.

An interrupted answer's tokens come at the end of the prompt; vLLM's core turns them into output again, so that
penalties, ``min_tokens``, grammars, limits and seeds go on where they were.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from serve_app.config.engine import Capability
from serve_app.engine.protocol import EngineRequest, SamplingParams, TokenRules
from serve_app.structured.matcher import AnswerMatcher


class ExtraArgs(msgspec.Struct, frozen=True, omit_defaults=True):
    """What vLLM's core is told beside vLLM's parameters.

    ``answer_tokens``: the prompt's last ones that are the answer's; ``resumed_tokens``: those that vLLM makes output
    again. ``grammar``: in llguidance's form. ``rules``:
    those that exclude tokens, beside a grammar (never all that it allows) or too many for vLLM.
    ``no_drafts``: whether the request wants none. ``min_p``, ``logit_bias``: vLLM would refuse them beside drafts.
    ``seed``: of draws that are not vLLM's.
    """

    answer_tokens: int = 0
    resumed_tokens: int = 0
    grammar: str = ""
    rules: TokenRules | None = None
    no_drafts: bool = False
    min_p: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0

    def packed(self) -> dict[str, Any]:
        """Return it in plain types; empty if there is nothing to tell."""
        packed = {} if self == ExtraArgs() else msgspec.to_builtins(self)
        return {_EXTRA_ARG: packed} if packed else {}

    @classmethod
    def of(cls, params: Any) -> ExtraArgs:
        """Return what ``packed`` put into vLLM's sampling parameters."""
        packed = (params.extra_args if params is not None else None) or {}
        return msgspec.convert(packed.get(_EXTRA_ARG, {}), cls, strict=False)


_EXTRA_ARG = "warmpath"


def vllm_sampling(
    request: EngineRequest, more: Mapping[str, Any], *, exact: bool, off: Collection[Capability] = ()
) -> dict[str, Any]:
    """Return the fields of vLLM's ``SamplingParams``; at least one token, which is dropped if ``max_tokens`` is 0.

    ``more``: further ones of ``extra_args``. ``exact``: each token is drawn by (seed, position), outside vLLM.
    ``off``: the capabilities that this vLLM does not allow.
    Raises ValueError for a matcher that cannot be sent to another process, and without grammars if one is needed.
    """
    sampling, matcher = request.sampling, request.matcher
    if matcher is not None and not isinstance(matcher, AnswerMatcher):
        raise ValueError("engine: vllm accepts grammars compiled by the replica, and no other matcher")
    rules = sampling.rules or TokenRules()
    free = matcher is None and not _too_many(rules, sampling.stop_token_ids)
    if not free and "grammars" in off:
        raise ValueError("the server's version of vLLM allows no grammar, and no such number of rules; leave them out")
    answered = request.resumed_tokens
    resumed = 0 if "resume" in off else answered
    extra = ExtraArgs(
        answer_tokens=answered,
        resumed_tokens=resumed,
        grammar="" if matcher is None else matcher.text,
        rules=None if free else _excluding(rules),
        no_drafts=sampling.disable_spec_decode,
        min_p=sampling.min_p,
        logit_bias=dict(rules.logit_bias),
        seed=sampling.seed % (1 << 64) if exact else 0,
    )
    most = max(sampling.max_tokens, 1) + resumed
    return {
        "max_tokens": most,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": _signed(sampling.seed) if sampling.seeded and not exact else None,
        "presence_penalty": rules.presence_penalty,
        "frequency_penalty": rules.frequency_penalty,
        "repetition_penalty": rules.repetition_penalty,
        "min_tokens": min(max(rules.min_tokens - answered + resumed, 0), most) if free else 0,
        "allowed_token_ids": list(rules.allowed) or None if free else None,
        "_bad_words_token_ids": [list(word) for word in rules.bad_words] or None if free else None,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": None if sampling.logprob_token_ids else sampling.logprobs,
        "logprob_token_ids": list(sampling.logprob_token_ids) or None,
        "prompt_logprobs": sampling.prompt_logprobs,  # vLLM then reads no cached blocks
        "extra_args": {**extra.packed(), **more},
    }


def own_sampling(params: Any) -> SamplingParams:
    """Return how vLLM's ``params`` choose a token, in this project's form."""
    return SamplingParams(
        1,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        seed=ExtraArgs.of(params).seed,
    )


def _too_many(rules: TokenRules, stops: Sequence[int]) -> bool:
    """Return whether vLLM's V2 runner would stop for good at these rules: it has so much space for each request."""
    words = rules.bad_words
    return len(words) > 128 or sum(map(len, words)) > 1024 or len(rules.allowed) > 1024 or len(stops) > 128


def _signed(seed: int) -> int:
    """Return a seed's lowest 64 bits, on which the noise depends, as vLLM holds them."""
    return ((seed + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def _excluding(rules: TokenRules) -> TokenRules | None:
    only = replace(TokenRules(), min_tokens=rules.min_tokens, bad_words=rules.bad_words, allowed=rules.allowed)
    return None if only == TokenRules() else only
