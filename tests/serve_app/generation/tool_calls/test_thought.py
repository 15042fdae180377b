"""A call ends the reasoning that it stands in, for any tags and any format; stop strings end the content."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from serve_app.api.format import Choice
from serve_app.api.openai.request import parse_chat
from serve_app.api.request import ToolUse
from serve_app.generation.answer import Piece
from serve_app.generation.reasoning import REASONING_TAGS, ReasoningReader
from serve_app.generation.tool_calls.call_reader import CallReader, WholeChoice
from serve_app.generation.tool_calls.formats import FORMATS
from serve_app.generation.tool_calls.reader import AnswerReaders
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.generation.outputs import output
from tests.serve_app.ingress.scripted import GENERATION
from tests.serve_app.tool_templates.families import SEARCH, WEATHER, family

SCHEMAS = ToolUse((WEATHER, SEARCH)).schemas
CALLS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "</think>"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "</think>"}}]',
    "llama3_json": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "</think>"}}',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\n</think>\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value></think></arg_value>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "</think>"}<|tool_call_end|><|tool_calls_section_end|>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city"></think></parameter>\n'
    "</invoke>\n</minimax:tool_call>",
}
"""One call, whose argument is a tag, in the formats of families."""


def read(tags: str, written: str, pieces: list[str], *, opened: bool) -> Choice:
    def calls() -> CallReader:
        return CallReader(FORMATS[written].reading, lambda name: "id", SCHEMAS)

    reader, whole = ReasoningReader(REASONING_TAGS[tags], opened=opened, rest=calls(), inside=calls()), WholeChoice()
    for at, text in enumerate(pieces, 1):
        for piece in reader.split(Piece(0, text, 1, finish_reason="stop" if at == len(pieces) else None)):
            whole.add(piece)
    return whole.choice()


def in_tokens(text: str, sizes: Iterator[int]) -> list[str]:
    """Cut a text into tokens of some sizes: a thought is read token by token."""
    tokens = []
    while text:
        size = next(sizes)
        tokens.append(text[:size])
        text = text[size:]
    return tokens


@pytest.mark.parametrize("written", CALLS)
@pytest.mark.parametrize("tags", REASONING_TAGS)
@settings(max_examples=50)
@given(data=st.data())
def test_a_call_ends_the_reasoning(tags: str, written: str, data: st.DataObject) -> None:
    """A tag in its arguments is theirs; the one behind it is left out, with more calls before and behind it.

    docs: api
    """
    start, end, _ = REASONING_TAGS[tags]
    behind = data.draw(st.sampled_from(["", "It rains.", f"\n{end}\n\nIt rains.", f"\n{end}\n\n"]))
    opened = data.draw(st.booleans())
    text = f"{'' if opened else start}\nIs it < 3? {CALLS[written]}{behind}"
    sizes = itertools.cycle(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=9)))
    for tokens in (list(text), in_tokens(text, sizes)):
        choice = read(tags, written, tokens, opened=opened)
        assert (choice.reasoning, choice.finish_reason) == ("Is it < 3?", "tool_calls")
        assert choice.text.strip() == ("It rains." if "It" in behind else "")
        assert [(call.name, json.loads(call.arguments)) for call in choice.calls] == [
            ("get_weather", {"city": "</think>"})
        ]


@pytest.mark.parametrize("written", CALLS)
@pytest.mark.parametrize("tags", REASONING_TAGS)
@settings(max_examples=50)
@given(cut=st.integers(0, 200), data=st.data())
def test_what_is_no_call_stays_in_the_reasoning(tags: str, written: str, cut: int, data: st.DataObject) -> None:
    start, end, _ = REASONING_TAGS[tags]
    call = CALLS[written].replace("</think>", "Oslo")
    begun = call[: min(cut, call.find("get_weather"))]
    text = f"{start}\nI write {begun}\n{end}\n\nIt rains."
    sizes = itertools.cycle(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=9)))
    choice = read(tags, written, in_tokens(text, sizes), opened=False)
    assert (choice.text, choice.finish_reason) == ("It rains.", "stop")
    shown = f"I write {begun}".replace("<|python_tag|>", "").replace("[TOOL_CALLS]", "").rstrip()
    if written != "kimi_k2":  # its special tokens are left out wherever they stand
        assert choice.reasoning == shown.rstrip()


@pytest.fixture(scope="module")
def tokenizer(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return PromptTokenizer(family("thinking", demo_model_path, tmp_path_factory.mktemp("thinking") / "model"))


@pytest.mark.parametrize(
    ("text", "stop", "fields", "found"),
    [
        ("<think>\nan egg\n</think>\n\nthe end", "e", {}, ("an egg", "th", "e")),
        ("<think>\nan egg\n</think>\n\nthe end", "\n", {}, ("an egg", "the end", "")),
        ("<think>\nan egg", "e", {}, ("an egg", "", "")),
        ("\n the end", " the", {}, ("", "\n", " the")),
        ("<the end", "h", {}, ("", "<t", "h")),
        ("<think>\nan egg\n</think>\n\nthe end", "e", {"stop_in_reasoning": True}, ("an", "", "e")),
        ('<think>\ne <tool_call>{"name": "search"}</tool_call>\nso END', "END", {}, ("e", "so ", "END")),
    ],
)
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_stop_strings_end_the_content(
    tokenizer: PromptTokenizer, text: str, stop: str, fields: dict[str, Any], found: tuple[str, str, str], step: int
) -> None:
    """Also behind a call that ended the reasoning; vLLM's way is a setting. (docs: api)"""
    readers = AnswerReaders(tokenizer, "auto", **fields)
    body = {"model": "m", "messages": [{"role": "user", "content": "Rain?"}], "tools": [SEARCH], "stop": [stop]}
    prompt = tokenizer.encode("assistant\n", b"r" * 16).token_ids
    reader, whole = (
        readers.of(parse_chat(json.dumps(body).encode()))(0, structs.replace(GENERATION, token_ids=prompt)),
        WholeChoice(),
    )
    ids = tokenizer.encode(text, b"r" * 16).token_ids.tolist()
    for at in range(0, len(ids), step):
        pieces = reader.read(output(tuple(ids[at : at + step]), None, "stop" if at + step >= len(ids) else None))
        for piece in pieces:
            whole.add(piece)
        if pieces[-1].finish_reason is not None:
            break
    choice = whole.choice()
    assert (choice.reasoning, choice.text, choice.stop_sequence) == found
