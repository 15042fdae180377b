"""A request's sampling crosses to vLLM: in its own parameters where it has them, else beside them."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from serve_app.config.engine import Capability
from serve_app.engine.protocol import SamplingParams, TokenRules
from serve_app.engine.vllm.sampling.params import ExtraArgs, own_sampling, vllm_sampling
from serve_app.structured.matcher import AnswerMatcher
from tests.serve_app.engine.tiny import prompt, request

BANS = TokenRules(min_tokens=3, bad_words=((5, 6), (7,)), allowed=(5, 6, 7))
RULES = TokenRules(1.0, 0.5, 1.3, ((5, 2.0),), min_tokens=3, bad_words=((5, 6), (7,)), allowed=(5, 6, 7))


def fields_of(
    sampling: SamplingParams,
    matcher: Any = None,
    *,
    exact: bool = False,
    resumed: int = 0,
    off: Collection[Capability] = (),
) -> dict[str, Any]:
    asked = structs.replace(request("r", prompt(5)), sampling=sampling, resumed_tokens=resumed, matcher=matcher)
    return vllm_sampling(asked, {"other": 1}, exact=exact, off=off)


def beyond(fields: dict[str, Any]) -> ExtraArgs:
    """Return what the core reads, after the way through a message."""
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(fields["extra_args"]))
    return ExtraArgs.of(SimpleNamespace(extra_args=arrived))


def test_everything_is_told_once() -> None:
    """Rules are vLLM's; those that it refuses beside drafts, and an interrupted answer, are told to its core."""
    fields = fields_of(
        SamplingParams(12, 0.7, 0.9, 20, 3, (17,), min_p=0.1, rules=RULES, disable_spec_decode=True), resumed=2
    )
    told = beyond(fields)
    assert told == ExtraArgs(2, 2, no_drafts=True, min_p=0.1, logit_bias={5: 2.0})
    assert fields.pop("extra_args")["other"] == 1
    assert fields == {
        "max_tokens": 14,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "seed": 3,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "min_tokens": 3,
        "allowed_token_ids": [5, 6, 7],
        "_bad_words_token_ids": [[5, 6], [7]],
        "stop_token_ids": [17],
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": None,
        "logprob_token_ids": None,
        "prompt_logprobs": None,
    }


def test_a_plain_request_tells_nothing_beside_its_parameters() -> None:
    """It takes no place in messages; without a seed of its own vLLM draws in one batch, unless every token is exact."""
    plain = SamplingParams(0, seed=9, seeded=False)
    fields = fields_of(plain)
    assert fields["extra_args"] == {"other": 1}
    assert (fields["max_tokens"], fields["seed"]) == (1, None)
    assert fields_of(plain, exact=True)["seed"] is None
    assert fields_of(SamplingParams(4, 0.3, top_k=1))["temperature"] == 0.0
    assert (
        beyond({"extra_args": {}})
        == ExtraArgs.of(SimpleNamespace(extra_args=None))
        == ExtraArgs.of(None)
        == ExtraArgs()
    )


def test_a_grammar_takes_the_rules_that_could_leave_it_no_token() -> None:
    """Else vLLM's bans and the grammar together would exclude every token; penalties and biases stay vLLM's."""
    matcher: Any = object.__new__(AnswerMatcher)
    matcher.text = "some grammar"
    fields = fields_of(SamplingParams(12, rules=RULES), matcher)
    assert beyond(fields) == ExtraArgs(grammar="some grammar", rules=BANS, logit_bias={5: 2.0})
    assert (fields["min_tokens"], fields["allowed_token_ids"], fields["_bad_words_token_ids"]) == (0, None, None)
    assert (fields["presence_penalty"], fields["repetition_penalty"]) == (1.0, 1.3)
    assert beyond(fields_of(SamplingParams(12, rules=TokenRules(1.0)), matcher)).rules is None


@pytest.mark.parametrize(
    ("stops", "rules"),
    [
        ((1,), TokenRules(min_tokens=3, bad_words=((5,),) * 129)),
        ((1,), TokenRules(bad_words=((5,) * 1025,))),
        ((1,), TokenRules(allowed=tuple(range(1025)))),
        (tuple(range(129)), TokenRules(min_tokens=3)),
    ],
)
def test_rules_that_vllm_has_no_space_for_exclude_tokens_here(stops: tuple[int, ...], rules: TokenRules) -> None:
    """Its V2 runner would stop for good, for everybody."""
    fields = fields_of(SamplingParams(12, stop_token_ids=stops, rules=rules))
    assert beyond(fields).rules == rules
    assert (fields["min_tokens"], fields["allowed_token_ids"], fields["_bad_words_token_ids"]) == (0, None, None)


def test_without_resumed_output_an_answer_goes_on_as_a_prompt() -> None:
    """Its length and least length are what is left of them; a grammar, which is no part of vLLM, goes on."""
    rules = TokenRules(min_tokens=3, bad_words=((5,),))
    fields = fields_of(SamplingParams(12, rules=rules), resumed=2, off={"resume"})
    assert (fields["max_tokens"], fields["min_tokens"]) == (12, 1)
    assert beyond(fields) == ExtraArgs(2)
    assert fields_of(SamplingParams(12, rules=rules), resumed=4, off={"resume"})["min_tokens"] == 0


def test_without_grammars_only_what_vllm_has_itself_is_answered() -> None:
    matcher: Any = object.__new__(AnswerMatcher)
    matcher.text = "some grammar"
    long = SamplingParams(12, rules=TokenRules(allowed=tuple(range(1025))))
    for sampling, grammar in ((SamplingParams(12), matcher), (long, None)):
        with pytest.raises(ValueError, match="allows no grammar"):
            fields_of(sampling, grammar, off={"grammars"})
    assert fields_of(SamplingParams(12, rules=RULES), off={"grammars"})["allowed_token_ids"] == [5, 6, 7]


def test_a_matcher_that_is_no_grammar_is_refused() -> None:
    """It lives in this process, but tokens are chosen in another."""
    with pytest.raises(ValueError, match="no other matcher"):
        fields_of(SamplingParams(4), object())


@given(st.integers(-(2**70), 2**70))
def test_a_seeds_lowest_64_bits_arrive(seed: int) -> None:
    """The noise of a token depends on no more of it; where each token is drawn here, vLLM gets none."""
    arrived = fields_of(SamplingParams(1, seed=seed))["seed"]
    assert (arrived - seed) % 2**64 == 0
    assert -(2**63) <= arrived < 2**63
    fields = fields_of(SamplingParams(1, 0.5, 0.9, 3, seed, min_p=0.1), exact=True)
    params = SimpleNamespace(**{**fields, "min_p": 0.1})
    assert own_sampling(params) == SamplingParams(1, 0.5, 0.9, 3, seed % 2**64, min_p=0.1)
