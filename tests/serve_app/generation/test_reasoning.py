"""Thoughts are told from answers the same however the text is cut, and a grammar counts behind them."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve_app.api.request import ChatRequest, thought_fields
from serve_app.cache_diagnostics.explain import SeenPrompt, explain
from serve_app.checkpoints.demo_model import ensure_demo_model
from serve_app.engine.core.build import build_engine
from serve_app.engine.protocol import FirstToken
from serve_app.engine.settings import EngineSettings
from serve_app.generation.answer import ChoiceReader, Piece
from serve_app.generation.generation import Generation, Tokens
from serve_app.generation.reasoning import THOUGHTS, Tags, ThoughtReader, find_thoughts, grammar_behind
from serve_app.generation.request_usage import RequestUsage
from serve_app.structured.compiler import GrammarCompiler, llguidance_form
from serve_app.structured.grammar import Grammar
from serve_app.structured.matcher import AnswerMatcher
from serve_app.tenants.tenants import Tenant
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.engine.tiny import request, run_all
from tests.serve_app.generation.test_prepare import preparer_of
from tests.serve_app.ingress.scripted import GENERATION
from tests.serve_app.tool_templates.families import family

TAGS = THOUGHTS["qwen3"]
PARTS = ["<think>", "</think>", "<thi", "</th", "nk>", "<", ">", "\n", " ", "\n\n", "hm", "So 3 < 4.", "é"]


def read(pieces: list[str], *, opened: bool, tags: Tags = TAGS) -> tuple[str, str]:
    reader = ThoughtReader(tags, opened=opened)
    found = [reader.push(text, ended=at == len(pieces)) for at, text in enumerate(pieces, 1)]
    return "".join(thought for thought, _ in found), "".join(text for _, text in found)


@given(st.lists(st.sampled_from(PARTS) | st.text(max_size=3), min_size=1, max_size=16), st.booleans(), st.data())
@example(["<", "think>a", " </thi", "nk", "> ", "\n", "b "], False, None)
def test_any_text_is_split_the_same_however_it_is_cut(parts: list[str], opened: bool, data: st.DataObject) -> None:
    """And of what is neither tag nor white space around it, nothing is lost."""
    text = "".join(parts)
    places = [] if data is None else data.draw(st.lists(st.integers(0, len(text))))
    ends = [0, *sorted(places), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(ends)]
    thought, answer = read([text], opened=opened)
    assert read(pieces, opened=opened) == read([*text, ""], opened=opened) == read(parts, opened=opened)
    assert read(pieces, opened=opened) == (thought, answer)
    if not opened and not text.lstrip().startswith(TAGS.start):
        assert (thought, answer) == ("", text)
    else:
        assert thought == thought.strip()
        inside, _, behind = text.lstrip().removeprefix(TAGS.start).partition(TAGS.end)
        assert (thought, answer) == (inside.strip(), behind.lstrip())


@pytest.mark.parametrize(
    ("name", "prompt", "continued", "opened"),
    [
        ("qwen3", "user: hi\nassistant\n", "", False),
        ("qwen3", "user: hi\nassistant\n<think>\n", "", True),
        ("qwen3", "user: what is <think>\nassistant\n", "", False),
        ("qwen3", "assistant\n<think>\nSo", "<think>\nSo", True),
        ("qwen3", "assistant\n<think>a</think>So", "<think>a</think>So", False),
        ("deepseek_r1", "user: hi\nassistant\n", "", True),
        ("deepseek_r1", "assistant\n<think>\n\n</think>\n\n", "", False),
        ("deepseek_r1", "assistant\nSo", "So", False),
    ],
)
def test_a_prompt_opens_a_thought_by_its_end_alone(name: str, prompt: str, continued: str, opened: bool) -> None:
    """Tags in what a user writes open none."""
    assert THOUGHTS[name].opened_by(prompt, continued) == opened


def test_tags_are_found_in_templates_and_special_tokens() -> None:
    assert find_thoughts("x split('</think>') y", frozenset()) == "qwen3"
    assert find_thoughts("", frozenset({"[/THINK]"})) == "mistral"
    assert find_thoughts("no tags", frozenset({"<|im_end|>"})) == "none"


@pytest.mark.parametrize("tags", [TAGS, Tags("<|im_start|>", "<|endoftext|>")], ids=["text", "special"])
def test_a_grammar_counts_behind_the_thought(tokenizer: PromptTokenizer, tags: Tags, demo_model_path: Path) -> None:
    """Whether the prompt, the model or nobody opens it; tags may be special tokens."""
    compiler = GrammarCompiler(demo_model_path, tokenizer.vocab_size, [2])
    special = tokenizer.special_ids(tags[:2])
    for grammar in (Grammar.json_object("f"), Grammar.choice(["{}", "no"], "f")):
        form = llguidance_form(grammar)
        for opened, text, fits in (
            (True, "so 3 < 4 END\n\n{}", True),
            (True, "so END nein", False),
            (True, "STARTso END{}", True),
            (False, "STARTso END\n{}", True),
            (False, "{}", True),
            (False, "so END{}", False),
        ):
            matcher = AnswerMatcher(compiler.compile(grammar_behind(form, tags, special, opened=opened)))
            written = text.replace("START", tags.start).replace("END", tags.end)
            ids = tokenizer.encode(written, b"r" * 16).token_ids
            assert (matcher.allowed(ids) is not None) == fits, (opened, text)


def test_tokens_of_thoughts_are_counted_whatever_comes_at_once(tokenizer: PromptTokenizer) -> None:
    """Its tags are among them; of tokens that are told, only those behind it are."""
    ids = tokenizer.encode("<think>\nhm, 3 < 4\n</think>\n\nIt rains.", b"r" * 16).token_ids.tolist()
    expected = len(tokenizer.encode("<think>\nhm, 3 < 4\n</think>", b"r" * 16).token_ids)
    for size in (1, 2, 5, len(ids)):
        split = ThoughtReader(TAGS, opened=False)
        reader, pieces = ChoiceReader(0, GENERATION, tokenizer.decoder(), split=split), list[Piece]()
        for at in range(0, len(ids), size):
            reason = "length" if at + size >= len(ids) else None
            pieces += reader.read(Tokens(tuple(ids[at : at + size]), FirstToken(0) if not at else None, reason))
        assert sum(piece.reasoning_tokens for piece in pieces) in (expected, expected + 1), "a token may hold both"
        assert sum(piece.new_tokens for piece in pieces) == len(ids)
        told = "".join(piece.reasoning for piece in pieces), "".join(piece.text for piece in pieces)
        assert told == ("hm, 3 < 4", "It rains.")


def test_what_is_predicted_of_a_turn_behind_a_thought_is_what_is_cached(tmp_path: Path) -> None:
    """The template drops earlier thoughts, so an answer behind one is computed again; the miss says why."""
    path = family("thinking", ensure_demo_model("demo"), tmp_path / "model")
    tokenizer = PromptTokenizer(path)
    preparer, words = preparer_of(tokenizer), "It rains all day in Oslo, and then it snows. " * 12
    messages: list[dict[str, str]] = []
    engine = build_engine(path, EngineSettings(dtype="float32", num_blocks=512, max_num_seqs=4), lambda _: None)
    engine.start()
    seen: SeenPrompt | None = None
    try:
        for turn in range(3):
            messages.append({"role": "user", "content": f"Question {turn}: rain or snow?"})
            asked = ChatRequest(model="demo", messages=tuple(messages))
            (made,) = asyncio.run(preparer.prepare(asked, Tenant("default"), "id"))
            predicted = 16 * engine.known_blocks(made.block_hashes, (len(made.token_ids) - 1) // 16)
            answer = tokenizer.encode(f"<think>\n{words}\n</think>\n\nAnswer {turn}. {words}", made.root).token_ids
            first = run_all(engine, [engine_request(made, f"{turn}", made.token_ids)]).cached[f"{turn}"]
            assert first == predicted
            if seen is not None:
                assert predicted == len(seen.ids) // 16 * 16, "all of the prompt before, and nothing of its answer"
                miss = explain(SeenPrompt(made.token_ids, made.scope, 0, 1.0), predicted, [seen], tokenizer.text_of)
                assert (miss.reason, miss.lost_tokens > 100) == ("reasoning", True)
            # The answer was this text: its KV is there.
            run_all(engine, [engine_request(made, f"{turn} on", np.concatenate([made.token_ids, answer]))])
            usage = RequestUsage(1, [made])
            usage.add(Piece(0, "x", len(answer), FirstToken(first), reasoning_tokens=len(answer) // 2))
            seen = SeenPrompt(made.token_ids, made.scope, 0, 0.0, usage)
            messages.append({"role": "assistant", "content": f"Answer {turn}. {words}", **thought_fields(words)})
    finally:
        engine.stop()


def engine_request(made: Generation, name: str, ids: np.ndarray) -> object:
    return replace(request(name, ids, 1, scope=made.scope), root=made.root)
