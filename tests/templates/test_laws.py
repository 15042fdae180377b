"""Over real chat templates: nothing that is said gets lost, prefixes hold, and every API says the same."""

import copy
import json
import os
from collections.abc import Callable
from functools import cache
from typing import Any

from hypothesis import HealthCheck, given, settings

from serve_app.api.anthropic.request import parse_messages
from serve_app.api.openai.request import parse_chat
from serve_app.api.openai.responses.request import parse_response_request
from serve_app.api.request import ChatRequest
from serve_app.checkpoints.demo_model import ensure_demo_model
from serve_app.tokenization.chat_template import ChatTemplate
from tests.harness.growth import grows_too_fast
from tests.templates.conversations import Talk, chat_body, messages_body, responses_body, talks
from tests.templates.wheel import chat_templates, each_template

CONVERSATIONS = int(os.environ.get("WARMPATH_CONVERSATIONS", "200"))
law = settings(
    max_examples=CONVERSATIONS, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


@cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ensure_demo_model("demo"), local_files_only=True)


@cache
def template(name: str) -> ChatTemplate:
    """Return a real template, on the demo model's tokenizer."""
    tokenizer = copy.copy(_tokenizer())
    tokenizer.chat_template = chat_templates()[name]
    return ChatTemplate(tokenizer)


def rendered(name: str, parse: Callable[[bytes], ChatRequest], body: dict[str, Any]) -> str:
    """Return the prompt of a body."""
    asked, shown = parse(json.dumps({"model": "m"} | body).encode()), template(name)
    return shown.render(asked.messages, asked.tool_use.tools if shown.reads_tools else ()).text


def wanted(name: str, talk: Talk) -> Talk:
    """Return a talk without tools if the template shows none; requests with tools get a 400 then."""
    return talk if template(name).reads_tools else talk._replace(tools=())


@each_template()
def test_nothing_is_lost(name: str) -> None:
    """Every text, call, result and tool is in the prompt."""

    @law
    @given(talk=talks())
    def check(talk: Talk) -> None:
        talk = wanted(name, talk)
        for parse, body in ((parse_chat, chat_body(talk)), (parse_response_request, responses_body(talk))):
            text = rendered(name, parse, body)
            assert {mark for mark in talk.marks() if mark not in text} == set()

    check()


@each_template()
def test_every_api_says_the_same(name: str) -> None:
    """So that a conversation that goes on by another API finds its prefix. Ids have any form."""

    @law
    @given(talk=talks(plain=True))
    def check(talk: Talk) -> None:
        talk = wanted(name, talk)
        chat = rendered(name, parse_chat, chat_body(talk))
        assert rendered(name, parse_response_request, responses_body(talk)) == chat
        assert rendered(name, parse_messages, messages_body(talk)) == chat

    check()


@each_template()
def test_a_call_that_was_cut_off_is_taken_back(name: str) -> None:
    """With a text or without, at any character, and the conversation goes on."""
    arguments = json.dumps({"qzkey": "qzvalue", "list": [1, {"a": None}]})
    for end in range(len(arguments)):
        call = {"id": "call_1", "type": "function", "function": {"name": "qzname", "arguments": arguments[:end]}}
        said = {"role": "assistant", "content": "qzanswer" if end % 2 else None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "call_1", "content": "qzresult"}
        messages = [{"role": "user", "content": "qzuser"}, said, result, {"role": "user", "content": "qzlast"}]
        text = rendered(name, parse_chat, {"messages": messages})
        assert all(mark in text for mark in ("qzuser", "qzname", "qzresult", "qzlast", *["qzanswer"] * (end % 2)))


def long_talk(turns: int) -> dict[str, Any]:
    """Return a chat in which an agent calls two tools a turn."""
    said: list[Any] = [{"role": "user", "content": "Go"}]
    for turn in range(turns):
        calls = [
            {"id": f"c{turn}-{at}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for at in "ab"
        ]
        said.append({"role": "assistant", "content": f"{turn}", "tool_calls": calls})
        said += [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls]
        said += [{"role": "assistant", "content": "So far."}, {"role": "user", "content": f"And {turn}?"}]
    return {"messages": said}


@each_template()
def test_a_long_talk_is_rendered_in_time_that_grows_with_it(name: str) -> None:
    """By templates that look back, too, and with what mends their prompts."""
    talks = {
        turns: parse_chat(json.dumps({"model": "m"} | long_talk(turns)).encode()).messages for turns in (400, 1600)
    }
    shown = template(name)
    assert not grows_too_fast(lambda turns: shown.render(talks[turns]), 1600, 1600)
