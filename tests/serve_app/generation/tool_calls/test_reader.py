"""Tool calls are read verbatim, and the same for any cuts of the text.

An answer that must call can be nothing else, and its arguments follow the tools' schemas.
"""

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve_app.api.format import CallArguments, CallBegun, CallEnded, CallEvent
from serve_app.api.request import ToolUse
from serve_app.generation.tool_calls.call_reader import CallReader
from serve_app.generation.tool_calls.formats import Reading, forced_calls, hermes, json_list, llama3_json, mistral
from serve_app.structured.compiler import GrammarCompiler, llguidance_form
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.tool_templates.families import SEARCH, WEATHER

TOOLS = ToolUse((WEATHER, SEARCH)).schemas
ONLY_PLAN = {"allowed": frozenset({"plan"})}
GRAMMARS = [hermes, llama3_json, mistral, json_list]
every_grammar = pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.__name__)

Read = list[str | tuple[str, str]]
"""Texts, and (name, arguments) of calls, in order."""


def joined(events: list[str | CallEvent]) -> Read:
    """Join successive texts, and each call's arguments; check that calls begin and end in turn."""
    found: Read = []
    open_call = False
    for event in events:
        if isinstance(event, str):
            assert event
            assert not open_call
            if found and isinstance(found[-1], str):
                found[-1] += event
            else:
                found.append(event)
        elif isinstance(event, CallBegun):
            assert not open_call
            open_call = True
            found.append((event.name, ""))
        elif isinstance(event, CallArguments):
            assert open_call
            name, arguments = found[-1]
            found[-1] = (name, arguments + event.json)
        else:
            assert isinstance(event, CallEnded)
            assert open_call
            open_call = False
    assert not open_call
    return found


def read(grammar: Reading, pieces: list[str]) -> Read:
    ids = itertools.count()
    reader = CallReader(grammar, lambda name: str(next(ids)), TOOLS)
    events = [event for piece in pieces for event in reader.push(piece)]
    events += reader.flush()
    found = joined(events)
    assert reader.calls == sum(isinstance(item, tuple) for item in found)
    return found


MARKERS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", '{"name"', ': "search"',
    '"arguments"', '"parameters"', "{", "}", "[", "]", '"', "\\", ",", ";", ":", ": ", " ", "\n", "search", "12",
    "null", "text", "é",
]  # fmt: skip
anything = st.lists(st.sampled_from(MARKERS) | st.text(max_size=3), max_size=25).map("".join)


@st.composite
def cuts(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> tuple[str, list[str]]:
    """A text, and its pieces."""
    text = draw(texts)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=len(text))))
    ends = [0, *places, len(text)]
    return text, [text[start:end] for start, end in itertools.pairwise(ends)]


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(MARKERS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=4) | st.sampled_from(MARKERS), json_values, max_size=3)
prose = st.text(st.characters(exclude_characters="<[{|", exclude_categories=["Cs"]), max_size=12)
calls = st.lists(
    st.tuples(st.sampled_from(sorted(TOOLS)), st.builds(json.dumps, arguments, indent=st.sampled_from([None, 2]))),
    min_size=1,
    max_size=3,
)


@st.composite
def answers(draw: st.DrawFn, grammar: Reading) -> tuple[str, Read]:
    """An answer in a family's format, and its expected content: text, and calls with arguments verbatim."""
    before, made, space = draw(prose), draw(calls), draw(st.sampled_from(["", "\n"]))

    def written(key: str) -> list[str]:
        return [f'{{{space}"name": "{name}",{space}"{key}": {value}{space}}}' for name, value in made]

    if grammar is hermes:
        key = draw(st.sampled_from(["arguments", "parameters"]))
        text = before + space.join(f"<tool_call>{space}{call}{space}</tool_call>" for call in written(key))
    elif grammar is llama3_json:
        before = before if draw(st.booleans()) else ""
        text = (before and before + "<|python_tag|>") + "; ".join(written("parameters"))
    elif grammar is json_list:
        before = ""
        text = "[" + ", ".join(written("parameters")) + "]"
    elif draw(st.booleans()):
        text = before + "[TOOL_CALLS] [" + ", ".join(written("arguments")) + "]"
    else:
        marks = draw(st.sampled_from(["[ARGS]", "[CALL_ID]abc123XYZ[ARGS]", ""]))
        text = before + "".join(f"[TOOL_CALLS]{name}{marks}{value}" for name, value in made)
    return text, [*([before] if before.strip() else []), *made]


@every_grammar
@given(data=st.data())
def test_calls_are_read_as_they_are_written(grammar: Reading, data: st.DataObject) -> None:
    """Text before them, names and verbatim arguments are read with any cuts."""
    text, expected = data.draw(answers(grammar))
    _, pieces = data.draw(cuts(st.just(text)))
    assert read(grammar, pieces) == expected


QUOTED = ['<tool_call>{"name": "search", "arguments": {"q": "a\\', '"b"}}</tool_call>']
"""A call whose argument is cut between a backslash and the quote that it escapes."""


@every_grammar
@given(cut=cuts(anything))
@example(cut=('{"name": 12"abc"', ['{"name": 12', '"abc"']))
@example(cut=('<tool_call>{"name": "f", "arguments": {"a\\"', ['<tool_call>{"name": "f", "arguments": {"a\\', '"']))
@example(cut=("".join(QUOTED), QUOTED))
def test_any_text_is_read_the_same_however_it_is_cut(grammar: Reading, cut: tuple[str, list[str]]) -> None:
    """This includes text without a call, and broken calls. (docs: api)"""
    text, pieces = cut
    assert read(grammar, pieces) == read(grammar, [text]) == read(grammar, list(text))


@every_grammar
@given(text=st.text(st.characters(exclude_characters="<[{|"), max_size=30))
def test_text_without_a_call_is_text_at_once(grammar: Reading, text: str) -> None:
    """Nothing of it is lost, and no character waits for the next."""
    assert "".join(str(item) for item in read(grammar, [text])) == text
    if text.strip() and grammar is not json_list:
        reader = CallReader(grammar, str, TOOLS)
        assert "".join(map(str, reader.push(text))) == text


CALL = '{"name": "search", "arguments": {}}'


@pytest.mark.parametrize(
    ("grammar", "text", "found"),
    [
        (hermes, "<tool_call>hello</tool_call>", ["<tool_call>hello</tool_call>"]),
        (hermes, '<tool_call>{"nome": "search"}</tool_call>', ['<tool_call>{"nome": "search"}</tool_call>']),
        (hermes, '<tool_call>{"name": "search", "arguments": 3}', ['<tool_call>{"name": "search", "arguments": 3}']),
        (hermes, 'a <tool_call>{"name": "sea', ['a <tool_call>{"name": "sea']),
        (hermes, "a < b <tool", ["a < b <tool"]),
        (llama3_json, '{"name": "Ann", "parameters": {}}', ['{"name": "Ann", "parameters": {}}']),
        (llama3_json, "<|python_tag|>print(1)", ["print(1)"]),
        (mistral, "[TOOL_CALLS][none]", ["[none]"]),
        (mistral, "[TOOL_CALLS]search[ARGS]oops", ["searchoops"]),
        (mistral, "[1, 2]", ["[1, 2]"]),
        (json_list, "[none] of it", ["[none] of it"]),
        (hermes, f"<tool_call>{CALL}\n so", [("search", "{}"), "so"]),
        (mistral, f"[TOOL_CALLS][{CALL}] so [TOOL_CALLS]search[ARGS]{{}}", [("search", "{}"), "so ", ("search", "{}")]),
        (json_list, f"[{CALL}]\nso", [("search", "{}"), "so"]),
        (hermes, '<tool_call>{"name": "search"}</tool_call> done', [("search", "{}"), "done"]),
        (hermes, '<tool_call>{"arguments": {"q": 1}, "name": "f"}</tool_call>', [("f", '{"q": 1}')]),
    ],
)
def test_anything_but_a_call_is_text(grammar: Reading, text: str, found: Read) -> None:
    """All of it is kept, even in place of a closing tag, except special tokens, which no text shows.

    A call may have no arguments; arguments before the name, as in early Hermes models, wait for it.
    """
    assert read(grammar, [text]) == found


def test_arguments_come_while_they_are_written() -> None:
    """The name is sent first, then arguments without delay; a call that breaks off ends."""
    reader = CallReader(hermes, lambda name: "call_1", TOOLS)
    assert reader.push('Look: <tool_call>{"name": "search", "arguments": ') == ["Look: "]
    assert reader.push('{"q": "a') == [CallBegun("call_1", "search"), CallArguments('{"q": "a')]
    assert reader.push(' b"') == [CallArguments(' b"')]
    assert reader.push("}") == [CallArguments("}")]
    (ended,) = reader.push("}")
    assert ended == CallEnded('<tool_call>{"name": "search", "arguments": {"q": "a b"}}')
    assert reader.push("\n</tool_call>") + reader.flush() == []
    reader = CallReader(hermes, lambda name: "call_2", TOOLS)
    reader.push(broken_off := '<tool_call>{"name": "search", "arguments": {"q": [1')
    assert reader.flush() == [CallEnded(broken_off)]


NESTED: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "plan",
        "parameters": {
            "$defs": {"stop": {"type": "object", "properties": {"at": {"$ref": "#/$defs/place"}}, "required": ["at"],
                               "additionalProperties": False},
                      "place": {"enum": ["Oslo", "Bergen"]}},
            "properties": {"stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}}},
            "required": ["stops"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
RAIN = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'
FIND = '{"name": "search", "parameters": {"anything": [1, null]}}'
PLAN = '{"name": "plan", "parameters": {"stops": [{"at": "Oslo"}, {"at": "Bergen"}]}}'
EVERY = (WEATHER, SEARCH, NESTED)


@pytest.mark.parametrize(
    ("fields", "text", "accepted"),
    [
        ({}, f"[{RAIN}]", True), ({}, f"[{RAIN}, {FIND}, {PLAN}]", True),
        ({"parallel": False}, f"[{FIND}]", True), ({"parallel": False}, f"[{FIND}, {FIND}]", False),
        (ONLY_PLAN, f"[{PLAN}]", True), (ONLY_PLAN, f"[{RAIN}]", False),
        ({"tools": (NESTED,)}, f"[{PLAN}]", True), ({}, "[]", False), ({}, RAIN, False), ({}, "It rains.", False),
        ({}, '[{"name": "find", "parameters": {}}]', False), ({}, '[{"name": "get_weather", "parameters": {}}]', False),
        ({}, '[{"name": "search", "parameters": 3}]', False),
        ({}, f"[{PLAN.replace('Bergen', 'Rome')}]", False), (ONLY_PLAN, f"[{PLAN.replace('at', 'in')}]", False),
    ],
)  # fmt: skip
def test_only_calls_match(
    tokenizer: PromptTokenizer, compiler: GrammarCompiler, fields: dict[str, Any], text: str, accepted: bool
) -> None:
    """They are calls of offered tools that satisfy their schemas; references inside a schema stay its own.

    docs: api
    """
    use = ToolUse(**{"tools": EVERY, "must_call": True, **fields})
    matcher = compiler.compile(llguidance_form(forced_calls(use)))
    ids = tokenizer.encode(text, b"r" * 16).token_ids.tolist()
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == accepted
