"""OpenAI bodies become GenerateRequest, or a 400 that names the field; nothing else ever comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.api.openai.request import parse_chat, parse_completion
from serve_app.api.request import ChatRequest, CompletionRequest, GenerateRequest
from serve_app.api.unknown import UnknownField
from serve_app.errors import InvalidRequest
from serve_app.structured.grammar import Grammar

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "Hi"}
PARSERS = {"chat": (parse_chat, CHAT), "completion": (parse_completion, COMPLETION)}


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps(CHAT | fields).encode())


def complete(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps(COMPLETION | fields).encode())


def test_a_bare_chat_has_openais_defaults() -> None:
    """Nothing but model and messages is needed; a chat has no limit of its own."""
    assert chat() == ChatRequest(model="demo", messages=({"role": "user", "content": "Hi"},))
    assert chat().max_tokens is None


def test_a_bare_completion_has_openais_defaults() -> None:
    """A completion ends after 16 tokens unless it says otherwise."""
    assert complete() == CompletionRequest(model="demo", prompts=("Hi",), max_tokens=16)


def test_every_field_arrives() -> None:
    """Values that are in bounds come out as they went in."""
    request = chat(
        n=2, max_tokens=7, temperature=0, top_p=0.5, top_k=-1, seed=-5, stop=["a", "b", "a"], stream=True,
        stream_options={"include_usage": True}, ignore_eos=True, cache_salt="s", prompt_cache_key="k",
        apply_chat_template=False, add_generation_prompt=False, chat_template_kwargs={"enable_thinking": False},
        save_system_prompt_kv_cache=True,
    )  # fmt: skip
    assert request == ChatRequest(
        model="demo", messages=({"role": "user", "content": "Hi"},), n=2, max_tokens=7, temperature=0.0,
        top_p=0.5, top_k=0, seed=-5, stop=("a", "b"), stream=True, include_usage=True, ignore_eos=True,
        cache_salt="s", prompt_cache_key="k", apply_chat_template=False, add_generation_prompt=False,
        chat_template_kwargs={"enable_thinking": False}, save_system_prompt_kv_cache=True,
    )  # fmt: skip


def test_max_completion_tokens_wins() -> None:
    """The newer name goes before the older one."""
    assert chat(max_tokens=5, max_completion_tokens=9).max_tokens == 9


def test_null_is_absent() -> None:
    """Clients send nulls for what they leave open."""
    nulls = dict.fromkeys(
        ["n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options", "cache_salt",
         "tools", "logprobs", "response_format", "lora_name", "chat_template_kwargs", "user"]
    )  # fmt: skip
    assert chat(**nulls) == chat()
    assert chat(stream=True, stream_options={"include_usage": None}) == chat(stream=True)
    assert chat(messages=[{"role": "user", "content": "Hi", "name": None, "tool_calls": None}]) == chat()
    assert chat(user="u", metadata={"a": 1}, safety_identifier="u", logit_bias={}, store=None) == chat()


@pytest.mark.parametrize("pad", ["", " " * 70_000], ids=["small", "large"])
def test_fields_without_effect_are_named_wherever_they_stand(pad: str) -> None:
    """In the body, its stream options, messages and their parts; null and empty lists say nothing."""
    part = {"type": "text", "text": "Hi" + pad, "cache_control": {}}
    request = chat(
        cache_slat="x",
        tools=[],
        whatever=[1],
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
        UnknownField("whatever"),
        UnknownField("stream_options.include_usag", "stream_options.include_usage"),
        UnknownField("messages[].contnt", "messages[].content"),
        UnknownField("messages[].content[].cache_control"),
    )
    assert request.cache_salt is None


def test_messages_keep_what_a_template_may_use() -> None:
    """Developers become system, parts are joined as they are, an assistant may have no content."""
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


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_prompts_come_in_four_forms(prompt: Any, prompts: tuple[Any, ...]) -> None:
    """Text or ids, one or many."""
    assert complete(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"), ({"model": ""}, "model"), ({"model": 3}, "model"),
        ({"messages": None}, "messages"), ({"messages": []}, "messages"), ({"messages": "Hi"}, "messages"),
        ({"messages": {"role": "user"}}, "messages"), ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0]"),
        ({"temperature": -0.1}, "temperature"), ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"), ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"), ({"top_p": 1.01}, "top_p"), ({"top_k": -2}, "top_k"), ({"top_k": 1.5}, "top_k"),
        ({"n": 0}, "n"), ({"n": 17}, "n"), ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 10**30}, "max_tokens"), ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"seed": 2**63}, "seed"), ({"seed": 1e300}, "seed"),
        ({"stop": ""}, "stop"), ({"stop": ["a", ""]}, "stop"), ({"stop": ["a"] * 17}, "stop"), ({"stop": 5}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stream": "yes"}, "stream"), ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"cache_salt": ""}, "cache_salt"), ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"cache_salt": 1}, "cache_salt"), ({"prompt_cache_key": ""}, "prompt_cache_key"),
        ({"save_system_prompt_kv_cache": "yes"}, "save_system_prompt_kv_cache"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": None}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_a_400_that_names_its_field(fields: dict[str, Any], param: str) -> None:
    """The sentence begins with the field, too."""
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(param.split("[")[0])
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], {}, 5, [""], [[]], ["a", 1], [1, "a"], [True], [-1], [2**31], [1.5], [[1], [None]], ["a"] * 129],
)  # fmt: skip
def test_a_wrong_prompt_is_a_400(prompt: Any) -> None:
    """Every form is checked to the last element."""
    with pytest.raises(InvalidRequest) as caught:
        complete(prompt=prompt)
    assert caught.value.param == "prompt"


def test_prompts_times_n_is_bounded() -> None:
    """One request cannot ask for thousands of answers."""
    assert complete(prompt=["a"] * 8, n=16).n == 16
    with pytest.raises(InvalidRequest, match="at most 14 for 9 prompts"):
        complete(prompt=["a"] * 9, n=16)


@pytest.mark.parametrize(
    ("fields", "neutral"),
    [
        ({"prompt_logprobs": 1}, {"prompt_logprobs": None}), ({"use_beam_search": True}, {"use_beam_search": False}),
        ({"length_penalty": 2}, {"length_penalty": 1}), ({"functions": [{}]}, {"functions": []}),
        ({"modalities": ["text", "audio"]}, {"modalities": ["text"]}), ({"audio": {}}, {"audio": None}),
        ({"guided_json": {}}, {"guided_json": None}),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, Any], neutral: dict[str, Any]) -> None:
    """Ignoring it would be a wrong answer; a value that asks for nothing is fine."""
    (name,) = fields
    with pytest.raises(InvalidRequest, match=f"{name} is not supported by this version") as caught:
        chat(**fields)
    assert caught.value.param == name
    assert chat(**neutral) == chat()


@pytest.mark.parametrize("fields", [{"suffix": "x"}, {"best_of": 2}, {"prompt_logprobs": 0}])
def test_what_completions_lack_is_refused_by_name(fields: dict[str, Any]) -> None:
    """``best_of`` equal to ``n`` asks for nothing."""
    (name,) = fields
    with pytest.raises(InvalidRequest, match=f"{name} is not supported"):
        complete(**fields)
    assert complete(echo=False, suffix="", best_of=3, n=3).n == 3


def test_a_reference_to_a_prompt_is_text() -> None:
    """Which prompts there are is no business of the parser."""
    assert (chat(prompt_ref="a@1").prompt_ref, complete(prompt_ref="a@1").prompt_ref) == ("a@1", "a@1")
    assert chat(prompt_ref=None) == chat()
    for wrong in (3, "", "x" * 257):
        with pytest.raises(InvalidRequest, match="prompt_ref"):
            chat(prompt_ref=wrong)


def test_images_get_a_sentence_about_text() -> None:
    """A part of another type is no mystery to the client."""
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(InvalidRequest, match="text only"):
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Look"}, part]}])


@pytest.mark.parametrize("kind", PARSERS)
@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"null", b"[]", b"3", b'"x"', b"\xff\xfe", b'{"model":"\xff"}', b'{"model":"\\ud800"}',
     b'{"model":"\\udc00x"}', b'{"model":"\xed\xa0\x80"}', b'{"temperature":NaN}', b'{"temperature":Infinity}',
     b'{"temperature":1e999}', b'{"n":' + b"9" * 10_000 + b"}", b'{"a":' * 100_000, b"[" * 1_000_000,
     b'{"model":"x"}{}', b"{'model': 1}", b"\xef\xbb\xbf{}"],
    ids=lambda raw: repr(raw[:24]),
)  # fmt: skip
def test_a_broken_body_is_a_400(kind: str, raw: bytes) -> None:
    """JSON that is broken, not an object, not UTF-8, too deep, or holds what JSON has no word for."""
    with pytest.raises(InvalidRequest) as caught:
        PARSERS[kind][0](raw)
    assert len(caught.value.message) < 300


def test_fields_of_sampling_arrive() -> None:
    """As they were sent; biases by ascending id."""
    request = chat(
        presence_penalty=-2, frequency_penalty=2.0, repetition_penalty=1.1, min_p=0.1, min_tokens=3,
        logit_bias={"9": -100, "5": 1.5}, stop_token_ids=[7, 7, 0], bad_words=["no", "no", " never"],
        include_stop_str_in_output=True, logprobs=True, top_logprobs=20, continue_final_message=True,
    )  # fmt: skip
    assert (request.presence_penalty, request.frequency_penalty, request.repetition_penalty) == (-2.0, 2.0, 1.1)
    assert (request.min_p, request.min_tokens, request.logit_bias) == (0.1, 3, ((5, 1.5), (9, -100.0)))
    assert (request.stop_token_ids, request.bad_words) == ((7, 0), ("no", " never"))
    assert (request.include_stop_str_in_output, request.logprobs) == (True, 20)
    assert (request.continue_final_message, request.add_generation_prompt) == (True, False)
    neutral = chat(
        presence_penalty=0, repetition_penalty=1, logit_bias={}, min_p=0, min_tokens=0, stop_token_ids=[], bad_words=[],
        logprobs=False, top_logprobs=0, response_format={"type": "text"}, structured_outputs={},
    )  # fmt: skip
    assert neutral == chat()
    assert (chat(logprobs=True).logprobs, complete(logprobs=0).logprobs, complete().logprobs) == (0, 0, None)
    assert complete(echo=True).echo


def test_what_an_answer_must_match_is_one_grammar() -> None:
    """By OpenAI's field or by vLLM's; a schema keeps the order of its properties."""
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    wanted = Grammar.json_schema(schema, "response_format.json_schema.schema")
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


DEEP: Any = {"type": "string"}
for _ in range(70):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty"), ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"), ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"min_p": 1.1}, "min_p"), ({"min_tokens": -1}, "min_tokens"), ({"min_tokens": 1.5}, "min_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"), ({"logit_bias": {"1": True}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"), ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"\u00b2": 1}}, "logit_bias"), ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"), ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"), ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"bad_words": "no"}, "bad_words"), ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words"),
        ({"bad_words": ["x"] * 129}, "bad_words"), ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"logprobs": 3}, "logprobs"), ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True, "apply_chat_template": False}, "continue_final_message"),
        ({"response_format": "json"}, "response_format"), ({"response_format": {"type": 3}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}},
         "response_format.json_schema.schema"),
        ({"structured_outputs": 1}, "structured_outputs"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "3"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "(" * 65}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": 5}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_a_wrong_field_of_sampling_is_a_400_that_names_it(fields: dict[str, Any], param: str) -> None:
    """Out of bounds, of another type, too many, too large, too deep, or two that do not go together."""
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(param.split("[")[0])
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("fields", [{"logprobs": 21}, {"logprobs": True}, {"echo": True, "logprobs": 0}, {"echo": 1}])
def test_a_wrong_field_of_completions_is_a_400(fields: dict[str, Any]) -> None:
    """A prompt's tokens have no logprobs, so echo does not go with them."""
    with pytest.raises(InvalidRequest) as caught:
        complete(**fields)
    assert caught.value.param == next(iter(fields))


FIELDS = """
    model messages prompt n best_of max_tokens max_completion_tokens temperature top_p top_k min_p seed stop stream
    stream_options cache_salt prompt_cache_key chat_template_kwargs apply_chat_template add_generation_prompt
    ignore_eos tools tool_choice tool_calls function parameters logprobs top_logprobs logit_bias response_format echo
    suffix lora_name prompt_ref presence_penalty repetition_penalty min_tokens stop_token_ids bad_words
    structured_outputs json regex choice grammar json_schema schema continue_final_message guided_json
    role content type text include_usage
"""
NAMES = st.sampled_from(FIELDS.split())
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-2, 2), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5), st.sampled_from(["user", "system", "assistant", "text", "demo"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)


def _parses_or_refuses(parse: Callable[[bytes], GenerateRequest], raw: bytes) -> None:
    try:
        request = parse(raw)
    except InvalidRequest as error:
        assert error.message
        assert error.status == 400
    else:
        assert 1 <= request.n <= 16
        assert 0 <= request.temperature <= 2
        assert 0 < request.top_p <= 1
        assert all(request.stop)
        hash((request.n, request.temperature, request.top_p, request.top_k, request.seed))
        if isinstance(request, CompletionRequest):
            assert hash(request.prompts)
            assert request.prompts
        else:
            assert isinstance(request, ChatRequest)
            assert request.messages
            assert all(isinstance(message["content"], str) for message in request.messages)


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=400)
@given(raw=st.binary(max_size=200))
def test_any_bytes_parse_or_are_refused(kind: str, raw: bytes) -> None:
    """No other exception gets out of a parser."""
    _parses_or_refuses(PARSERS[kind][0], raw)


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=400)
@given(data=st.data())
def test_any_json_parses_or_is_refused(kind: str, data: st.DataObject) -> None:
    """Any value under any name, over a valid body or alone."""
    parse, valid = PARSERS[kind]
    fields = data.draw(st.dictionaries(NAMES, VALUES, max_size=5))
    body = (valid if data.draw(st.booleans()) else {}) | fields
    _parses_or_refuses(parse, json.dumps(body, ensure_ascii=data.draw(st.booleans())).encode("utf-8", "surrogatepass"))
