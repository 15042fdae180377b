"""How a request's sampling reaches vLLM: greedy to it, whole to the logits processor."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.protocol import SamplingParams, TokenRules
from serve_app.engine.vllm.sampling.token_choice import TokenChoice, choice_of, vllm_sampling
from tests.serve_app.engine.tiny import prompt, request

RULES = st.builds(
    TokenRules,
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.5, 2),
    logit_bias=st.lists(st.tuples(st.integers(0, 99), st.floats(-100, 100)), max_size=3).map(tuple),
    min_tokens=st.integers(0, 9),
    bad_words=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(0, 100),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.1, 1),
    top_k=st.integers(0, 50),
    seed=st.integers(-(2**63), 2**70),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    min_p=st.floats(0, 1),
    rules=st.none() | RULES,
    logprobs=st.none() | st.integers(0, 20),
)


@given(sampling=SAMPLING, resumed=st.integers(0, 4))
def test_everything_crosses_to_the_worker(sampling: SamplingParams, resumed: int) -> None:
    """What the processor reads from the message is what was asked, but for bits of the seed that matter to nobody."""
    wanted = replace(request("r", prompt(5)), sampling=sampling, resumed_tokens=resumed)
    choice = choice_of(wanted, "/file")
    fields = vllm_sampling(sampling, choice)
    assert fields["temperature"] == 0.0
    assert fields["max_tokens"] == max(1, sampling.max_tokens)
    assert fields["stop_token_ids"] == list(sampling.stop_token_ids)
    arrived = TokenChoice.from_extra_args(msgspec.msgpack.decode(msgspec.msgpack.encode(fields["extra_args"])))
    assert arrived == TokenChoice(replace(sampling, seed=sampling.seed % 2**64), resumed, "", "/file")


def test_who_does_not_come_from_the_engine_has_no_choice() -> None:
    """vLLM's own warm-up says nothing to the processor."""
    assert TokenChoice.from_extra_args(None) is None
    assert TokenChoice.from_extra_args({"other": 1}) is None


class _Anything:
    def allowed(self, answer: object) -> None:
        return None


def test_a_matcher_that_is_no_grammar_is_refused() -> None:
    """It lives in this process, and tokens are chosen in another."""
    with pytest.raises(ValueError, match="no other matcher"):
        choice_of(replace(request("r", prompt(5)), matcher=_Anything()), "/file")
