"""Valid bodies, and the check of errors for invalid ones."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.api.anthropic.request import parse_messages
from serve_app.api.openai.request import parse_chat, parse_completion
from serve_app.api.openai.responses.request import parse_response_request
from serve_app.api.request import ChatRequest, CompletionRequest
from serve_app.errors import InvalidRequest

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "Hi"}
PARSERS = {
    "chat": (parse_chat, CHAT),
    "completion": (parse_completion, COMPLETION),
    "response": (parse_response_request, {"model": "demo", "input": "Hi"}),
    "message": (parse_messages, {**CHAT, "max_tokens": 5}),
}


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps(CHAT | fields).encode())


def complete(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps(COMPLETION | fields).encode())


def assert_refused(parse: Callable[..., Any], fields: dict[str, Any], param: str, words: str = "") -> None:
    """Check that these fields give a 400 that names the wrong one; without ``words`` the message begins with it."""
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in caught.value.message
    assert words or caught.value.message.startswith(param.split("[")[0])
    assert len(caught.value.message) < 300
