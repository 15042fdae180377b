"""Reasoning is split from answers the same for any cuts of the text, and a grammar applies after it."""

import asyncio
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs
from tokenizers import AddedToken

from serve_app.api.request import ChatRequest, reasoning_fields
from serve_app.cache_misses.reasons import SeenPrompt, explain
from serve_app.checkpoints.demo_model import ensure_demo_model
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import EngineRequest, FirstToken
from serve_app.engine.runner.model_runner import load_runner
from serve_app.engine.settings import EngineSettings
from serve_app.generation.answer import Piece
from serve_app.generation.reasoning import REASONING_TAGS, ReasoningReader, Tags, find_reasoning_tags, grammar_after
from serve_app.generation.request_usage import RequestUsage
from serve_app.structured.compiler import GrammarCompiler, llguidance_form
from serve_app.structured.grammar import Grammar
from serve_app.structured.matcher import AnswerMatcher
from serve_app.tenants import Tenant
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.engine.tiny import request, run_all
from tests.serve_app.generation.test_prepare import preparer_of
from tests.serve_app.tokenization.variants import variant_of
from tests.serve_app.tool_templates.families import family

TAGS = REASONING_TAGS["qwen3"]
PARTS = ["<think>", "</think>", "<thi", "</th", "nk>", "<", ">", "\n", " ", "\n\n", "hm", "So 3 < 4.", "é"]


def read(pieces: list[str], *, opened: bool, tags: Tags = TAGS) -> tuple[str, str]:
    reader = ReasoningReader(tags, opened=opened)
    found = [reader.push(text, ended=at == len(pieces)) for at, text in enumerate(pieces, 1)]
    return "".join(thought for thought, _ in found), "".join(text for _, text in found)


@given(st.lists(st.sampled_from(PARTS) | st.text(max_size=3), min_size=1, max_size=16), st.booleans(), st.data())
@example(["<", "think>a", " </thi", "nk", "> ", "\n", "b "], False, None)
def test_any_text_is_split_the_same_however_it_is_cut(parts: list[str], opened: bool, data: st.DataObject) -> None:
    """Apart from tags and the white space around them, nothing is lost."""
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


def test_a_prompt_opens_a_thought_by_its_end_alone() -> None:
    """Tags in a user's text open none, and a continued answer opens its own."""
    opened = {
        (name, prompt, continued)
        for name in ("qwen3", "deepseek_r1")
        for prompt in ("explain <think>\nassistant\n", "assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n")
        for continued in ("", "So", "<think>\nSo", "<think>a</think>So")
        if REASONING_TAGS[name].opened_by(prompt + continued, continued)
    }
    inside = {(*each, "<think>\nSo") for each in {(name, prompt) for name, prompt, _ in opened}}
    assert ("qwen3", "explain <think>\nassistant\n", "") not in opened
    assert {each for each in opened if not each[2]} == {
        ("qwen3", "assistant\n<think>\n", ""), ("deepseek_r1", "assistant\n<think>\n", ""),
        ("deepseek_r1", "explain <think>\nassistant\n", ""),
    }  # fmt: skip
    assert {each for each in opened if each[2]} == inside


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "a", "<"]), max_size=8).map("".join),
    st.sampled_from(sorted(REASONING_TAGS)),
)
def test_a_continued_answer_is_inside_a_thought_if_its_last_tag_opens_one(text: str, name: str) -> None:
    """It may hold several thoughts, ended or not, and ends without a start."""
    tags = REASONING_TAGS[name]
    continued = text.replace("<think>", tags.start).replace("</think>", tags.end)
    inside = False
    for at in range(len(continued)):
        inside = (inside or continued.startswith(tags.start, at)) and not continued.startswith(tags.end, at)
    if tags.start in continued:
        assert tags.opened_by(f"assistant\n{continued}", continued) == inside


def test_tags_are_found_in_templates_and_special_tokens() -> None:
    assert find_reasoning_tags("x split('</think>') y", frozenset()) == "qwen3"
    assert find_reasoning_tags("", frozenset({"[/THINK]"})) == "mistral"
    assert find_reasoning_tags("no tags", frozenset({"<|im_end|>"})) == "none"


@pytest.mark.parametrize(
    ("tags", "added"),
    [
        (TAGS, False),
        (TAGS, True),
        (Tags("<|im_start|>", "<|endoftext|>"), False),
        (Tags("[THINK]", "[/THINK]"), True),
    ],
    ids=["text", "tokens", "special", "other tokens"],
)
def test_a_grammar_counts_behind_the_thought(tags: Tags, added: bool, demo_model_path: Path, tmp_path: Path) -> None:
    """The prompt, the model or nobody may open the thought; tags may be tokens, special or, as Qwen3's, not."""
    words = [AddedToken(tag, special=False) for tag in tags[:2] if added]
    path = variant_of(demo_model_path, tmp_path / "model", lambda tokenizer: tokenizer.add_tokens(words))
    tokenizer = PromptTokenizer(path)
    compiler = GrammarCompiler(path, tokenizer.vocab_size, [2])
    special = tokenizer.ids_in_grammars(tags[:2])
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
            matcher = AnswerMatcher(compiler.compile(grammar_after(form, tags, special, opened=opened)))
            written = text.replace("START", tags.start).replace("END", tags.end)
            ids = tokenizer.encode(written, b"r" * 16).token_ids
            assert (matcher.allowed(ids) is not None) == fits, (opened, text)


def test_the_prediction_for_a_turn_behind_a_thought_is_exact(tmp_path: Path) -> None:
    """The template drops earlier thoughts, so an answer after one is computed again; the miss has this reason."""
    path = family("thinking", ensure_demo_model("demo"), tmp_path / "model")
    tokenizer = PromptTokenizer(path)
    preparer, words = preparer_of(tokenizer), "It rains all day in Oslo, and then it snows. " * 12
    messages: list[dict[str, str]] = []
    settings = EngineSettings(dtype="float32", num_blocks=512, max_num_seqs=4)
    engine = TorchEngine(load_runner(path, settings), settings, lambda _: None)
    engine.start()
    seen: SeenPrompt | None = None
    try:
        for turn in range(3):
            messages.append({"role": "user", "content": f"Question {turn}: rain or snow?"})
            asked = ChatRequest(model="demo", messages=tuple(messages))
            (made,) = asyncio.run(preparer.prepare(asked, Tenant("default"), "id"))
            predicted = 16 * engine.cached_blocks(made.block_hashes, (len(made.token_ids) - 1) // 16)
            answer = tokenizer.encode(f"<think>\n{words}\n</think>\n\nAnswer {turn}. {words}", made.root).token_ids
            first = run_all(engine, [engine_request(made, "asked", made.token_ids)]).cached["asked"]
            assert first == predicted
            if seen is not None:
                assert predicted == len(seen.ids) // 16 * 16, "all of the previous prompt, and nothing of its answer"
                miss = explain(SeenPrompt(made.token_ids, made.scope, 0, 1.0), predicted, [seen], tokenizer.text_of)
                assert (miss.reason, miss.lost_tokens > 100) == ("reasoning", True)
            # Cache the KV of this answer's text.
            run_all(engine, [engine_request(made, "answered", np.concatenate([made.token_ids, answer]))])
            usage = RequestUsage(asked, [made])
            usage.add(Piece(0, "x", len(answer), FirstToken(first), reasoning_tokens=len(answer) // 2))
            seen = SeenPrompt(made.token_ids, made.scope, 0, 0.0, usage.total)
            messages.append({"role": "assistant", "content": f"Answer {turn}. {words}", **reasoning_fields(words)})
    finally:
        engine.stop()


def engine_request(made: EngineRequest, name: str, ids: np.ndarray) -> object:
    return structs.replace(request(name, ids, 1, scope=made.scope), root=made.root)
