"""Rows of a vLLM batch get the tokens that the built-in engine chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.engine.protocol import SamplingParams, TokenRules
from serve_app.engine.vllm.sampling.row_sampler import NOT_NUMBERS, RowSampler
from serve_app.engine.vllm.sampling.token_choice import TokenChoice, choice_of
from serve_app.structured.compiler import GrammarCompiler, llguidance_form
from serve_app.structured.grammar import Grammar
from serve_app.structured.matcher import Matchers
from tests.serve_app.conftest import MakeEngine
from tests.serve_app.engine.tiny import VOCAB, request, run_all

PROMPT = tuple(range(40))


@pytest.fixture
def sampler(demo_model_path: Path) -> RowSampler:
    info = load_checkpoint_info(demo_model_path)
    return RowSampler(Matchers(GrammarCompiler(info.path, info.vocab_size, info.eos_token_ids)))


def logits_of(tokens: list[int], model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0, -1].float()
    return found


ASKED = {
    "seeded": SamplingParams(12, seed=7),
    "filtered": SamplingParams(12, temperature=0.7, top_k=20, top_p=0.9, seed=3),
    "min_p": SamplingParams(12, min_p=0.1, seed=2**64 + 5),
    "penalties": SamplingParams(12, seed=1, rules=TokenRules(1.5, 0.5, 1.3)),
    "bans": SamplingParams(
        12, temperature=0.0, rules=TokenRules(logit_bias=((5, 9.0), (6, -50.0)), bad_words=((5, 5),))
    ),
    "at least": SamplingParams(12, seed=4, stop_token_ids=tuple(range(100)), rules=TokenRules(min_tokens=6)),
}


@pytest.mark.parametrize("resumed", [0, 5])
def test_the_same_tokens_as_the_built_in_engine(
    resumed: int, sampler: RowSampler, make_engine: MakeEngine, checkpoints: dict[str, Path]
) -> None:
    """All kinds of rules in one batch, from the start and after tokens of another replica."""
    from transformers import AutoModelForCausalLM

    engine = make_engine()
    wanted = run_all(engine, [replace(request(name, PROMPT), sampling=asked) for name, asked in ASKED.items()])
    model = AutoModelForCausalLM.from_pretrained(checkpoints["qwen3"])
    outputs: dict[str, list[int]] = {}
    for index, (name, asked) in enumerate(ASKED.items()):
        begun = wanted.tokens[name][:resumed]
        asking = replace(
            request(name, [*PROMPT, *begun]),
            sampling=replace(asked, max_tokens=12 - resumed),
            resumed_tokens=len(begun),
        )
        choice = choice_of(asking, "")
        assert choice is not None
        outputs[name] = []
        sampler.rows[index] = sampler.new_row(choice, [*PROMPT, *begun], outputs[name])
    for _ in range(12 - resumed):
        rows = [logits_of([*PROMPT, *wanted.tokens[name][:resumed], *outputs[name]], model) for name in ASKED]
        chosen = sampler.apply(torch.stack(rows)).argmax(dim=-1).tolist()
        for name, token in zip(ASKED, chosen, strict=True):
            outputs[name].append(token)
    for name in ASKED:
        whole = wanted.tokens[name][:resumed] + outputs[name]
        assert whole[: len(wanted.tokens[name])] == wanted.tokens[name], name


def test_a_grammar_is_followed(sampler: RowSampler, tmp_path: Path, demo_model_path: Path) -> None:
    """Only what matches is left, also where another replica began the answer; what does not match is a failure."""
    info = load_checkpoint_info(demo_model_path)
    text = llguidance_form(Grammar.choice(["yes", "no"], "choice"))
    tokens: list[int] = []
    params = SamplingParams(8, seed=1, stop_token_ids=info.eos_token_ids)
    choice = TokenChoice(params, 0, text, str(tmp_path / "failed"))
    sampler.rows[0] = sampler.new_row(choice, PROMPT, tokens)
    while not tokens or tokens[-1] not in info.eos_token_ids:
        tokens.append(int(sampler.apply(torch.zeros(1, info.vocab_size)).argmax()))
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(demo_model_path).decode(tokens[:-1]) in ("yes", "no")
    resumed = replace_choice(choice, 1)
    sampler.rows[0] = sampler.new_row(resumed, [*PROMPT, tokens[0]], [])
    again = int(sampler.apply(torch.zeros(1, info.vocab_size)).argmax())
    matcher = Matchers(GrammarCompiler(info.path, info.vocab_size, info.eos_token_ids)).matcher(text)
    mask = matcher.allowed(np.array(tokens[:1], dtype=np.int32))
    assert mask is not None
    assert np.unpackbits(mask, bitorder="little")[again]
    sampler.rows[0] = sampler.new_row(resumed, [*PROMPT, *info.eos_token_ids[:1]], [])
    sampler.apply(torch.zeros(1, info.vocab_size))
    assert "does not match" in (tmp_path / "failed").read_text()


def replace_choice(choice: TokenChoice, resumed: int) -> TokenChoice:
    return TokenChoice(choice.sampling, resumed, choice.grammar, choice.failure_file)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_numbers_fails_alone(temperature: float, sampler: RowSampler, tmp_path: Path) -> None:
    """The file is there when its token is; the first reason stays, and rows beside it get what they would."""
    params = SamplingParams(4, temperature, seed=9, stop_token_ids=(17,))
    for index, name in enumerate(("broken", "fine")):
        sampler.rows[index] = sampler.new_row(TokenChoice(params, 0, "", str(tmp_path / name)), PROMPT, [])
    logits = torch.zeros(3, VOCAB)
    alone = sampler.apply(logits.clone())[1].argmax()
    (tmp_path / "broken").unlink(missing_ok=True)
    logits[0, 3] = float("nan")
    logits[2, 5] = 1.0
    found = sampler.apply(logits)
    assert found.argmax(dim=-1).tolist() == [17, int(alone), 5]
    assert (tmp_path / "broken").read_text() == NOT_NUMBERS
    assert not (tmp_path / "fine").exists()
    assert found[2].tolist() == [0.0] * 5 + [1.0] + [0.0] * (VOCAB - 6)
    sampler.apply(torch.full((3, VOCAB), float("nan")))
    assert (tmp_path / "broken").read_text() == NOT_NUMBERS
