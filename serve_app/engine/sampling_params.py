"""How tokens are chosen, as a request says it; part of the engine's contract, whose other types are in ``protocol``."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from router.protocol.block_hash import TokenArray

MIN_TEMPERATURE = 1e-5
"""Lower temperatures are greedy. Source: vLLM's ``_SAMPLING_EPS``."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What changes logits before a token is chosen; each rule is a function of the prompt's and the answer's token ids.

    ``presence_penalty`` and ``frequency_penalty`` count the answer's tokens, ``repetition_penalty`` the prompt's too.
    ``logit_bias``: (token id, what to add). Until the answer has ``min_tokens`` no stop token is chosen.
    ``bad_words``: token ids of which the last never follows the others in the answer.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch those filters off.

    The random number for the token at absolute position p depends only on (``seed``, p), so that a request sent
    again elsewhere with the tokens it already has continues identically. ``rules``: None where there are none.
    ``logprobs``: how many of the likeliest tokens to tell with each token, 0 for its own alone, None for nothing.
    ``shown_stop_token_ids``: those of the stop tokens that are among the answer's tokens when they end it.
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
    shown_stop_token_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken: also at temperatures so near 0 that logits divided by them overflow."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1


class TokenLogprob(NamedTuple):
    """Logarithms of the model's own probabilities, before any rule; ``top``: (token id, its own) of the likeliest."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenMatcher(Protocol):
    """Which tokens may come next in one answer, told from its token ids alone; belongs to the engine's thread."""

    def allowed(self, answer: TokenArray) -> NDArray[np.uint8] | None:
        """Return a bit a token id, the lowest bit first, at least one of them set; None where the answer is none.

        Answers may come in any order; the one that goes on where the last one ended costs least. Raises ValueError
        where the grammar takes more work than it may.
        """
