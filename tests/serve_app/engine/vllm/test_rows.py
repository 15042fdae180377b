"""Rows of a vLLM batch get the tokens that the built-in engine chooses, and all the data for it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.engine.protocol import SamplingParams, TokenRules
from serve_app.engine.vllm.sampling.rows import (
    NOT_NUMBERS,
    SamplingRow,
    TokenChoice,
    choice_of,
    choose_rows,
    vllm_sampling,
)
from serve_app.structured.compiler import GrammarCompiler, llguidance_form
from serve_app.structured.grammar import Grammar
from serve_app.structured.matcher import Matchers
from tests.serve_app.conftest import MakeEngine
from tests.serve_app.engine.tiny import VOCAB, prompt, request, run_all

PROMPT = tuple(range(40))


@pytest.fixture
def matchers(demo_model_path: Path) -> Matchers:
    info = load_checkpoint_info(demo_model_path)
    return Matchers(GrammarCompiler(info.path, info.vocab_size, info.eos_token_ids))


def sample(rows: dict[int, SamplingRow], logits: torch.Tensor) -> list[int]:
    return [token for (token,) in choose_rows(rows, logits, [()] * len(logits))]


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
    resumed: int, matchers: Matchers, make_engine: MakeEngine, checkpoints: dict[str, Path]
) -> None:
    """All kinds of rules are in one batch, from the start and after tokens of another replica."""
    from transformers import AutoModelForCausalLM

    engine = make_engine()
    wanted = run_all(engine, [structs.replace(request(name, PROMPT), sampling=asked) for name, asked in ASKED.items()])
    model = AutoModelForCausalLM.from_pretrained(checkpoints["qwen3"])
    texts = {name: [*PROMPT, *wanted.tokens[name][:resumed]] for name in ASKED}
    outputs: dict[str, list[int]] = {name: [] for name in ASKED}
    rows: dict[int, SamplingRow] = {}
    for index, (name, asked) in enumerate(ASKED.items()):
        sampling = replace(asked, max_tokens=12 - resumed)
        asking = structs.replace(
            request(name, texts[name]), sampling=sampling, resumed_tokens=len(texts[name]) - len(PROMPT)
        )
        rows[index] = SamplingRow(choice_of(asking, ""), texts[name], outputs[name], matchers)
    for _ in range(12 - resumed):
        with torch.no_grad():
            ids = torch.tensor([[*texts[name], *outputs[name]] for name in ASKED])
            logits = model(ids).logits[:, -1].float()
        for name, token in zip(ASKED, sample(rows, logits), strict=True):
            outputs[name].append(token)
    for name in ASKED:
        whole = [*texts[name], *outputs[name]][len(PROMPT) :]
        assert whole[: len(wanted.tokens[name])] == wanted.tokens[name], name


def test_a_grammar_is_followed(matchers: Matchers, tmp_path: Path, demo_model_path: Path) -> None:
    """Only matching tokens remain, also after another replica's beginning; a mismatch is a failure."""
    info = load_checkpoint_info(demo_model_path)
    text = llguidance_form(Grammar.choice(["yes", "no"], "choice"))
    tokens: list[int] = []
    params = SamplingParams(8, seed=1, stop_token_ids=info.eos_token_ids)

    def next_token(prompt: Sequence[int], resumed: int, output: list[int]) -> int:
        choice = TokenChoice(params, resumed, text, str(tmp_path / "failed"))
        return sample({0: SamplingRow(choice, prompt, output, matchers)}, torch.zeros(1, info.vocab_size))[0]

    while not tokens or tokens[-1] not in info.eos_token_ids:
        tokens.append(next_token(PROMPT, 0, tokens))
    next_token(PROMPT, 0, tokens)
    assert not (tmp_path / "failed").exists(), "vLLM may compute one step more before it knows of the end"
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(demo_model_path).decode(tokens[:-1]) in ("yes", "no")
    again = next_token([*PROMPT, tokens[0]], 1, [])
    mask = matchers.matcher(text).allowed(np.array(tokens[:1], dtype=np.int32))
    assert mask is not None
    assert np.unpackbits(mask, bitorder="little")[again]
    next_token([*PROMPT, *info.eos_token_ids[:1]], 1, [])
    assert "does not match" in (tmp_path / "failed").read_text()


DRAFTED = {
    **ASKED,
    "greedy": SamplingParams(12, temperature=0.0),
    "words": SamplingParams(12, 0.0, rules=TokenRules(logit_bias=((5, 9.0), (6, 8.0)), bad_words=((5, 5), (6, 6)))),
}


@settings(max_examples=150)
@given(st.lists(st.sampled_from(sorted(DRAFTED)), min_size=1, max_size=5), st.integers(0, 99), st.data())
def test_drafts_change_no_token(names: list[str], seed: int, data: st.DataObject) -> None:
    """With right, wrong or padded drafts, an answer equals that of one token per step."""
    matchers: Any = None

    def logits_of(text: Sequence[int]) -> torch.Tensor:
        return torch.randn(150, generator=torch.Generator().manual_seed(seed + sum(text[-2:]))) * 2

    def row(name: str, output: list[int]) -> SamplingRow:
        return SamplingRow(TokenChoice(DRAFTED[name], 0, "", ""), PROMPT, output, matchers)

    wanted: list[list[int]] = [[] for _ in names]
    for name, output in zip(names, wanted, strict=True):
        for _ in range(6):
            output += sample({0: row(name, output)}, logits_of([*PROMPT, *output])[None])
    outputs: list[list[int]] = [[] for _ in names]
    rows = {i: row(name, outputs[i]) for i, name in enumerate(names)}
    while min(map(len, outputs)) < 6:
        drafts = [
            [right if data.draw(st.booleans()) else data.draw(st.integers(-1, 149)) for right in answer[len(output) :]]
            for answer, output in zip(wanted, outputs, strict=True)
        ]
        both = list(zip(outputs, drafts, strict=True))
        texts = [[*PROMPT, *output, *guess[:end]] for output, guess in both for end in range(len(guess) + 1)]
        answers = choose_rows(rows, torch.stack([logits_of(text) for text in texts]), drafts)
        for (output, guess), answer in zip(both, answers, strict=True):
            right = len(answer) - 1
            assert answer[:right] == guess[:right]
            assert right == len(guess) or answer[right] != guess[right]
            output += answer
    assert [output[:6] for output in outputs] == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_numbers_fails_alone(temperature: float, matchers: Matchers, tmp_path: Path) -> None:
    """The file exists with its token; the first reason stays, and other rows get their usual tokens."""
    params = SamplingParams(4, temperature, seed=9, stop_token_ids=(17,))
    rows = {
        index: SamplingRow(TokenChoice(params, 0, "", str(tmp_path / name)), PROMPT, [], matchers)
        for index, name in enumerate(("broken", "fine"))
    }
    logits = torch.zeros(3, VOCAB)
    _, alone, _ = sample(rows, logits.clone())
    assert not list(tmp_path.iterdir())
    logits[0, 3] = float("nan")
    logits[2, 5] = 1.0
    assert sample(rows, logits) == [17, alone, 5]
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("broken", NOT_NUMBERS)]
    assert logits[2].tolist() == [0.0] * 5 + [1.0] + [0.0] * (VOCAB - 6)
    (tmp_path / "broken").write_text("the first reason")
    sample(rows, torch.full((3, VOCAB), float("nan")))
    assert (tmp_path / "broken").read_text() == "the first reason"


@pytest.mark.parametrize("sampling", [*ASKED.values(), SamplingParams(0, stop_token_ids=(7,), logprobs=3, seed=-5)])
def test_everything_crosses_to_the_worker(sampling: SamplingParams) -> None:
    """The processor reads from the message exactly the request, except for irrelevant bits of the seed."""
    choice = choice_of(structs.replace(request("r", prompt(5)), sampling=sampling, resumed_tokens=2), "/file")
    fields = vllm_sampling(sampling, choice, {"other": 1})
    assert (fields["temperature"], fields["max_tokens"]) == (0.0, max(1, sampling.max_tokens))
    assert (fields["stop_token_ids"], fields["logprobs"]) == (list(sampling.stop_token_ids), sampling.logprobs)
    arrived = TokenChoice.from_extra_args(msgspec.msgpack.decode(msgspec.msgpack.encode(fields["extra_args"])))
    assert arrived == TokenChoice(replace(sampling, seed=sampling.seed % 2**64), 2, "", "/file")


def test_the_worker_compiles_a_grammar_for_its_tenant(matchers: Matchers) -> None:
    """The tenant crosses to the worker, whose rows share no compiled grammar between tenants."""
    text = llguidance_form(Grammar.choice(["yes", "no"], "choice"))
    for tenant in ("a", "b", "a"):
        asked = structs.replace(request("r", prompt(5)), matcher=matchers.matcher(text, tenant))
        choice = TokenChoice.from_extra_args(choice_of(asked, "/file").to_extra_args())
        assert choice is not None
        assert choice.tenant == tenant
        SamplingRow(choice, PROMPT, [], matchers)
    assert matchers._compiled.cache_info().currsize == 2


def test_a_request_from_elsewhere_has_no_choice() -> None:
    """vLLM's own warm-up passes nothing to the processor."""
    assert TokenChoice.from_extra_args(None) is TokenChoice.from_extra_args({"other": 1}) is None


def test_a_matcher_that_is_no_grammar_is_refused() -> None:
    """It lives in this process, but tokens are chosen in another."""
    with pytest.raises(ValueError, match="no other matcher"):
        choice_of(structs.replace(request("r", prompt(5)), matcher=object()), "/file")  # type: ignore[arg-type]
