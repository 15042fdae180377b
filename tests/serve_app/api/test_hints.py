"""Hints in bodies: each name is read, and nothing that a client may write there fails a request."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.hints import Hints
from serve_app.api.openai.request import parse_chat
from tests.serve_app.api.openai.bodies import PARSERS

CONTEXT = {"session_id": "one", "parent_session_id": "above", "session_final": True}
HI: Any = [{"role": "user", "content": "Hi"}]
BODIES = {parse: body for name, (parse, body) in PARSERS.items() if name != "completion"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
ANY = st.fixed_dictionaries(
    {},
    optional={
        "agent_context": JSON | st.fixed_dictionaries({}, optional=dict.fromkeys(CONTEXT, JSON)),
        "agent_hints": JSON | st.fixed_dictionaries({}, optional={"osl": JSON, "priority": JSON}),
    },
)


@pytest.mark.parametrize("parse", BODIES)
def test_both_fields_name_session_parent_and_end(parse: Any) -> None:
    body = {"model": "m", **BODIES[parse]}
    hints = {"agent_context": CONTEXT, "agent_hints": {"osl": 300, "priority": 5}}
    read = parse(json.dumps({**body, "nvext": hints}).encode())
    told = (read.session, read.parent, read.final, read.expected_tokens, read.priority)
    assert told == ("one", "above", True, 300, -5), "Dynamo's highest priority goes first, ours is the lowest"
    read = parse(json.dumps({**body, "metadata": {**CONTEXT, "session_final": "true"}}).encode())
    assert (read.session, read.parent, read.final) == ("one", "above", True)
    assert not read.unknown


def test_an_own_priority_and_other_names_of_the_session_keep_their_places() -> None:
    body: dict[str, Any] = {"model": "m", "messages": HI, "prompt_cache_key": "key"}
    assert parse_chat(json.dumps(body).encode()).session == "key"
    body |= {"priority": 2, "nvext": {"agent_hints": {"priority": 9}}, "metadata": {"session_id": "one"}}
    read = parse_chat(json.dumps(body).encode())
    assert (read.session, read.priority) == ("one", 2)


def test_unread_hints_are_named() -> None:
    nvext = {"agent_hints": {"speculative_prefill": True, "osl": 1}, "annotations": []}
    read = parse_chat(json.dumps({"model": "m", "messages": HI, "nvext": nvext}).encode())
    assert [field.name for field in read.unknown] == ["nvext.annotations", "nvext.agent_hints.speculative_prefill"]


@pytest.mark.parametrize("parse", BODIES)
@pytest.mark.parametrize("size", [1, 70_000])
def test_a_large_body_has_them_too(parse: Any, size: int) -> None:
    body = {"model": "m", **BODIES[parse], "nvext": {"agent_context": CONTEXT}, "unread": "x" * size}
    assert parse(json.dumps(body).encode()).parent == "above"


@given(nvext=JSON | ANY, metadata=JSON | st.fixed_dictionaries({}, optional=dict.fromkeys(CONTEXT, JSON)))
def test_anything_else_is_ignored(nvext: Any, metadata: Any) -> None:
    """What is read has the right type and a bounded size."""
    hints = Hints.of(nvext, metadata)
    assert len(hints.session) <= 256 and len(hints.parent) <= 256 and isinstance(hints.final, bool)
    assert hints.output_tokens >= 0 and abs(hints.priority) < 2**31
    body = {"model": "m", "messages": HI, "nvext": nvext, "metadata": metadata}
    assert parse_chat(json.dumps(body).encode()).session == hints.session
