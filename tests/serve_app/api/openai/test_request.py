"""OpenAI bodies become a GenerateRequest, or a 400 that names the field; nothing else is possible."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.api.openai.tokens import parse_tokenize
from serve_app.api.request import ChatRequest, CompletionRequest, GenerateRequest, UnknownField, reasoning_fields
from serve_app.errors import InvalidRequest
from serve_app.structured.grammar import Grammar
from tests.serve_app.api.openai.bodies import CHAT, PARSERS, assert_refused, chat, complete


def test_bare_requests_have_openais_defaults() -> None:
    """Only model and messages are required; a chat has no limit of its own, a completion ends after 16 tokens."""
    assert chat() == ChatRequest(model="demo", messages=({"role": "user", "content": "Hi"},))
    assert chat().max_tokens is None
    assert complete() == CompletionRequest(model="demo", prompts=("Hi",), max_tokens=16)
    assert chat(max_tokens=5, max_completion_tokens=9).max_tokens == 9, "the newer name takes precedence"


def test_every_field_arrives() -> None:
    """Values within bounds are unchanged; lists lose repetitions, and biases are sorted by id."""
    as_sent = {
        "n": 2, "max_tokens": 7, "temperature": 0, "top_p": 0.5, "seed": -5, "ignore_eos": True, "cache_salt": "s",
        "prompt_cache_key": "k", "prompt_ref": "a@1", "apply_chat_template": False, "add_generation_prompt": False,
        "chat_template_kwargs": {"enable_thinking": False}, "save_system_prompt_kv_cache": True, "min_tokens": 3,
        "presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 1.1, "min_p": 0.1, "stream": True,
        "include_stop_str_in_output": True, "disable_spec_decode": True,
    }  # fmt: skip
    request = chat(
        **as_sent, top_k=-1, stop=["a", "b", "a"], stream_options={"include_usage": True}, logprobs=True,
        logit_bias={"9": -100, "5": 1.5}, stop_token_ids=[7, 7, 0], bad_words=["no", "no", " never"],
        top_logprobs=20, allowed_token_ids=[4, 4, 7],
    )  # fmt: skip
    assert request == ChatRequest(
        model="demo", messages=({"role": "user", "content": "Hi"},), **as_sent, top_k=0, stop=("a", "b"),
        include_usage=True, logit_bias=((5, 1.5), (9, -100.0)), stop_token_ids=(7, 0), bad_words=("no", " never"),
        allowed_token_ids=(4, 7),
        logprobs=20, session="k",
    )  # fmt: skip
    continued = chat(continue_final_message=True)
    assert (continued.continue_final_message, continued.add_generation_prompt) == (True, False)
    assert (chat(logprobs=True).logprobs, complete(logprobs=0).logprobs, complete().logprobs) == (0, 0, None)
    assert complete(echo=True).echo
    forms = ("a", ["a", "b"], [1, 2], [[1, 2], [3]])
    assert [complete(prompt=form).prompts for form in forms] == [("a",), ("a", "b"), ((1, 2),), ((1, 2), (3,))]


def test_null_is_absent() -> None:
    """Clients send nulls for omitted fields."""
    nulls = dict.fromkeys(
        ["n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options", "cache_salt",
         "tools", "logprobs", "response_format", "lora_name", "chat_template_kwargs", "user"]
    )  # fmt: skip
    assert chat(**nulls) == chat()
    assert chat(stream=True, stream_options={"include_usage": None}) == chat(stream=True)
    assert chat(messages=[{"role": "user", "content": "Hi", "name": None, "tool_calls": None}]) == chat()
    assert chat(metadata={"a": 1}, store=None, response_format={"type": "text"}, structured_outputs={}) == chat()
    assert chat(logit_bias={}, stop_token_ids=[], bad_words=[], logprobs=False, top_logprobs=0) == chat()
    for someone in (3, ["u"], {"id": "u"}, ""):
        assert chat(user=someone, safety_identifier=someone) == chat(), "no word for a user changes nothing"
    assert chat(user="u") == chat(safety_identifier="u", user="v" * 257) == dataclasses.replace(chat(), user="u")


@pytest.mark.parametrize("pad", ["", " " * 70_000], ids=["small", "large"])
def test_fields_without_effect_are_named_wherever_they_stand(pad: str) -> None:
    """They are found in the body, its stream options, messages and their parts; null and empty lists are ignored."""
    part = {"type": "text", "text": "Hi" + pad, "cache_control": {}}
    request = chat(
        cache_slat="x",
        tools=[],
        sparkle=[1],
        nothing=None,
        stream=True,
        stream_options={"include_usag": True},
        messages=[
            {"role": "user", "content": [part], "contnt": 3},
            {"role": "assistant", "content": "", "refusal": None, "annotations": []},
        ],
    )
    assert request.unknown == (
        UnknownField("cache_slat", "cache_salt"),
        UnknownField("sparkle"),
        UnknownField("stream_options.include_usag", "stream_options.include_usage"),
        UnknownField("messages[].contnt", "messages[].content"),
        UnknownField("messages[].content[].cache_control"),
    )
    assert request.cache_salt is None


def test_messages_keep_fields_for_templates() -> None:
    """Developer becomes system, parts are joined as they are, and an assistant may have no content."""
    request = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "user", "content": "Hi", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "tool", "content": "42", "tool_call_id": "c1", "ignored": 1},
        ]
    )
    assert request.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "ann"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    )


def test_a_refusal_is_text_that_the_assistant_said() -> None:
    """As a part, or in the field where this API's answers have it."""
    no = "I will not."
    for refused in (
        {"content": [{"type": "text", "text": "No. "}, {"type": "refusal", "refusal": no}]},
        {"content": "No. ", "refusal": no},
    ):
        request = chat(messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", **refused}])
        assert request.messages[1] == {"role": "assistant", "content": f"No. {no}"}
        assert request.unknown == ()
    alone = chat(messages=[{"role": "assistant", "content": None, "refusal": no}])
    assert alone.messages == ({"role": "assistant", "content": no},)
    assert_refused(chat, {"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "messages[0].content")


def test_older_and_newer_forms_of_messages_are_taken() -> None:
    """Functions are tools whose calls have no id; reasoning may be a part, and a tool may say nothing."""
    asked = chat(
        messages=[
            {"role": "user", "content": ["Ra", {"text": "in?"}]},
            {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"at": 1}'}},
            {"role": "function", "name": "look", "content": "wet"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                                              {"type": "text", "text": "Yes."}], "audio": {"id": "a"}},
            {"role": "tool", "content": None, "tool_call_id": "c"},
        ]
    )  # fmt: skip
    call = {"id": "call_look", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    assert asked.messages == (
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "wet", "name": "look", "tool_call_id": "call_look"},
        {"role": "assistant", "content": "Yes.", **reasoning_fields("hm")},
        {"role": "tool", "content": "", "tool_call_id": "c"},
    )
    assert [field.name for field in asked.unknown] == ["messages[].audio"]
    image = {"type": "image_url", "image_url": {"url": "https://sky.example/a.png"}}
    with pytest.raises(InvalidRequest, match=r"text only: .*; 'image_url' is not read here"):
        chat(messages=[{"role": "user", "content": [image]}])


def test_an_answers_format_is_one_grammar() -> None:
    """It comes from OpenAI's field or vLLM's; a schema keeps the order of its properties."""
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    wanted = Grammar.json_schema(schema, "response_format.json_schema.schema", strict=True)
    assert chat(response_format=asked).grammar == wanted
    assert wanted.text.index('"b"') < wanted.text.index('"a"')
    assert chat(response_format={"type": "json_object"}).grammar == Grammar.json_object("response_format")
    for as_sent in (schema, json.dumps(schema)):
        found = complete(structured_outputs={"json": as_sent, "regex": None}).grammar
        assert found == Grammar.json_schema(schema, "structured_outputs.json")
    for kind, value in (("regex", "a+"), ("choice", ["a", "b"]), ("grammar", 'start: "a"')):
        found = chat(structured_outputs={kind: value}).grammar
        assert found is not None
        assert (found.kind, found.field) == (kind, f"structured_outputs.{kind}")
    assert chat(structured_outputs={"json_object": True}).grammar == Grammar.json_object(
        "structured_outputs.json_object"
    )
    with pytest.raises(InvalidRequest, match=r"guided_regex is not supported.*use structured_outputs\.regex"):
        chat(guided_regex="a+")


WRONG: dict[str, list[Any]] = {
    "model": [None, ""], "messages": [[], "Hi"], "temperature": [-0.1, 2.1, True, 10**400], "top_p": [0],
    "top_k": [-2, 1.5], "n": [0, 17], "max_tokens": [0, 10**30], "max_completion_tokens": [-1],
    "seed": [2**63, 1e300], "stop": [["a", ""], ["a"] * 17, 5, "x" * 1025], "stream": ["yes"],
    "stream_options": [{"include_usage": True}], "cache_salt": ["", "x" * 1025], "prompt_ref": [3],
    "chat_template_kwargs": [[], {"add_generation_prompt": False}], "presence_penalty": [2.1],
    "frequency_penalty": ["1"], "repetition_penalty": [0, 1e300], "min_p": [1.1], "min_tokens": [-1],
    "logit_bias": [{"x": 1}, {"-1": 1}, {"1": 101}, {"1": True}, {str(i): 1 for i in range(1025)}, {"\u00b2": 1},
                   {"9" * 5000: 1}],
    "stop_token_ids": [[-1], [True], [1] * 129, 5], "bad_words": ["no", [" "], ["x" * 257], ["x"] * 129],
    "allowed_token_ids": [[-1], [True], [1] * 1025, 5],
    "include_stop_str_in_output": [1], "logprobs": [3], "top_logprobs": [3], "response_format": ["json"],
}  # fmt: skip

DEEP = json.loads('{"items": ' * 70 + "{}" + "}" * 70)


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_value_is_a_400_that_names_its_field(field: str) -> None:
    for value in WRONG[field]:
        assert_refused(chat, {field: value}, field)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [3]}, "messages[0]"), ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "system", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"response_format": {"type": 3}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "(" * 65}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_a_wrong_part_is_a_400_that_names_it(fields: dict[str, Any], param: str) -> None:
    """A part of a field is wrong, or two fields conflict."""
    assert_refused(chat, fields, param)


def test_an_error_explains_the_allowed_values_of_a_field() -> None:
    for fields, said in (
        ({"stop": 5}, "stop must be a string or at most 16 strings, each of 1 to 1024 characters."),
        ({"n": 0}, "n must be a whole number from 1 to 16."),
        ({"top_p": 0}, "top_p must be a number above 0 and at most 1."),
        ({"stream": "yes"}, "stream must be true or false."),
        ({"cache_salt": ""}, "cache_salt must be a string of 1 to 1024 characters."),
        (
            {"model": None},
            "model is missing; it must be the name of a model in 1 to 256 characters, see GET /v1/models.",
        ),
    ):
        with pytest.raises(InvalidRequest) as caught:
            chat(**fields)
        assert caught.value.message == said


@pytest.mark.parametrize(
    ("biases", "said"),
    [({"1": 1, "cat": 2}, "'cat' is not a token id"), ({"-1": 1}, "'-1' is not a token id"),
     ({"7": 101}, "that of '7' is 101"), ({"7": True}, "that of '7' is True"), ({"7": "2"}, "that of '7' is '2'"),
     ({"{x}" * 50: 1}, "'{x}{x}{x}{x}{x}{x}{x}{x}{x}{x}{x' is not a token id")],
)  # fmt: skip
def test_a_wrong_bias_is_named(biases: dict[str, Any], said: str) -> None:
    for make in (chat, complete):
        assert_refused(make, {"logit_bias": biases}, "logit_bias", said)


def test_nothing_tells_a_registered_prompts_tokens() -> None:
    """A tenant may use an operator's prompt without seeing it. docs: isolation"""
    for make in (chat, complete):
        assert_refused(make, {"prompt_ref": "clerk", "return_token_ids": True}, "return_token_ids", "would tell")
    cut = {"prompt_ref": "clerk", "echo": True, "truncate_prompt_tokens": 9}
    assert_refused(complete, cut, "echo", "would tell")
    with pytest.raises(InvalidRequest, match="would tell the registered prompt"):
        parse_tokenize(json.dumps({**CHAT, "prompt_ref": "clerk"}).encode(), "demo")


REFUSED: dict[str, tuple[Any, Any]] = {
    "use_beam_search": (True, False), "length_penalty": (2, 1), "functions": ([{}], []),
    "modalities": (["text", "audio"], ["text"]), "audio": ({}, None), "guided_json": ({}, None),
}  # fmt: skip
"""By field: a value that would change the answer, and one without effect."""


@pytest.mark.parametrize("field", REFUSED)
def test_unsupported_fields_that_change_the_answer_are_refused_by_name(field: str) -> None:
    """Ignoring such a field would give a wrong answer; a value without effect is fine."""
    value, neutral = REFUSED[field]
    with pytest.raises(InvalidRequest, match=f"{field} is not supported by this version") as caught:
        chat(**{field: value})
    assert caught.value.param == field
    assert chat(**{field: neutral}) == chat()


WRONG_COMPLETIONS: dict[str, list[Any]] = {
    "prompt": ["", [], 5, [""], [[]], ["a", 1], [1, "a"], [True], [-1], [2**31], [[1], [None]], ["a"] * 129],
    "logprobs": [21, True], "max_tokens": [-1], "prompt_logprobs": [-1, 21, True, [1]], "echo": [1], "suffix": ["x"],
    "best_of": [2],
}  # fmt: skip


@pytest.mark.parametrize("field", WRONG_COMPLETIONS)
def test_unsupported_fields_of_completions_are_a_400(field: str) -> None:
    """``best_of`` equal to ``n`` has no effect."""
    for value in WRONG_COMPLETIONS[field]:
        assert_refused(complete, {field: value}, field)
    with pytest.raises(InvalidRequest, match="at most 14 for 9 prompts"):
        complete(prompt=["a"] * 9, n=16)
    assert complete(echo=False, suffix="", best_of=16, n=16, prompt=["a"] * 8).n == 16


def test_tokens_whose_logprobs_are_wanted_are_named_beside_logprobs() -> None:
    """At most 128, without repetitions; alone they would have no effect."""
    assert chat(logprobs=True, logprob_token_ids=[7, 3, 7]).logprob_token_ids == (7, 3)
    assert complete(logprobs=0, logprob_token_ids=list(range(128))).logprob_token_ids == tuple(range(128))
    assert complete(logprob_token_ids=[]) == complete(logprob_token_ids=None) == complete()
    for parse, fields in ((chat, {}), (complete, {}), (chat, {"logprobs": False})):
        with pytest.raises(InvalidRequest, match="logprob_token_ids needs logprobs") as caught:
            parse(logprob_token_ids=[7], **fields)
        assert caught.value.param == "logprob_token_ids"
    for wrong in ([-1], [1.5], ["7"], 7, [7] * 129 + [8], list(range(129))):
        assert_refused(complete, {"logprobs": 1, "logprob_token_ids": wrong}, "logprob_token_ids")


def test_a_prompts_logprobs_are_asked_for_by_themselves_or_by_an_echo() -> None:
    """A registered prompt's text is not told, and a stream has no place for the list: vLLM ignores 0 there."""
    assert (chat(prompt_logprobs=3).told_prompt, complete(prompt_logprobs=0).told_prompt) == (3, 0)
    assert chat(logprobs=True, top_logprobs=2).told_prompt is None
    scored = complete(echo=True, logprobs=1, max_tokens=0, prompt=[[1, 2], [3]])
    assert (scored.told_echo, scored.told_prompt, scored.prompt_logprobs, scored.max_tokens) == (1, 1, None, 0)
    assert complete(echo=True, logprobs=1, prompt_logprobs=5).told_prompt == 5
    assert complete(echo=True, logprobs=4, prompt_logprobs=0).told_prompt == 4
    assert complete(echo=True).told_prompt is complete(logprobs=2).told_prompt is None
    for parse in (chat, complete):
        with pytest.raises(InvalidRequest, match="does not go with stream") as caught:
            parse(prompt_logprobs=1, stream=True)
        assert caught.value.param == "prompt_logprobs"
        quiet = parse(prompt_logprobs=0, stream=True)
        assert (quiet.told_prompt, [one.name for one in quiet.unknown]) == (None, ["prompt_logprobs"])
        with pytest.raises(InvalidRequest, match="registered prompt"):
            parse(prompt_logprobs=0, prompt_ref="a@1")
    with pytest.raises(InvalidRequest, match="registered prompt"):
        complete(echo=True, logprobs=0, prompt_ref="a@1")
    assert complete(echo=True, logprobs=0, stream=True).stream


@pytest.mark.parametrize("kind", PARSERS)
@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b'{"model":"\xff"}', b'{"model":"\\ud800"}', b'{"temperature":NaN}', b'{"temperature":1e999}',
     b'{"n":' + b"9" * 10_000 + b"}", b'{"a":' * 100_000, b"[" * 1_000_000, b'{"model":"x"}{}', b"\xef\xbb\xbf{}",
     b'{"a": ' + b" " * 70_000, b'"' + b"x" * 70_000 + b'"', b"{" * 70_000],
    ids=lambda raw: repr(raw[:24]),
)  # fmt: skip
def test_a_broken_body_is_a_400(kind: str, raw: bytes) -> None:
    """The JSON is broken, not an object, not UTF-8, too deep, or contains values that JSON does not have."""
    with pytest.raises(InvalidRequest) as caught:
        PARSERS[kind][0](raw)
    assert len(caught.value.message) < 300


NAMES = st.sampled_from("""
    model messages prompt n best_of max_tokens max_completion_tokens temperature top_p top_k min_p seed stop stream
    stream_options cache_salt prompt_cache_key chat_template_kwargs apply_chat_template add_generation_prompt
    ignore_eos tools tool_choice tool_calls function parameters logprobs top_logprobs logit_bias response_format echo
    suffix lora_name prompt_ref presence_penalty repetition_penalty min_tokens stop_token_ids bad_words
    structured_outputs json regex choice grammar json_schema schema continue_final_message guided_json
    role content type text include_usage input instructions metadata call_id name arguments output input_text
    function_call message format include system max_output_tokens stop_sequences tool_use tool_result input_schema
    cache_control output_config diagnostics id
""".split())  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-2, 2), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5), st.sampled_from("user system assistant text demo tool_use function_call input_text".split()),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)


def _parses_or_refuses(parse: Callable[[bytes], GenerateRequest], raw: bytes) -> None:
    try:
        request = parse(raw)
    except InvalidRequest as error:
        assert (bool(error.message), error.status) == (True, 400)
    else:
        assert 1 <= request.n <= 16
        assert 0 <= request.temperature <= 2
        assert 0 < request.top_p <= 1
        assert all(request.stop)
        hash((request.top_k, request.seed, request.stop, request.stop_token_ids, request.bad_words, request.logit_bias))
        if isinstance(request, CompletionRequest):
            assert hash(request.prompts)
            assert request.prompts
        else:
            assert request.messages
            assert all(isinstance(message["content"], str) for message in request.messages)


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=400)
@given(raw=st.binary(max_size=200))
def test_any_bytes_parse_or_are_refused(kind: str, raw: bytes) -> None:
    """A parser raises no other exception."""
    _parses_or_refuses(PARSERS[kind][0], raw)


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=400)
@given(data=st.data())
def test_any_json_parses_or_is_refused(kind: str, data: st.DataObject) -> None:
    parse, valid = PARSERS[kind]
    fields = data.draw(st.dictionaries(NAMES, VALUES, max_size=5))
    body = (valid if data.draw(st.booleans()) else {}) | fields
    _parses_or_refuses(parse, json.dumps(body, ensure_ascii=data.draw(st.booleans())).encode("utf-8", "surrogatepass"))
