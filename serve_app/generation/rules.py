"""The rules of sampling that a request names, as the engine takes them."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.api.request import GenerateRequest
from serve_app.engine.protocol import TokenRules
from serve_app.errors import InvalidRequest

_NO_RULES = TokenRules()


def rules_of(request: GenerateRequest, bad_words: Sequence[tuple[int, ...]], vocab_size: int) -> TokenRules | None:
    """Return a request's rules, None for none. ``bad_words``: their token ids.

    Raises InvalidRequest for token ids that the model does not have.
    """
    for field, ids in (
        ("logit_bias", [token for token, _ in request.logit_bias]),
        ("stop_token_ids", request.stop_token_ids),
    ):
        if ids and max(ids) >= vocab_size:
            raise InvalidRequest(
                f"{field} must name token ids from 0 to {vocab_size - 1}; {max(ids)} is none.", param=field
            )
    rules = TokenRules(
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias,
        min_tokens=request.min_tokens,
        bad_words=tuple(bad_words),
    )
    return None if rules == _NO_RULES else rules


def refuse_without_logits(request: GenerateRequest) -> None:
    """Raise InvalidRequest for what needs a model's logits, where there is none."""
    asked = {
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty != 1,
        "logit_bias": request.logit_bias,
        "min_p": request.min_p,
        "bad_words": request.bad_words,
        "logprobs": request.logprobs is not None,
        request.grammar.field if request.grammar is not None else "": request.grammar,
    }
    for field, value in asked.items():
        if value:
            raise InvalidRequest(
                f"{field} needs a model's logits, and this deployment's engine is simulated; leave it out.", param=field
            )
