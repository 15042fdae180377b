"""Rules of sampling against formulas for single tokens; equal for any batch, and in an engine for any history."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray

from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import EngineRequest, SamplingParams, TokenRules
from serve_app.engine.runner import token_rules
from serve_app.engine.runner.sampling import to_device
from serve_app.engine.runner.token_rules import apply_rules, token_logprobs
from serve_app.engine.step import History, Kept
from tests.serve_app.conftest import MakeEngine
from tests.serve_app.engine.tiny import VOCAB, prompt, request, run_all

SMALL = 37


class Bits:
    """A matcher that allows the same tokens for any answer."""

    def __init__(self, allowed: set[int], vocab: int = SMALL) -> None:
        self._mask = np.packbits([token in allowed for token in range(vocab)], bitorder="little")

    def allowed(self, answer: NDArray[np.int32]) -> NDArray[np.uint8]:
        return self._mask


def oracle(row: NDArray[np.float32], params: SamplingParams, history: History, allowed: set[int] | None) -> list[float]:
    """The rules, one token and one rule after the other, as in vLLM's documentation."""
    rules = params.rules or TokenRules()
    if rules.allowed:
        only = set(rules.allowed) if allowed is None else set(rules.allowed) & allowed
        allowed = only or allowed
    seen, answer = {*history.prompt.tolist(), *history.answer.tolist()}, history.answer.tolist()
    banned = set(params.stop_token_ids) if len(answer) < rules.min_tokens else set()
    for word in rules.bad_words:
        before = list(word[:-1])
        if len(answer) >= len(before) and answer[len(answer) - len(before) :] == before:
            banned.add(word[-1])
    if allowed is not None and not allowed - banned:
        banned = set()
    changed = []
    for token, logit in enumerate(row):
        logit += np.float32(dict(rules.logit_bias).get(token, 0.0))
        if token in banned:
            logit = np.float32(-np.inf)
        if token in seen:
            factor = np.float32(rules.repetition_penalty)
            logit = logit / factor if logit > 0 else logit * factor
        times = answer.count(token)
        if times:
            logit -= np.float32(times * rules.frequency_penalty + rules.presence_penalty)
        if allowed is not None and token not in allowed:
            logit = np.float32(-np.inf)
        changed.append(float(logit))
    return changed


tokens = st.integers(0, SMALL - 1)
penalties = st.sampled_from([0.0, -2.0, 0.3, 2.0])
rows = st.fixed_dictionaries(
    {
        "prompt": st.lists(tokens, min_size=1, max_size=20),
        "answer": st.lists(tokens, max_size=20),
        "allowed": st.none() | st.sets(tokens, min_size=1),
        "stop": st.lists(tokens, max_size=3),
        "rules": st.none()
        | st.builds(
            TokenRules,
            penalties,
            penalties,
            st.sampled_from([1.0, 0.5, 1.7]),
            st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 100.0]), max_size=4).map(lambda d: tuple(d.items())),
            st.integers(0, 6),
            st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=5).map(tuple),
            st.lists(tokens, max_size=6).map(tuple),
        ),
    }
)


@given(st.lists(rows, min_size=1, max_size=4), st.integers(0, 9), st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_rows_are_the_oracles_and_no_row_depends_on_another(wanted: list[Any], seed: int, rng: Any) -> None:
    logits = torch.randn(len(wanted) + 1, SMALL, generator=torch.Generator().manual_seed(seed)) * 3
    ruled, expected = [], [logits[0].tolist()]
    for row, how in enumerate(wanted, 1):
        # Half of the bad words are about to be generated.
        rules = how["rules"]
        if rules is not None and rules.bad_words and how["answer"] and rng.random() < 0.5:
            rules = replace(rules, bad_words=(*rules.bad_words, (*how["answer"][-2:], rng.randrange(SMALL))))
        params = SamplingParams(9, stop_token_ids=tuple(how["stop"]), rules=rules)
        matcher = None if how["allowed"] is None else Bits(how["allowed"])
        ids = [np.array(how[part], dtype=np.int32) for part in ("prompt", "answer")]
        ruled.append((row, params, History(ids[0], ids[1], matcher)))
        expected.append(oracle(logits[row].numpy().copy(), params, ruled[-1][2], how["allowed"]))
    alone = []
    for row, params, history in ruled:
        one = logits[row : row + 1].clone()
        assert apply_rules(one, [(0, params, history)]) == {}
        alone.append(one[0])
    assert apply_rules(logits, ruled) == {}
    np.testing.assert_allclose(logits.numpy(), np.array(expected, dtype=np.float32), rtol=1e-6)
    for row, one in enumerate(alone, 1):
        assert torch.equal(logits[row], one)


@given(
    how=rows,
    steps=st.lists(st.tuples(st.integers(0, 9), st.lists(tokens, max_size=6)), max_size=12),
    seed=st.integers(0, 9),
)
@settings(max_examples=200)
def test_steps_of_a_request_depend_on_its_answer_alone(how: Any, steps: list[tuple[int, list[int]]], seed: int) -> None:
    """What is kept between steps changes nothing, whatever tokens are added or taken back, as with drafts."""
    logits = torch.randn(1, SMALL, generator=torch.Generator().manual_seed(seed)) * 3
    params = SamplingParams(9, stop_token_ids=tuple(how["stop"]), rules=how["rules"] or TokenRules(0.5, 0.3, 1.7))
    matcher = None if how["allowed"] is None else Bits(how["allowed"])
    asked, answer, kept = np.array(how["prompt"], dtype=np.int32), how["answer"], Kept()
    for back, more in [(0, []), *steps]:
        answer = [*answer[: max(0, len(answer) - back)], *more]
        history = History(asked, np.array(answer, dtype=np.int32), matcher)
        fresh, same = logits.clone(), logits.clone()
        assert apply_rules(fresh, [(0, params, history)]) == {}
        assert apply_rules(same, [(0, params, replace(history, kept=kept))]) == {}
        assert torch.equal(fresh, same)


def test_a_step_costs_what_is_new_in_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases, banned words and the prompt are read once a request, not at each of its steps."""
    moved = 0

    def counted(values: Any, *how: Any) -> torch.Tensor:
        nonlocal moved
        moved += len(values)
        return to_device(values, *how)

    monkeypatch.setattr(token_rules, "to_device", counted)
    many, vocab, kept = range(1000), 2000, Kept()
    rules = TokenRules(
        0.5, 0.25, 1.3, tuple((i, 1.0) for i in many), 9, tuple((i,) for i in many) + tuple((i, i) for i in many)
    )
    answer, logits = np.arange(400, dtype=np.int32) % 50, torch.zeros(1, vocab)
    for length in range(301):
        history = History(np.arange(1000, dtype=np.int32), answer[:length], kept=kept)
        assert apply_rules(logits, [(0, SamplingParams(400, rules=rules), history)]) == {}
        if length == 0:
            once, moved = moved, 0
    assert once >= 4 * len(many)
    assert moved <= 300 * 5, "a few numbers a token"


def test_the_last_bias_of_a_token_counts(device: torch.device) -> None:
    logits = torch.zeros(1, SMALL, device=device)
    ids = np.zeros(1, dtype=np.int32)
    params = SamplingParams(1, rules=TokenRules(logit_bias=((5, 2.0), (5, -3.0))))
    assert apply_rules(logits, [(0, params, History(ids, ids))]) == {}
    assert logits[0, 5] == -3.0


def test_a_gpu_applies_the_same_rules(device: torch.device) -> None:
    """Every rule, with and without a grammar."""
    rules = TokenRules(0.5, 0.25, 1.3, logit_bias=((5, 2.0), (6, -3.0)), min_tokens=9, bad_words=((7,), (3, 8)))
    params = SamplingParams(9, stop_token_ids=(1, 2), rules=rules)
    asked, found = np.array([4, 9, 9], dtype=np.int32), np.array([5, 5, 30, 3], dtype=np.int32)
    kept = {"cpu": (Kept(), Kept()), "there": (Kept(), Kept())}
    for answer in (found, np.append(found, 12), np.append(found[:3], 5)):
        here = torch.randn(3, SMALL, generator=torch.Generator().manual_seed(0)) * 3
        there = here.clone().to(device)
        for logits, (first, second) in ((here, kept["cpu"]), (there, kept["there"])):
            allowing = History(asked, answer, Bits({3, 8, 20}), kept=second)
            assert apply_rules(logits, [(0, params, History(asked, answer, kept=first)), (2, params, allowing)]) == {}
        torch.testing.assert_close(there.cpu(), here, rtol=1e-6, atol=0.0)


def test_a_matcher_that_fails_fails_its_row_alone() -> None:
    """Outside the grammar or at its dead end, too. A wrong guess gets no mask: its tokens are dropped."""

    class Failing(Bits):
        def allowed(self, answer: NDArray[np.int32]) -> NDArray[np.uint8]:
            raise ValueError("too much work")

    class Wrong(Bits):
        def allowed(self, answer: NDArray[np.int32]) -> None:  # type: ignore[override]
            return None

    ids = np.zeros(1, dtype=np.int32)
    logits = torch.randn(5, SMALL)
    before = logits.clone()
    params = SamplingParams(1)
    histories = [
        History(ids, ids, matcher) for matcher in (Failing(set()), Wrong(set()), Wrong(set()), Bits({3}), Bits(set()))
    ]
    histories[2] = histories[2].guess([5])
    failed = apply_rules(logits, [(row, params, history) for row, history in enumerate(histories)])
    assert failed == {
        0: "too much work",
        1: "the answer so far does not match it",
        4: "nothing can follow the answer so far",
    }
    assert torch.equal(logits[:3], before[:3])
    assert torch.isfinite(logits[3]).nonzero().flatten().tolist() == [3]


def test_logprobs_are_those_of_the_logits() -> None:
    logits = torch.randn(3, SMALL)
    expected = torch.log_softmax(logits.double(), -1)
    told = token_logprobs(torch.log_softmax(logits[[0, 2]], -1), [5, None], [2, 0])
    one = told[0]
    assert one is not None
    assert told[1] is None
    assert one.logprob == pytest.approx(float(expected[0, 5]), rel=1e-5)
    best = torch.topk(expected[0], 2)
    assert [token for token, _ in one.top] == best.indices.tolist()
    assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), rel=1e-5)
    told = token_logprobs(torch.log_softmax(logits[[0, 2]], -1), [5, 7], [(9, 5, 2), 1])
    assert told[0] is not None and told[1] is not None
    assert [token for token, _ in told[0].top] == [5, 9, 2], "itself, then the listed ones"
    assert [value for _, value in told[0].top] == pytest.approx(expected[0, [5, 9, 2]].tolist(), rel=1e-5)
    assert len(told[1].top) == 1, "another row has the likeliest"
    (alone,) = token_logprobs(torch.log_softmax(logits[2:], -1), [7], [0])
    assert alone is not None and alone.top == ()


class Steering:
    """A matcher with a mask that is a hash of the whole answer: one wrong token changes all later tokens."""

    def allowed(self, answer: NDArray[np.int32]) -> NDArray[np.uint8]:
        generator = np.random.default_rng([len(answer), *answer.tolist()])
        return np.packbits(generator.random(VOCAB) < 0.3, bitorder="little")


RULES = [
    TokenRules(presence_penalty=1.5),
    TokenRules(frequency_penalty=0.7, presence_penalty=-0.5),
    TokenRules(repetition_penalty=1.6),
    TokenRules(logit_bias=((3, 6.0), (5, -100.0)), frequency_penalty=2.0),
    TokenRules(min_tokens=18, bad_words=((3,), (7, 9))),
    None,
]


def ruled_requests(name: str, **changes: Any) -> list[EngineRequest]:
    found = []
    for number, rules in enumerate(RULES):
        for temperature in (0.0, 1.1):
            how: dict[str, Any] = {"temperature": temperature, "rules": rules, "min_p": 0.05, "seed": number}
            how["stop_token_ids"] = (11, 12, 13, 14, 15, 16, 17)
            one = request(f"{name}{number}.{temperature}", prompt(21 + number, number), 24, **how)
            if number % 2 or rules is None:
                one = structs.replace(one, matcher=Steering())
            found.append(structs.replace(one, **changes))
    return found


def answers(engine: TorchEngine, requests: list[EngineRequest]) -> list[tuple[list[int], str]]:
    found = run_all(engine, requests)
    assert set(found.finish.values()) <= {"stop", "length"}, found.errors
    return [(found.tokens[one.request_id], found.finish[one.request_id]) for one in requests]


@pytest.fixture
def expected(make_engine: MakeEngine) -> list[tuple[list[int], str]]:
    engine = make_engine(enable_prefix_caching=False)
    found = [answers(engine, [one])[0] for one in ruled_requests("alone")]
    engine.stop()
    plain = [
        structs.replace(one, sampling=replace(one.sampling, rules=None), matcher=None)
        for one in ruled_requests("plain")
    ]
    assert sum(a != b for a, b in zip(found, answers(make_engine(), plain), strict=True)) >= 8, "rules change answers"
    return found


def test_rules_are_exact_in_batches_cached_preempted_and_resumed(
    make_engine: MakeEngine, expected: list[tuple[list[int], str]]
) -> None:
    """Alone == together == cached == preempted and restarted in a too small pool == continued elsewhere."""
    assert answers(make_engine(num_blocks=24), ruled_requests("small")) == expected
    engine = make_engine()
    assert answers(engine, ruled_requests("together")) == expected
    assert answers(engine, ruled_requests("cached")) == expected
    for cut in (1, 2, 7, 16):
        resumed, whole = [], []
        for one, (found, reason) in zip(ruled_requests(f"cut{cut}"), expected, strict=True):
            if len(found) > cut:
                ids = np.concatenate([one.token_ids, np.array(found[:cut], dtype=np.int32)])
                sampling = replace(one.sampling, max_tokens=one.sampling.max_tokens - cut)
                resumed.append(structs.replace(one, token_ids=ids, sampling=sampling, resumed_tokens=cut))
                whole.append((found[cut:], reason))
        assert answers(engine, resumed) == whole


def test_each_token_has_its_logprob(make_engine: MakeEngine) -> None:
    """There is one per token, from the raw logits, though rules chose among others."""
    sampling = {"rules": TokenRules(repetition_penalty=1.6), "logprobs": 3}
    found = run_all(make_engine(), [request("one", prompt(20), 24, **sampling)])
    tokens, told = found.tokens["one"], found.logprobs["one"]
    assert len(told) == len(tokens) == 24
    assert all(dict(one.top).get(token, one.logprob) == one.logprob for token, one in zip(tokens, told, strict=True))
    assert tokens != [one.top[0][0] for one in told], "a rule made another choice"
