"""Large bodies are read field by field if they have few enough values; unknown fields are named."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from serve_app.api.json_body import JsonBody, _count_fields, _count_values
from serve_app.api.openai.request import ChatBody, CompletionBody, parse_chat, parse_completion
from serve_app.api.request import MAX_TOLD, UnknownField, ignored_fields, require_none, unknown_fields
from serve_app.errors import InvalidRequest


@pytest.mark.parametrize(
    ("body", "parse", "field"),
    [
        (b'{"messages": [' + b",".join([b'{"role": "user"}'] * 140_000) + b"]}", parse_chat, "messages"),
        (b'{"messages": [{"content": [' + b",".join([b"{}"] * 140_000) + b"]}]}", parse_chat, "messages"),
        (b'{"prompt": [' + b",".join([b"1"] * 1_100_000) + b"]}", parse_completion, "prompt"),
    ],
)
def test_a_body_of_very_many_values_is_refused_unread(
    body: bytes, parse: Any, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No value of the field with too many is decoded; the error names it. (docs: routing)"""
    decoded: list[int] = []
    decode = msgspec.json.decode
    monkeypatch.setattr("msgspec.json.decode", lambda raw, **more: decoded.append(len(raw)) or decode(raw, **more))
    with pytest.raises(InvalidRequest, match="send fewer") as refused:
        parse(body)
    assert refused.value.param == field
    assert sum(decoded) < 100


def test_unknown_fields_are_not_decoded() -> None:
    """Millions of values in an unknown field cost nothing; refused fields are seen at any size."""
    unknown = b'"metadata_of_mine": [' + b",".join([b"{}"] * 300_000) + b"]"
    assert parse_completion(b'{"model": "demo", "prompt": "a", ' + unknown + b"}").prompts == ("a",)
    with pytest.raises(InvalidRequest, match="suffix is not supported"):
        parse_completion(b'{"model": "demo", "prompt": "a", "suffix": "x", ' + unknown + b"}")


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text('a,"\\\n{é', max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text('k"\\,[{', max_size=3), inner, max_size=3)
    ),
    max_leaves=20,
)


def commas_and_brackets(value: Any) -> int:
    """Count the commas and opening brackets of a value's JSON text by traversing the value."""
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(0, len(value) - 1) + sum(map(commas_and_brackets, inner))


@given(value=VALUES, ascii_only=st.booleans())
def test_the_content_of_strings_does_not_count(value: Any, ascii_only: bool) -> None:
    assert _count_values(json.dumps(value, ensure_ascii=ascii_only).encode()) == commas_and_brackets(value) + 1


@given(value=VALUES, ascii_only=st.booleans())
def test_a_bodys_own_fields_are_counted(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert _count_fields(text) == (len(value) if isinstance(value, dict) else 0)


def test_a_body_has_a_bound_of_fields() -> None:
    """Decoding the names of hundreds of thousands would hold up all threads; those in a skipped value do not."""
    many = ",".join(f'"k{number}": 0' for number in range(20_000))
    with pytest.raises(InvalidRequest, match="over 16384 fields; send fewer"):
        parse_completion(f'{{"model": "demo", "prompt": "a", {many}}}'.encode())
    kept = parse_completion(f'{{"model": "demo", "prompt": "a", "unknown": {{{many}}}}}'.encode())
    assert [field.name for field in kept.unknown] == ["unknown"]


@pytest.mark.parametrize(("name", "most"), [("chat_template_kwargs", 4096), ("stop", 16384), ("modalities", 16384)])
def test_each_field_has_a_bound_of_values(name: str, most: int) -> None:
    """Also those for which nobody thought of one."""
    many = ",".join(f'"k{number}": 0' for number in range(20_000))
    with pytest.raises(InvalidRequest, match=f"{name} holds over {most} values; send fewer") as caught:
        ChatBody.parse(f'{{"model": "demo", "messages": [], "{name}": {{{many}}}}}'.encode())
    assert caught.value.param == name


@settings(max_examples=200)
@given(fields=st.dictionaries(st.sampled_from([*ChatBody.model_fields, "echo", "logprobs", "x"]), VALUES, max_size=6))
@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_size_changes_no_answer(body: Any, fields: dict[str, Any]) -> None:
    """A body made large by blanks is accepted or refused exactly as the small one, in the same words."""

    def outcome(raw: bytes) -> Any:
        try:
            parsed = body.parse(raw)
            return parsed.model_dump(include={*body.model_fields}), parsed.unknown()
        except InvalidRequest as error:
            return error.message, error.param

    raw = json.dumps(fields).encode()
    assert outcome(raw) == outcome(raw[:-1] + b" " * 70_000 + raw[-1:])


KNOWN = ("cache_salt", "max_tokens", "temperature")


@given(st.lists(st.text(max_size=200), max_size=20))
def test_a_header_can_hold_any_field_names(names: list[str]) -> None:
    """Line ends would start other headers, and the text stays short for any number of names."""
    told = ignored_fields(unknown_fields(names, KNOWN))
    assert told.isascii() and (told.isprintable() or not told)
    assert len(told) < 100 * (MAX_TOLD + 1)
    assert bool(told) == bool(names)


def test_a_misspelt_name_is_told_with_the_one_that_is_meant() -> None:
    found = unknown_fields(["cache_slat", "sparkle"], KNOWN)
    assert found == (UnknownField("cache_slat", "cache_salt"), UnknownField("sparkle"))
    assert ignored_fields(found) == "unknown fields ignored: cache_slat (did you mean cache_salt?), sparkle"
    require_none(())
    with pytest.raises(InvalidRequest, match="did you mean 'cache_salt'"):
        require_none(found)
    with pytest.raises(InvalidRequest) as caught:
        require_none(found[1:])
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "sparkle", "unknown_parameter")
    assert caught.value.message == "Unknown parameter: 'sparkle'; leave it out."


class Plain(JsonBody):
    """Fields whose bounds stand beside the type."""

    name: str = Field(max_length=64)
    label: str | None = None
    number: int = 0
    seconds: float = Field(1.0, ge=0, le=5)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{}", "name is missing; it must be a string of 0 to 64 characters."),
        (b'{"name": 5}', "name must be a string of 0 to 64 characters."),
        (b'{"name": "a", "label": []}', "label must be a string."),
        (b'{"name": "a", "number": "x"}', "number must be a whole number."),
        (b'{"name": "a", "seconds": 9}', "seconds must be a number from 0 to 5."),
    ],
)
def test_a_demand_follows_from_a_fields_type_and_bounds(body: bytes, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Plain.parse(body)
    assert refused.value.message == sentence
