"""vLLM's own sampler: rules and grammars are followed, an interrupted answer goes on, a broken model is an error."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from vllm.utils.system_utils import get_mp_context

from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import EngineRequest, TokenRules
from serve_app.engine.vllm.engine import VllmEngine
from serve_app.replica.engine_factory import make_engine
from serve_app.structured.compiler import GrammarCompiler, llguidance_form
from serve_app.structured.grammar import Grammar
from serve_app.structured.matcher import Matchers
from tests.serve_app.engine.tiny import request, run_all
from tests.vllm.engines import BLOCK, Both, both_engines, tokens_of


@pytest.fixture(scope="module", params=["plain", "drafts", "V2"])
def both(request: pytest.FixtureRequest, demo_model_path: Path) -> Iterator[Both]:
    """In float32, so that greedy tokens are those of the built-in engine. V2 is vLLM's runner on most GPUs."""
    drafts = {"speculative_model": "ngram", "num_speculative_tokens": 3} if request.param == "drafts" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)  # of an exact engine before
        if request.param == "V2":
            patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
            patch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "0")  # a function that the interpreter lacks
            patch.setenv("PYTHONPATH", str(Path(__file__).parent / "interpreted"), prepend=os.pathsep)
            patch.setattr("vllm.config.vllm.HAS_TRITON", True)
            patch.setattr("vllm.v1.engine.utils.get_mp_context", get_mp_context)  # of a new process
        with both_engines(demo_model_path, exact_resume="off", **drafts) as running:
            assert not running.vllm.settings.exact
            assert is_v2(running) == (request.param == "V2")
            yield running


def is_v2(both: Both) -> bool:
    return bool(both.vllm._frontend.llm.vllm_config.use_v2_model_runner)


def test_a_model_without_numbers_gives_an_error_and_no_text(demo_model_path: Path, tmp_path: Path) -> None:
    """vLLM alone would answer with its first token, again and again."""
    for file in demo_model_path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("norm.weight") and "layers" not in name)
    tensors[name] = torch.full_like(tensors[name], float("nan"))
    save_file(tensors, weights, metadata={"format": "pt"})
    config = AppConfig(
        engine="vllm", block_size=BLOCK, num_blocks=16, max_model_len=256, enforce_eager=True, max_num_seqs=4,
        max_num_batched_tokens=256, exact_resume="off",
    )  # fmt: skip
    engine = make_engine(config, load_checkpoint_info(tmp_path), lambda _: None)
    assert isinstance(engine, VllmEngine)
    engine.start()
    try:
        found = run_all(engine, [request("r", range(40), 8), request("s", range(50), 8, temperature=1.0)])
    finally:
        engine.stop()
    assert found.finish == {"r": "error", "s": "error"}
    assert set(found.errors.values()) == {"the model's logits are not numbers"}
    assert not any(found.tokens.values())


MANY = tuple((5, 5, end) for end in range(700))
RULES: dict[str, TokenRules | None] = {
    "none": None,
    "penalties": TokenRules(1.0, 0.5, 1.3),
    "bias": TokenRules(logit_bias=((5, 100.0), (6, 99.0)), bad_words=((5, 5, 5),)),
    "allowed": TokenRules(0.5, allowed=(5, 6, 7, 90)),
    "many words": TokenRules(logit_bias=((5, 100.0), (6, 99.0)), bad_words=MANY),
}
"""The last one has more than vLLM's V2 runner has space for."""


def resumed(ids: Any, asked: EngineRequest, tokens: list[int]) -> EngineRequest:
    """Return a request that goes on after the first ``tokens`` of an answer, as an ingress sends it."""
    after = np.concatenate([ids, np.array(tokens, dtype=np.int32)])
    sampling = replace(asked.sampling, max_tokens=asked.sampling.max_tokens - len(tokens))
    name = f"{asked.request_id} after {len(tokens)}"
    return structs.replace(asked, request_id=name, token_ids=after, sampling=sampling, resumed_tokens=len(tokens))


def test_greedy_tokens_under_rules_are_the_built_in_engines_from_any_place(both: Both) -> None:
    """Penalties count the interrupted answer's tokens, and none of them twice."""
    ids = np.resize(both.prompt(7), 90)
    asked = [request(name, ids, 24, rules=rules) for name, rules in RULES.items()]
    if is_v2(both):
        asked.pop()  # Triton's interpreter cannot run vLLM's kernel for masks
    wanted = run_all(both.torch, asked).tokens
    assert run_all(both.vllm, asked).tokens == wanted
    later = [resumed(ids, one, wanted[one.request_id][:count]) for one in asked for count in (1, 10, 23)]
    found = run_all(both.vllm, later).tokens
    for one in later:
        name, _, count = one.request_id.partition(" after ")
        assert found[one.request_id] == wanted[name][int(count) :], one.request_id


def test_a_seed_draws_the_same_again_and_goes_on_after_a_break(both: Both) -> None:
    """The rest depends on the seed and the place alone, and does not repeat the beginning's draws."""
    ids = both.prompt(600, seed=3)  # of several steps
    asked = request("seeded", ids, 24, temperature=1.0, seed=7)
    first, again, other = (
        run_all(both.vllm, [structs.replace(asked, request_id=name, sampling=replace(asked.sampling, seed=seed))])
        for name, seed in (("first", 7), ("again", 7), ("other", 8))
    )
    tokens = first.tokens["first"]
    assert tokens == again.tokens["again"] != other.tokens["other"]
    rests = [run_all(both.vllm, [resumed(ids, asked, tokens[:8])]).tokens["seeded after 8"] for _ in range(2)]
    assert rests[0] == rests[1]
    assert len(rests[0]) == 16
    assert rests[0] != tokens[:16]
    begun = np.concatenate([ids, tokens[:8]])
    anew = tokens_of(both.vllm, "new", begun, max_tokens=16, temperature=1.0, seed=7)
    if is_v2(both):
        assert rests[0] == anew == tokens[8:], "it draws by seed and position itself"
    else:
        assert rests[0] != anew


def test_sampling_without_a_seed_is_vllms(both: Both) -> None:
    """Two answers differ, and top-k and min-p are kept to."""
    ids = both.prompt(60, seed=4)
    best = tokens_of(both.vllm, "greedy", ids, max_tokens=1)
    filters = [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}]
    for filtered in filters[:2] if is_v2(both) else filters:  # Triton's interpreter lacks part of the last
        assert tokens_of(both.vllm, "one", ids, max_tokens=1, temperature=1.5, seeded=False, **filtered) == best
    one, two = (tokens_of(both.vllm, name, ids, max_tokens=24, temperature=1.0, seeded=False) for name in "ab")
    assert one != two


def test_an_interrupted_answer_has_the_length_that_was_asked_for(both: Both) -> None:
    """``max_tokens`` and ``min_tokens`` count all of it, and stop tokens end it."""
    ids = both.prompt(70, seed=5)
    whole = request("whole", ids, 12)
    tokens = run_all(both.vllm, [whole]).tokens["whole"]
    rest = run_all(both.vllm, [resumed(ids, whole, tokens[:5])])
    assert rest.tokens["whole after 5"] == tokens[5:]
    assert rest.finish == {"whole after 5": "length"}
    stop = tokens[5]
    at = tokens.index(stop)
    late = request("late", ids, 12, stop_token_ids=(stop,), rules=TokenRules(min_tokens=at + 2))
    expected = run_all(both.torch, [late]).tokens["late"]
    assert run_all(both.vllm, [late]).tokens["late"] == expected
    assert run_all(both.vllm, [resumed(ids, late, expected[:at])]).tokens[f"late after {at}"] == expected[at:]


def test_the_last_token_alone_goes_on(both: Both) -> None:
    """An answer that was interrupted before its last token, on a prompt of whole blocks."""
    ids = both.prompt(2 * BLOCK, seed=6)
    asked = request("r", ids, 6)
    tokens = run_all(both.vllm, [asked]).tokens["r"]
    assert run_all(both.vllm, [resumed(ids, asked, tokens[:5])]).tokens["r after 5"] == tokens[5:]


def test_grammars_are_followed_from_any_place(both: Both) -> None:
    """Also with rules that would leave no token: then the grammar counts alone. A mismatch is the client's error."""
    if is_v2(both):
        pytest.skip("Triton's interpreter cannot run vLLM's kernel for grammars; a GPU can")
    matchers = Matchers(GrammarCompiler(both.info.path, both.info.vocab_size, both.info.eos_token_ids))
    text = llguidance_form(Grammar.regex(r"(red|green|blue)(, (red|green|blue)){3}", "regex"))
    ends, ids = both.info.eos_token_ids, both.prompt(50)
    kinds: dict[str, Any] = {
        "greedy": {},
        "seeded": {"temperature": 1.0, "seed": 4},
        "endless": {"rules": TokenRules(min_tokens=40)},
        "banned": {"rules": TokenRules(allowed=(1,), bad_words=((1,),))},
    }

    def asked(name: str, **sampling: Any) -> EngineRequest:
        wanted = request(name, ids, 40, stop_token_ids=ends, **sampling)
        return structs.replace(wanted, matcher=matchers.matcher(text))

    found = run_all(both.vllm, [asked(name, **sampling) for name, sampling in kinds.items()])
    assert set(found.finish.values()) == {"stop"}
    from transformers import AutoTokenizer

    decode = AutoTokenizer.from_pretrained(both.info.path).decode
    for tokens in found.tokens.values():
        assert set(decode(tokens).split(", ")) <= {"red", "green", "blue"}
        assert len(decode(tokens).split(", ")) == 4
    greedy = run_all(both.torch, [asked("greedy")]).tokens["greedy"]
    assert found.tokens["greedy"] == greedy
    rest = run_all(both.vllm, [resumed(ids, asked("greedy"), greedy[:3])])
    assert rest.tokens["greedy after 3"] == greedy[3:]
    wrong = run_all(both.vllm, [resumed(ids, asked("wrong"), ids[:3].tolist()), request("d", ids)])
    assert wrong.finish == {"wrong after 3": "error", "d": "length"}
    assert "the answer so far does not match" in wrong.errors["wrong after 3"]


def test_logprobs_are_of_the_models_own_logits(both: Both) -> None:
    """As many as tokens, listed ones beside the likeliest, with drafts and rules."""
    ids, rules = np.resize(both.prompt(7), 60), TokenRules(logit_bias=((5, 100.0),))
    kinds: dict[str, Any] = {"likeliest": (3, ()), "listed": (0, (9, 8, 7)), "own": (0, ()), "none": (None, ())}
    asked = [
        request(name, ids, 12, logprobs=logprobs, logprob_token_ids=listed, rules=rules)
        for name, (logprobs, listed) in kinds.items()
    ]
    theirs, ours = (run_all(engine, asked).logprobs for engine in (both.vllm, both.torch))
    for name, expected in ours.items():
        told = theirs[name]
        assert len(told) == len(expected) == (0 if name == "none" else 12)
        for one, other in zip(told, expected, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-3)
