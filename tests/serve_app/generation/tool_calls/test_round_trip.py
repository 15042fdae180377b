"""What a chat template writes for calls, its reader reads back: whole, cut anywhere, and found by that alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from typer.testing import CliRunner

from serve_app.api.format import ApiFinishReason, Choice, are_whole
from serve_app.api.openai.request import parse_chat
from serve_app.api.request import ToolUse
from serve_app.cli.main import app
from serve_app.errors import InvalidRequest
from serve_app.generation.answer import Piece
from serve_app.generation.tool_calls import round_trip
from serve_app.generation.tool_calls.call_reader import CallReader, WholeChoice
from serve_app.generation.tool_calls.formats import FORMATS, ToolFormat, json_list
from serve_app.generation.tool_calls.marked import json_of
from serve_app.generation.tool_calls.reader import AnswerReaders
from serve_app.generation.tool_calls.round_trip import find_parser
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.harness.programs import programs_here
from tests.serve_app.tokenization.variants import variant_of
from tests.serve_app.tool_templates.families import SEARCH, WEATHER
from tests.serve_app.tool_templates.written import SPECIAL, UNREAD, WRITTEN

PLAN: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "plan-it",
        "parameters": {
            "type": "object",
            "$defs": {"note": {"anyOf": [{"$ref": "#/$defs/note"}, {"type": "string"}]}},
            "properties": {
                "title": {"type": "string"},
                "note": {"$ref": "#/$defs/note"},
                "kind": {"enum": ["a", "b"]},
                "count": {"type": "integer"},
                "share": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                "open": {"type": "boolean"},
                "stops": {"type": "array", "items": {"type": "object"}},
            },
        },
    },
}
SCHEMAS = ToolUse((WEATHER, SEARCH, PLAN)).schemas
every_family = pytest.mark.parametrize("family", WRITTEN)
Families = dict[str, PromptTokenizer]


def with_template(source: Path, target: Path, template: str, special: list[str]) -> PromptTokenizer:
    def add(tokenizer: Tokenizer) -> None:
        tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])

    (variant_of(source, target, add) / "chat_template.jinja").write_text(template)
    return PromptTokenizer(target)


@pytest.fixture(scope="module")
def families(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Families:
    root = tmp_path_factory.mktemp("written")
    return {
        name: with_template(demo_model_path, root / name, template, SPECIAL.get(name, []))
        for name, template in WRITTEN.items()
    }


def read(family: str, text: str, cuts: list[int], reason: ApiFinishReason = "stop") -> Choice:
    """Read a text in pieces. ``family``: "forced" for the form of answers that must call."""
    written, whole = FORMATS.get(family, ToolFormat(json_list)), WholeChoice()
    reader = CallReader(written.reading, lambda name: written.make_id(name, 0), SCHEMAS, forced=family == "forced")
    ends = [0, *sorted(cuts), len(text)]
    for at, end in enumerate(ends[1:], 1):
        for piece in reader.split(
            Piece(0, text[ends[at - 1] : end], finish_reason=reason if at + 1 == len(ends) else None)
        ):
            whole.add(piece)
    return whole.choice()


words = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t"), max_size=12)
fragments = st.sampled_from(
    ["</parameter>", "\n</parameter>\n", "</arg_value>", "<tool_call>", "</tool_call>", "</function>", "{", '"', "\\",
     "\n", "2", "true", "null", "[1]", "<"]
)  # fmt: skip
texts = st.lists(words | fragments, max_size=4).map("".join)
values: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=5,
)
plans = st.fixed_dictionaries(
    {},
    optional={
        "title": texts, "note": texts, "kind": st.sampled_from("ab"), "count": st.integers(-9, 10**12),
        "share": st.floats(-9, 9) | st.none(), "open": st.booleans(),
        "stops": st.lists(st.dictionaries(st.sampled_from("abc"), values, max_size=2), max_size=2),
    },
)  # fmt: skip
places = st.fixed_dictionaries({"city": texts}, optional={"days": st.integers(0, 9)})
calls = st.lists(
    st.tuples(st.just("plan-it"), plans)
    | st.tuples(st.just("get_weather"), places)
    | st.tuples(st.just("search"), st.just({})),
    min_size=1,
    max_size=3,
)  # fmt: skip
_ENDS = {
    "qwen3_coder": ("</parameter>",), "seed_oss": ("</parameter>",), "minimax_m2": ("</parameter>",),
    "glm45": ("</arg_value>",), "minicpm5": ("</param>", "]]>"),
}  # fmt: skip


def unmarked(value: Any, family: str) -> Any:
    """Return a value without the mark that ends it: formats without quotes cannot tell it from their own."""
    if isinstance(value, str) and any(end in value for end in _ENDS.get(family, ())):
        return value.replace("<", "(").replace("]]", "")
    if isinstance(value, list):
        return [unmarked(each, family) for each in value]
    return {key: unmarked(each, family) for key, each in value.items()} if isinstance(value, dict) else value


def turn_of(tokenizer: PromptTokenizer, family: str, made: list[tuple[str, dict[str, Any]]]) -> str:
    """Return what the template writes between the header of a turn and its end."""
    calls = [
        {
            "type": "function",
            "id": FORMATS[family].make_id(name, at),
            "function": {"name": name, "arguments": arguments},
        }
        for at, (name, arguments) in enumerate(made)
    ]
    text = tokenizer.template.render(
        [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "", "tool_calls": calls}],
        [WEATHER], add_generation_prompt=False,
    ).text  # fmt: skip
    return text.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")


@every_family
@given(made=calls, data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
def test_calls_come_back_as_the_template_writes_them(
    family: str, made: list[tuple[str, dict[str, Any]]], data: st.DataObject, families: Families
) -> None:
    """Names, and arguments of every type; cut short, no other call is read, and nothing is lost. (docs: api)"""
    made = [(name, {key: unmarked(value, family) for key, value in arguments.items()}) for name, arguments in made]
    text = turn_of(families[family], family, made)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    choice = read(family, text, cuts)
    assert [(call.name, json.loads(call.arguments)) for call in choice.calls] == made
    assert choice.text.strip() == ""
    short = text[: data.draw(st.integers(0, len(text)))]
    part = read(family, short, [])
    assert [(call.name, json.loads(call.arguments)) for call in part.calls] == made[: len(part.calls)]
    again = read(family, short, [cut for cut in cuts if cut <= len(short)])
    assert (again.text, [call.arguments for call in again.calls]) == (
        part.text,
        [call.arguments for call in part.calls],
    )


@pytest.mark.parametrize("family", [*WRITTEN, "forced"])
@given(made=calls, data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
def test_a_call_that_the_length_cuts_is_told_as_far_as_it_came(
    family: str, made: list[tuple[str, dict[str, Any]]], data: st.DataObject, families: Families
) -> None:
    """Wherever the text is cut: calls of the right names, the last one's arguments begun, and none of its text shown.

    docs: api
    """
    made = [(name, {key: unmarked(value, family) for key, value in arguments.items()}) for name, arguments in made]
    if family == "forced":
        text = json.dumps([{"name": name, "parameters": arguments} for name, arguments in made])
    else:
        text = turn_of(families[family], family, made)
    whole = read(family, text, [])
    short = text[: data.draw(st.integers(0, len(text) - 1))]
    cut = read(family, short, data.draw(st.lists(st.integers(0, len(short)), max_size=6)), "length")
    assert cut.finish_reason == "length"
    assert [call.name for call in cut.calls] == [call.name for call in whole.calls][: len(cut.calls)]
    for call, full in zip(cut.calls, whole.calls, strict=False):
        assert full.arguments.startswith(call.arguments)
        assert call.cut == (not are_whole(call.arguments))
    assert not any(call.cut for call in cut.calls[:-1])
    opening = cut.text.strip()  # half of the mark that begins a call may be text
    assert text.strip().startswith(opening)
    assert "{" not in opening and made[0][0][:3] not in opening and len(opening) < 28
    begun = text.find(made[0][0]) + len(made[0][0]) + 40
    assert cut.calls or len(short) < begun


@every_family
def test_the_format_is_what_reads_the_calls_back(
    family: str, families: Families, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No word of the template decides: ``<tool_call>`` begins a call in three families."""
    monkeypatch.setattr(round_trip, "vllm_missing", lambda: True)
    assert find_parser(families[family]) == family
    assert AnswerReaders(families[family], "auto").unread == ""


@pytest.mark.parametrize("name", UNREAD)
def test_a_format_that_no_reader_reads_back_is_named(
    name: str, demo_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests whose answer may call are told the setting; an answer that must call has a form of its own."""
    monkeypatch.setattr(round_trip, "vllm_missing", lambda: True)
    tokenizer = with_template(demo_model_path, tmp_path / "model", UNREAD[name], [])
    readers = AnswerReaders(tokenizer, "auto")
    assert "tool_parser" in readers.unread

    def asked(**fields: Any) -> Any:
        body = {"model": "m", "messages": [{"role": "user", "content": "Rain?"}], "tools": [WEATHER], **fields}
        return readers.checked(parse_chat(json.dumps(body).encode()))

    with pytest.raises(InvalidRequest, match="tool_parser names one of hermes"):
        asked()
    assert asked(tool_choice="required").grammar
    assert asked(tool_choice="none")
    assert AnswerReaders(tokenizer, "hermes").unread == ""


def test_check_and_doctor_tell_that_calls_are_not_read(demo_model_path: Path, tmp_path: Path) -> None:
    """The setting in the file counts."""
    with_template(demo_model_path, tmp_path / "model", UNREAD["an unknown mark"], [])
    file = tmp_path / "settings.yaml"
    said = "the format of this model's tool calls is not known"
    with programs_here():
        for setting, told in (("auto", True), ("hermes", False)):
            file.write_text(f"model: {tmp_path / 'model'}\ntool_parser: {setting}\n")
            checked = CliRunner().invoke(app, ["check", str(file)])
            assert checked.exit_code == 0, checked.output
            assert (said in checked.output.lower()) == told
        assert said in CliRunner().invoke(app, ["doctor", "--model", str(tmp_path / "model")]).output.lower()


def test_check_refuses_a_template_that_is_none(demo_model_path: Path, tmp_path: Path) -> None:
    """It would end the start of every ingress."""
    (tmp_path / "broken.jinja").write_text("{% for each in messages %}")
    file = tmp_path / "settings.yaml"
    file.write_text(f"model: {demo_model_path}\nchat_template: broken.jinja\n")
    with programs_here():
        checked = CliRunner().invoke(app, ["check", str(file)])
    assert checked.exit_code != 0 and "chat_template is no Jinja template" in checked.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("template", "tokens", "parser"),
    [
        ("{{ tools }}<tool_call>", [], "hermes"),
        ("{{ tools }}<tool_call><function=f>", [], ""),
        ("{{ tools }}<tool_call>", ["[TOOL_CALLS]"], "hermes"),
        ("{{ tools }}", ["[TOOL_CALLS]"], "mistral"),
        ('{{ tools }}"parameters"', ["<|python_tag|>"], "llama3_json"),
        ("{{ tools }}", ["<|python_tag|>"], ""),
        ("{{ tools }}", ["<|tool_call|>", "<|/tool_call|>"], "phi4_mini_json"),
        ("{{ tools }}", ["<|tool_calls_section_begin|>"], "kimi_k2"),
    ],
)
def test_where_a_template_writes_no_calls_its_words_and_tokens_decide(
    demo_model_path: Path, tmp_path: Path, template: str, tokens: list[str], parser: str
) -> None:
    assert find_parser(with_template(demo_model_path, tmp_path / "model", template, tokens)) == parser


@pytest.mark.parametrize(
    ("family", "text", "found"),
    [
        ("qwen3_coder", "<function=search>\n</function>", [("search", "{}")]),
        ("qwen3_coder", "<tool_call>\n<function=search>\n</tool_call>", [("search", "{}")]),
        (
            "qwen3_coder",
            "<tool_call><function=plan-it><parameter=title>\na</parameter>\nb\n</parameter></function></tool_call>",
            [("plan-it", '{"title": "a</parameter>\\nb"}')],
        ),
        (
            "qwen3_coder",
            "<function=plan-it><parameter=open>True</parameter><parameter=stops>[{'a': None}]</parameter>"
            "<parameter=count>many</parameter><parameter=share>None</parameter><parameter=kind>2</parameter></function>",
            [("plan-it", '{"open": true, "stops": [{"a": null}], "count": "many", "share": null, "kind": "2"}')],
        ),
        ("glm45", "<tool_call>search</tool_call>", [("search", "{}")]),
        ("glm45", "Write <tool_call>NAME</tool_call>.", "Write <tool_call>NAME</tool_call>."),
        ("glm45", "<tool_call>search", "<tool_call>search"),
        ("glm45", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Os", None),
        ("kimi_k2", "<|tool_call_begin|>search<|tool_call_argument_begin|>{}<|tool_call_end|>", [("search", "{}")]),
        ("kimi_k2", "<|tool_call_begin|>call_0123<|tool_call_argument_begin|>{}<|tool_call_end|>", "call_0123{}"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>so<｜tool▁call▁end｜>", "so"),
        ("deepseek_v31", "a<｜tool▁call▁begin｜>search<｜tool▁sep｜>oops", "asearchoops"),
        ("minimax_m2", '<invoke name="search">x</invoke>', '<invoke name="search">x</invoke>'),
        ("granite", '<tool_call>[{"name": "search", "arguments": {}}]', [("search", "{}")]),
    ],
)
def test_models_may_write_less_than_the_template(family: str, text: str, found: Any) -> None:
    """What is no call stays text, without the special tokens; None: a call that is cut is text."""
    choice = read(family, text, [])
    calls = [(call.name, call.arguments) for call in choice.calls]
    assert (calls or choice.text) == (text if found is None else found)
    assert (choice.finish_reason == "tool_calls") == bool(calls)


def test_ids_of_kimi_hold_name_and_number(families: Families) -> None:
    """The model's own are kept; those of an answer that must call count on, as the model would."""
    text = "<|tool_call_begin|>functions.search:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    (call,) = read("kimi_k2", text, []).calls
    assert (call.call_id, call.name) == ("functions.search:7", "search")


def test_a_strings_text_comes_while_it_is_written() -> None:
    written = FORMATS["qwen3_coder"]
    reader = CallReader(written.reading, lambda name: "call_1", SCHEMAS)
    pieces = ["<tool_call>\n<function=plan-it>\n<parameter=title>\n", "Two", " days\n", "in", "\n</par"]
    found = ["".join(getattr(event, "json", "") for event in reader.push(piece)) for piece in pieces]
    assert found == ['{"title": "', "Two", " days", "\\nin", ""]


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("2", {"string"}, "2"), ("2", {"number"}, 2), ("2", set(), 2), ("2", {"string", "number"}, 2),
        ("2", {"string", "null"}, "2"), ("null", {"string", "null"}, None), ("None", {"string", "null"}, None),
        ('"a"', set(), '"a"'), ("True", {"boolean"}, True), ("['a']", {"array"}, ["a"]), ("{'a'}", {"object"}, "{'a'}"),
        ("[" * 5000, {"array"}, "[" * 5000), ("(" * 5000, set(), "(" * 5000), ("NaN", {"number"}, "NaN"),
        ("1e999", {"number"}, "1e999"), (" x ", set(), " x "),
    ],
)  # fmt: skip
def test_a_bare_value_is_read_by_its_type(text: str, types: set[str], value: Any) -> None:
    assert json.loads(json_of(text, frozenset(types))) == value
