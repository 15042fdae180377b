"""Both engines on a GPU in bfloat16: hits, tenants, copies of KV, seeds, rules, adapters. One vLLM serves all tests."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from router.protocol.block_hash import PrefixScope, split_chain
from serve_app.engine.protocol import EngineRequest, Save, TokenRules
from serve_app.engine.runner.sampling import gumbel_noise
from serve_app.structured.compiler import GrammarCompiler, llguidance_form
from serve_app.structured.grammar import Grammar
from serve_app.structured.matcher import Matchers
from tests.harness.eventually import eventually
from tests.serve_app.engine.adapters import described, save_random_adapter
from tests.serve_app.engine.tiny import SCOPE, Collector, request, run_all
from tests.vllm.engines import Both, mispredicted, outputs_of, prefix_of, reset

SAMPLED: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 1.0, "seed": 7}}


@pytest.fixture(params=["vllm", "torch"])
def engine(request: pytest.FixtureRequest, both: Both) -> Any:
    """Each engine in turn."""
    return getattr(both, request.param)


def known(both: Both, engine: Any, ids: Any, scope: PrefixScope = SCOPE) -> int:
    """Return how many tokens of a prompt an engine holds by its own word, at most all but the last."""
    size = both.block_size
    return size * engine.cached_blocks(prefix_of(ids, scope, size).chain, (len(ids) - 1) // size)


@pytest.mark.parametrize("how", SAMPLED)
def test_a_warm_answer_is_as_the_cold_one_and_its_hit_was_predicted(how: str, both: Both, engine: Any) -> None:
    """Also continued from every place in the middle, where the same seed goes on."""
    ids, asked = both.prompt(505, seed=10 + list(SAMPLED).index(how)), SAMPLED[how]
    whole = 504 // both.block_size * both.block_size
    assert known(both, engine, ids) == 0
    cold = answer_of(engine, ids, **asked)
    assert cold.cached == [0]
    eventually(lambda: known(both, engine, ids) == whole)
    warm = answer_of(engine, ids, 1, **asked)
    again = chosen_after(engine, ids, cold.tokens, **asked)
    assert warm.cached == again.cached[:1] == [whole]
    assert min(again.cached) == whole
    assert alike(cold, again)


@pytest.mark.parametrize("how", SAMPLED)
def test_the_engines_choose_alike(how: str, both: Both) -> None:
    """Over prompts of one step and of several. After another prompt they do not, so the comparison can fail."""
    for tokens in (40, 300, 1000):
        ids, asked = both.prompt(tokens, seed=tokens), SAMPLED[how]
        wanted = answer_of(both.torch, ids, **asked)
        assert alike(wanted, chosen_after(both.vllm, ids, wanted.tokens, **asked))
        assert not alike(wanted, chosen_after(both.vllm, both.prompt(tokens, seed=1), wanted.tokens, **asked))


def test_the_directory_predicts_the_delivered_tokens(both: Both) -> None:
    """Conversations of two tenants grow in a pool that evicts; each request gets its predicted hit."""
    wrong, hits = mispredicted(both, 60)
    assert hits > 15
    assert wrong == []


def test_tenants_share_nothing(both: Both, engine: Any) -> None:
    """The same prompt is computed once for each, and then cached for each."""
    ids = both.prompt(200, seed=20)
    scopes = [PrefixScope("tiny", salt=salt) for salt in (b"one", b"two")]
    for number, scope in enumerate((*scopes, *scopes)):
        held = known(both, engine, ids, scope)
        assert (held > 0) == (number >= 2)
        assert answer_of(engine, ids, 1, scope=scope).cached == [held]
        eventually(lambda scope=scope: known(both, engine, ids, scope) == 192)


@pytest.mark.parametrize("with_adapter", [False, True])
def test_kv_that_left_and_came_back_has_the_same_bytes(
    with_adapter: bool, both: Both, engine: Any, demo_model_path: Path, tmp_path: Path
) -> None:
    """It is imported in two parts and read like computed KV."""
    scope, ids, size = SCOPE, both.prompt(993, seed=30), both.block_size
    if with_adapter:
        spec, scope = described(save_random_adapter(demo_model_path, tmp_path / "kv", 5, ("q_proj", "v_proj")), "kv")
        engine.adapters.load(spec)
    prefix, half, end = prefix_of(ids, scope, size), 496 // size, 992 // size
    cold = answer_of(engine, ids, scope=scope)
    eventually(lambda: known(both, engine, ids, scope) == 992)
    parts = [engine.transfer.export_prefix(prefix, first, most) for first, most in ((0, half), (half, end - half))]
    assert [part.header.blocks for part in parts] == [half, end - half]
    assert len({bytes(row) for part in parts for row in part.payload}) == end, "no two blocks are equal"
    eventually(engine.reset_prefix_cache)
    assert known(both, engine, ids, scope) == 0
    assert engine.transfer.import_part(parts[0], prefix, 0) == half
    assert engine.transfer.import_part(parts[1], prefix, half) == end
    warm = chosen_after(engine, ids, cold.tokens, scope=scope)
    assert set(warm.cached) == {992}
    assert alike(cold, warm)
    back = engine.transfer.export_prefix(prefix)
    assert np.array_equal(back.payload[:end], np.concatenate([part.payload for part in parts]))
    if engine is both.vllm:
        eventually(lambda: set(split_chain(prefix.chain)) <= both.heard.held())
        reset(both)
        assert not list(both.vllm._endpoints.directory.glob("kv-[0-9]*"))


def test_adapters_change_answers_and_share_no_kv(both: Both, demo_model_path: Path, tmp_path: Path) -> None:
    """Base and two adapters, in one batch, are computed alike by both engines."""
    seeded = SAMPLED["seeded"]
    scopes, ids = [PrefixScope("tiny")], both.prompt(200, seed=40)
    for seed, name in enumerate(("one", "two")):
        path = save_random_adapter(demo_model_path, tmp_path / name, seed, ("q_proj", "v_proj", "up_proj"))
        spec, scope = described(path, name)
        both.vllm.adapters.load(spec)
        both.torch.adapters.load(spec)
        scopes.append(scope)
    asked = [request(f"r{i}", ids, scope=scope, max_tokens=16, logprobs=0, **seeded) for i, scope in enumerate(scopes)]
    together = answers(both.vllm, asked)
    assert [answer.cached for answer in together] == [[0]] * 3
    assert [answer.cached for answer in answers(both.vllm, asked)] == [[192]] * 3
    for number, (scope, answer) in enumerate(zip(scopes, together, strict=True)):
        assert known(both, both.torch, ids, scope) == 0
        assert alike(answer, chosen_after(both.torch, ids, answer.tokens, scope=scope, **seeded))
        assert alike(answer, chosen_after(both.vllm, ids, answer.tokens, scope=scope, **seeded))
        other = scopes[(number + 1) % 3]
        assert not alike(answer, chosen_after(both.vllm, ids, answer.tokens, scope=other, **seeded)), "no effect"


def test_rules_are_followed(both: Both, engine: Any) -> None:
    """A bias so strong that rounding does not matter, a ban against it, and penalties, beside plain requests."""
    rules = TokenRules(0.5, 0.25, 1.1, logit_bias=((5, 1000.0), (6, 500.0)), bad_words=((5, 5),))
    ids = both.prompt(60, seed=50)
    ruled = [request(name, ids, 12, rules=rules, **asked) for name, asked in SAMPLED.items()]
    plain = [request(f"plain {name}", ids, 12, top_k=20, top_p=0.9, **asked) for name, asked in SAMPLED.items()]
    found = run_all(engine, [*ruled, *plain])
    assert [found.tokens[name] for name in SAMPLED] == [[5, 6] * 6] * 2
    assert set(found.finish.values()) == {"length"}


def test_answers_end_where_their_grammar_does(both: Both, engine: Any) -> None:
    """Asynchronous steps may go on after the end: that is no error."""
    matchers = Matchers(GrammarCompiler(both.info.path, both.info.vocab_size, both.info.eos_token_ids))
    text = llguidance_form(Grammar.regex(r"(red|green|blue)(, (red|green|blue)){1,3}", "regex"))
    ends = both.info.eos_token_ids
    plain = [
        request(f"r{i}", both.prompt(50, seed=60 + i), 60, temperature=1.0, seed=i, stop_token_ids=ends)
        for i in range(4)
    ]
    asked = [structs.replace(item, matcher=matchers.matcher(text)) for item in plain]
    found = run_all(engine, asked)
    assert found.finish == {f"r{i}": "stop" for i in range(4)}, found.errors
    for tokens in found.tokens.values():
        assert matchers.matcher(text).allowed(np.array(tokens, dtype=np.int32)) is not None


def test_cancelling_frees_blocks(both: Both, engine: Any) -> None:
    """While a block is in use nothing is forgotten; a cancelled prompt can be hit; after a reset nothing can."""
    ids, collector = both.prompt(205, seed=70), Collector()
    whole = 204 // both.block_size * both.block_size
    engine.submit(request("long", ids, 1500), collector)
    collector.wait_tokens("long", 3, 120)
    assert not engine.reset_prefix_cache()
    engine.cancel("long")
    collector.wait(["long"])
    assert collector.finish["long"] == "cancelled"
    assert answer_of(engine, ids, 1).cached == [whole]
    eventually(engine.reset_prefix_cache)
    assert engine.load().running_sequences == 0
    assert answer_of(engine, ids, 1).cached == [0]


def test_a_save_survives_floods(both: Both) -> None:
    ids = both.prompt(8 * both.block_size + 1, seed=80)
    saved = structs.replace(request("saved", ids, 1), saves=(Save(b"s" * 16, 8 * both.block_size),))
    first = outputs_of(both.vllm, saved)[0].first
    assert first is not None and first.save is not None and first.save.outcome == "saved"
    run_all(both.vllm, [request(f"f{i}", both.prompt(900, seed=810 + i), 1) for i in range(5)])
    assert answer_of(both.vllm, ids, 1).cached == [8 * both.block_size]
    reset(both)


def test_the_reported_speed_is_the_machines(both: Both, engine: Any) -> None:
    """Routers weigh computing against waiting by it. A step may not be timed before it begins, nor after its end."""
    run_all(
        engine, [request(f"w{i}", both.prompt(1900, seed=900 + i), 1) for i in range(20)]
    )  # forgets slow beginnings
    begun_s = time.monotonic()
    for number in range(8):
        run_all(engine, [request("r", both.prompt(1900, seed=920 + number), 1)])
    seen_tokens_per_s = 8 * 1900 / (time.monotonic() - begun_s)
    reported = engine.load().prefill_tokens_per_s
    print(f"reported {reported:.0f} tokens/s, seen {seen_tokens_per_s:.0f}")
    assert seen_tokens_per_s / 4 < reported < 4 * seen_tokens_per_s


MEAN, MOST, EQUAL = 0.25, 1.0, 1 / 3
"""Limits for the demo model: mean and largest difference, and the least part of equal tokens.

On a CPU, two ways to compute in bfloat16 differ by 0.02 to 0.09 in the mean, and bfloat16 from float32 by 0.14 at most.
After another prompt it is 0.6 or more at temperature 1. Greedily it is 0.2, but then no token is equal; of the right
ones more than half are.
"""


@dataclass(frozen=True)
class Answer:
    """``sums[i]``: of ``tokens[i]``; ``cached``: the cached tokens of each request."""

    tokens: list[int]
    sums: list[float]
    cached: list[int]


def answers(engine: Any, asked: Sequence[EngineRequest]) -> list[Answer]:
    """Let an engine answer at once requests that want logprobs."""
    found = run_all(engine, asked)
    made = []
    for item in asked:
        name = item.request_id
        tokens, told = found.tokens[name], found.logprobs[name]
        sums = [_sum(item, i, token, each.logprob) for i, (token, each) in enumerate(zip(tokens, told, strict=True))]
        made.append(Answer(tokens, sums, [found.cached[name]]))
    return made


def answer_of(engine: Any, ids: Any, max_tokens: int = 16, **asked: Any) -> Answer:
    """Let an engine answer; ``asked``: more arguments of ``request``."""
    return answers(engine, [request("answer", ids, max_tokens, logprobs=0, **asked)])[0]


def chosen_after(engine: Any, ids: Any, begun: Sequence[int], **asked: Any) -> Answer:
    """Let an engine choose a token after each beginning of the answer ``begun``, all at once."""
    texts = [np.concatenate([ids, np.array(begun[:end], dtype=np.int32)]) for end in range(len(begun))]
    each = answers(engine, [request(f"{i}", text, 1, logprobs=0, **asked) for i, text in enumerate(texts)])
    tokens, sums = [one.tokens[0] for one in each], [one.sums[0] for one in each]
    return Answer(tokens, sums, [one.cached[0] for one in each])


def alike(wanted: Answer, found: Answer) -> bool:
    """Return whether two answers, chosen after the same beginnings, differ by no more than rounding."""
    gaps = np.abs(np.array(wanted.sums) - np.array(found.sums))
    equal = float(np.mean(np.array(wanted.tokens) == np.array(found.tokens)))
    print(f"differences: mean {gaps.mean():.3f}, most {gaps.max():.3f}; equal tokens {equal:.2f}")  # of a failed test
    return bool(gaps.mean() <= MEAN and gaps.max() <= MOST and equal >= EQUAL)


def _sum(item: EngineRequest, generated: int, token: int, logprob: float) -> float:
    sampling = item.sampling
    if sampling.greedy:
        return logprob
    noise = gumbel_noise([sampling.seed], [len(item.token_ids) + generated], 1, torch.device("cpu"), first=token)
    return logprob / sampling.temperature + float(noise[0, 0])
