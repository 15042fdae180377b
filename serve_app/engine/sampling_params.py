"""A request's sampling parameters: a part of the engine's contract; the other types are in ``protocol``."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from router.protocol.block_hash import TokenArray

MIN_TEMPERATURE = 1e-5
"""Lower temperatures are greedy. Source: vLLM's ``_SAMPLING_EPS``."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Changes to logits before a token is chosen; each rule is a function of prompt and answer token ids.

    ``presence_penalty`` and ``frequency_penalty`` count the answer's tokens, ``repetition_penalty`` the prompt's too.
    ``logit_bias``: (token id, addend). Until the answer has ``min_tokens`` no stop token is chosen.
    ``bad_words``: sequences of token ids; the last id never follows the others in the answer.
    ``allowed``: the only token ids of the answer; empty: all.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch those filters off.

    The random number for the token at absolute position p depends only on (``seed``, p), so that a request sent
    again elsewhere with its tokens so far continues identically. ``rules``: None if there are none.
    ``logprobs``: number of likeliest tokens to report with each token, 0 for its own alone, None for no logprobs.
    ``prompt_logprobs``: the same for each token of the prompt after the first, whose KV is then computed anew.
    ``logprob_token_ids``: with ``logprobs``, the tokens to report instead of the likeliest, behind the token itself.
    ``shown_stop_token_ids``: the stop tokens that stay in the answer when they end it. ``seeded``: whether the request
    chose its seed.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    disable_spec_decode: bool = False
    min_p: float = 0.0
    rules: TokenRules | None = None
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    shown_stop_token_ids: tuple[int, ...] = ()
    seeded: bool = True

    @property
    def greedy(self) -> bool:
        """Whether to take the likeliest token: also at temperatures so near 0 that scaled logits overflow."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1


class TokenLogprob(NamedTuple):
    """Log-probabilities of the model before any rule; ``top``: (token id, log-probability) of the likeliest tokens.

    ``rank``: the number of tokens at least as likely; only a prompt's tokens have it, others 0.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


class TokenMatcher(Protocol):
    """Decides the next tokens allowed in one answer from its token ids alone; belongs to the engine's thread."""

    def allowed(self, answer: TokenArray) -> NDArray[np.uint8] | None:
        """Return one bit per token id, lowest bit first, at least one set; None if the answer does not match.

        Answers may come in any order; continuing the last one is cheapest. Raises ValueError if the grammar exceeds
        its limit of work.
        """
