"""The four APIs as one table: how a request is written for each, and how its answers are read, by its own client."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.serve_app.ingress.scripted import PATIENCE_S, Script
from tests.serve_app.tool_templates.families import WEATHER

Fields = dict[str, Any]


class Clients(NamedTuple):
    """The real clients of one server."""

    openai: OpenAI
    anthropic: Anthropic


@contextmanager
def clients_of(url: str) -> Iterator[Clients]:
    with (
        OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as openai,
        Anthropic(base_url=url, api_key="k", max_retries=0) as anthropic,
    ):
        yield Clients(openai, anthropic)


class ReadAnswer(NamedTuple):
    """What an answer says. ``ended``: in its API's word; ``calls``: with their arguments' text; ``tier``: "": none.

    ``parts``: the kinds of its items or blocks in order, of text, thought and call; ``counts``: tokens of the prompt,
    cached ones, and of the output.
    """

    text: str
    ended: Any
    thought: str
    calls: list[tuple[str, str]]
    parts: list[str]
    counts: tuple[int, int, int]
    tier: Any


def _chat(clients: Clients, stream: bool, fields: Fields) -> ReadAnswer:
    """Read a chat or a completion: what its chunks add up to; the client's own assembly refuses one that was cut."""
    client, asked = clients.openai, {"model": "demo", "extra_body": fields, "stream": stream}
    if stream:
        asked["extra_body"] = {**fields, "stream_options": {"include_usage": True}}
    create: Any = client.completions.create if "prompt" in fields else client.chat.completions.create
    answer = create(**asked, **({"prompt": ""} if "prompt" in fields else {"messages": []}))
    chunks = [chunk.to_dict() for chunk in (answer if stream else [answer])]
    role = None if "prompt" in fields else "assistant"
    assert not stream or chunks[0]["choices"][0].get("delta", {}).get("role") == role
    said, ended, calls = dict[str, str](), None, list[tuple[str, str]]()
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        ended, delta = choice["finish_reason"] or ended, choice.get("delta") or choice.get("message") or choice
        for name in ("text", "content", "reasoning", "reasoning_content"):
            if delta.get(name) is not None and (not stream or delta[name]):
                said[name] = said.get(name, "") + delta[name]
        for at, call in enumerate(delta.get("tool_calls") or ()):
            if "id" in call:
                calls.append((call["function"]["name"], ""))
            name, arguments = calls[call.get("index", at)]
            calls[call.get("index", at)] = name, arguments + call["function"]["arguments"]
    thought = said.pop("reasoning", None)
    assert said.pop("reasoning_content", None) == thought, "both names that clients read"
    parts = ["thought"] * (thought is not None) + ["text"] * len(said) + ["call"] * len(calls)
    (tier,), usage = {chunk.get("service_tier", "") for chunk in chunks}, chunks[-1]["usage"]
    counts = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
    return ReadAnswer("".join(said.values()), ended, thought or "", calls, parts, counts, tier)


def _response(clients: Clients, stream: bool, fields: Fields) -> ReadAnswer:
    """Read a response: one that was cut off is incomplete, and so is its last item."""
    response: Any = clients.openai.responses.create(model="demo", stream=stream, extra_body=fields)
    if stream:
        first, *_, last = response
        response = last.response
        assert last.type == f"response.{response.status}" and first.response.service_tier == response.service_tier
    why = response.incomplete_details and response.incomplete_details.reason
    assert response.output[-1].status == response.status == ("incomplete" if why else "completed")
    thought = "".join(item.content[0].text for item in response.output if item.type == "reasoning")
    calls = [(item.name, item.arguments) for item in response.output if item.type == "function_call"]
    kinds = {"message": "text", "reasoning": "thought", "function_call": "call"}
    parts, usage = [kinds[item.type] for item in response.output], response.usage
    counts = usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens
    return ReadAnswer(
        response.output_text, why or response.status, thought, calls, parts, counts, response.service_tier
    )


def _message(clients: Clients, stream: bool, fields: Fields) -> ReadAnswer:
    """Read a message as the client builds it, with the arguments as they came."""
    asked: Any = {"model": "demo", "max_tokens": 60, "messages": [], "extra_body": fields}
    came: dict[int, str] = {}
    if stream:
        with clients.anthropic.messages.stream(**asked) as events:
            for event in events:
                if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                    came[event.index] = came.get(event.index, "") + event.delta.partial_json
            message: Any = events.get_final_message()
    else:
        message = clients.anthropic.messages.create(**asked)
    blocks, usage = message.content, message.usage
    text = "".join(block.text for block in blocks if block.type == "text")
    thought = "".join(block.thinking for block in blocks if block.type == "thinking")
    calls = [
        (block.name, came.get(at, "") if stream else json.dumps(block.input))
        for at, block in enumerate(blocks) if block.type == "tool_use"
    ]  # fmt: skip
    parts = [{"text": "text", "thinking": "thought", "tool_use": "call"}[block.type] for block in blocks]
    prompt = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    counts = prompt, usage.cache_read_input_tokens, usage.output_tokens
    return ReadAnswer(text, message.stop_reason, thought, calls, parts, counts, usage.service_tier)


@dataclass(frozen=True)
class Api:
    """One API. ``user``, ``system``, ``tool``, ``format``: fields for a text, a function, a schema.

    ``ends``: its words for the ends of answers by the model, the length, a call, a string.
    """

    path: str
    ends: tuple[str, str, str, str]
    read: Callable[[Clients, bool, Fields], ReadAnswer]
    user: Callable[[str], Fields]
    system: Callable[[str], Fields]
    stop: str = "stop"
    tool: Callable[[Fields], Fields] = lambda function: {"type": "function", "function": function}
    format: Callable[[Fields], Fields] = lambda form: {"response_format": {**form, "json_schema": form}}

    @property
    def body(self) -> Fields:
        return self.user("Hi")

    def whole(self, clients: Clients, **fields: Any) -> ReadAnswer:
        return self.read(clients, False, {**self.body, **fields})

    def streamed(self, clients: Clients, **fields: Any) -> ReadAnswer:
        return self.read(clients, True, {**self.body, **fields})

    def post(self, url: str, **fields: Any) -> httpx.Response:
        return httpx.post(url + self.path, json={"model": "demo", **self.body, **fields}, timeout=2 * PATIENCE_S)

    def tools(self, *functions: Fields, choice: str = "auto") -> Fields:
        """Return the fields of a request with these tools; ``choice``: auto or required."""
        named: Any = {"type": choice.replace("required", "any")} if self is MESSAGES else choice
        return {"tools": [self.tool(one) for one in functions or (WEATHER["function"],)], "tool_choice": named}


def _said(text: str) -> Fields:
    return {"messages": [{"role": "user", "content": text}]}


CHAT = Api(
    "/v1/chat/completions", ("stop", "length", "tool_calls", "stop"), _chat, _said,
    lambda text: {"messages": [{"role": "system", "content": text}, *_said("Hi")["messages"]]},
)  # fmt: skip
COMPLETIONS = Api(
    "/v1/completions", ("stop", "length", "", "stop"), _chat,
    lambda text: {"prompt": text}, lambda text: {"prompt": text},
)  # fmt: skip
RESPONSES = Api(
    "/v1/responses", ("completed", "max_output_tokens", "completed", ""), _response,
    lambda text: {"input": text}, lambda text: {"instructions": text}, "",
    lambda function: {"type": "function", **function}, lambda form: {"text": {"format": form}},
)  # fmt: skip
MESSAGES = Api(
    "/v1/messages", ("end_turn", "max_tokens", "tool_use", "stop_sequence"), _message,
    lambda text: {**_said(text), "max_tokens": 60}, lambda text: {"system": text}, "stop_sequences",
    lambda function: {"input_schema" if name == "parameters" else name: value for name, value in function.items()},
    lambda form: {"output_config": {"format": form}},
)  # fmt: skip
APIS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
every_api = pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
every_chat = pytest.mark.parametrize("api", (CHAT, RESPONSES, MESSAGES), ids=lambda api: api.path)


def assert_same_events(url: str, script: Script, api: Api, **fields: Any) -> None:
    """Check that bytes are equal if tokens go directly from the channel to the connection or through waiting tasks."""
    before, events = script.taken, list[str]()
    for script.offers in (True, False):
        text = api.post(url, stream=True, **fields).text
        events.append(re.sub(r"[0-9a-zA-Z]{24,}|\"(created|completed)(_at)?\":[0-9.]+", "", text))
    assert events[0] == events[1] != ""
    assert script.taken > before
