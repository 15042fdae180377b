"""One conversation with tools over several APIs: each reads what the others computed. (docs: api)"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice, permutations
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from benchmarks.common.server import instance
from tests.clients.model import Errand, trained
from tests.integration.conftest import HTTP, PATIENCE_S, alone

pytestmark = [pytest.mark.integration, pytest.mark.long]

MODEL = "errands"
BLOCK = 16
ERRANDS = [
    Errand(word, ("write_note", {"text": word, "title": f"page {n}"}), ("show_note", {"title": f"page {n}"}))
    for n, word in enumerate(("juniper", "quartz", "saffron", "walnut"))
]


@dataclass(frozen=True, slots=True)
class Chain:
    """Errands of one conversation, in their order."""

    errands: list[Errand]

    @property
    def marks(self) -> list[str]:
        """Their marks, one after another."""
        return [mark for errand in self.errands for mark in errand.marks]

    @property
    def answers(self) -> list[list[str]]:
        """Their answers, one after another."""
        return [answer for errand in self.errands for answer in errand.answers]


CLERK = "You keep notes. " + "Write each word to its own page, then show that page in capitals. " * 20
TOOLS = {
    "write_note": {"type": "object", "properties": {"text": {"type": "string"}, "title": {"type": "string"}}},
    "show_note": {"type": "object", "properties": {"title": {"type": "string"}}},
}


@dataclass(slots=True)
class Answer:
    """A model's answer: text, or a call with its arguments as JSON; the tokens of its request."""

    text: str
    call: tuple[str, str, str] | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Talk:
    """A conversation in no API's form: ("user", text), ("answer", Answer) and ("result", id, text)."""

    url: str
    system: str
    turns: list[tuple[Any, ...]] = field(default_factory=list)

    def chat(self) -> Answer:
        """Continue by chat completions."""
        messages: list[Any] = [{"role": "system", "content": self.system}]
        for kind, *rest in self.turns:
            if kind == "user":
                messages.append({"role": "user", "content": rest[0]})
            elif kind == "result":
                messages.append({"role": "tool", "tool_call_id": rest[0], "content": rest[1]})
            else:
                messages.append({"role": "assistant", "content": rest[0].text or None})
                if rest[0].call:
                    number, name, arguments = rest[0].call
                    function = {"name": name, "arguments": arguments}
                    messages[-1]["tool_calls"] = [{"id": number, "type": "function", "function": function}]
        tools: Any = [
            {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
            for name, schema in TOOLS.items()
        ]
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=PATIENCE_S, http_client=HTTP)
        found = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, temperature=0)
        usage: Any = found.usage
        message: Any = found.choices[0].message
        calls = [(one.id, one.function.name, one.function.arguments) for one in message.tool_calls or ()]
        cached = usage.prompt_tokens_details.cached_tokens
        return Answer(
            message.content or "", next(iter(calls), None), usage.prompt_tokens, cached, usage.completion_tokens
        )

    def responses(self) -> Answer:
        """Continue by responses."""
        items: list[Any] = []
        for kind, *rest in self.turns:
            if kind == "user":
                items.append({"role": "user", "content": rest[0]})
            elif kind == "result":
                items.append({"type": "function_call_output", "call_id": rest[0], "output": rest[1]})
            elif rest[0].call:
                number, name, arguments = rest[0].call
                items.append({"type": "function_call", "call_id": number, "name": name, "arguments": arguments})
            else:
                items.append({"role": "assistant", "content": rest[0].text})
        tools: Any = [
            {"type": "function", "name": name, "description": name, "parameters": schema, "strict": None}
            for name, schema in TOOLS.items()
        ]
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=PATIENCE_S, http_client=HTTP)
        found = client.responses.create(
            model=MODEL, instructions=self.system, input=items, tools=tools, temperature=0, store=False
        )
        usage: Any = found.usage
        calls = [(one.call_id, one.name, one.arguments) for one in found.output if one.type == "function_call"]
        cached = usage.input_tokens_details.cached_tokens
        return Answer(found.output_text, next(iter(calls), None), usage.input_tokens, cached, usage.output_tokens)

    def messages(self) -> Answer:
        """Continue by Anthropic's messages."""
        messages: list[Any] = []
        for kind, *rest in self.turns:
            if kind == "user":
                messages.append({"role": "user", "content": rest[0]})
            elif kind == "result":
                block = {"type": "tool_result", "tool_use_id": rest[0], "content": rest[1]}
                messages.append({"role": "user", "content": [block]})
            elif rest[0].call:
                number, name, arguments = rest[0].call
                block = {"type": "tool_use", "id": number, "name": name, "input": json.loads(arguments)}
                messages.append({"role": "assistant", "content": [block]})
            else:
                messages.append({"role": "assistant", "content": rest[0].text})
        tools: Any = [{"name": name, "description": name, "input_schema": schema} for name, schema in TOOLS.items()]
        client = Anthropic(base_url=self.url, api_key="none", timeout=PATIENCE_S)
        found = client.messages.create(
            model=MODEL,
            max_tokens=200,
            system=self.system,
            messages=messages,
            tools=tools,
            extra_body={"temperature": 0},
        )
        text = "".join(block.text for block in found.content if block.type == "text")
        calls = [(one.id, one.name, json.dumps(one.input)) for one in found.content if one.type == "tool_use"]
        read = found.usage.cache_read_input_tokens or 0
        prompt = found.usage.input_tokens + read
        return Answer(text, next(iter(calls), None), prompt, read, found.usage.output_tokens)

    def go_on(self, answer: Answer) -> None:
        """Add an answer and what follows it: the tool's result."""
        self.turns.append(("answer", answer))
        if answer.call:
            number, name, arguments = answer.call
            title = json.loads(arguments)["title"]
            word = ERRANDS[int(title.removeprefix("page "))].word
            self.turns.append(("result", number, word.upper() if name == "show_note" else "done"))


@pytest.fixture(scope="module")
def url(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One replica of the model that runs the errands."""
    path = trained([Chain(ERRANDS)], demo_model_path, tmp_path_factory.mktemp("trained") / MODEL)
    settings = ("replicas=1", "dtype=float32", "kv_cache_bytes=134217728")
    with alone(instance("--model", str(path), *(f"--set={setting}" for setting in settings))) as base:
        yield base


ORDERS = [*permutations(("chat", "responses", "messages"), 2), ("chat", "responses", "messages")]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_a_conversation_goes_on_over_another_api_from_the_same_cache(order: tuple[str, ...], url: str) -> None:
    """Four errands in twelve requests, each over the next API: nearly all that was computed before is read.

    At most whole blocks can be read, and not the last token of an answer, which nobody has computed.
    """
    talk = Talk(url, f"{'-'.join(order)}. {CLERK}")
    answers: list[Answer] = []
    apis = cycle(order)
    for errand in ERRANDS:
        talk.turns.append(("user", errand.asked))
        for wanted in (errand.writes, errand.shows):
            answers.append(getattr(talk, next(apis))())
            call = answers[-1].call
            assert call is not None and (call[1], json.loads(call[2])) == wanted
            talk.go_on(answers[-1])
        answers.append(getattr(talk, next(apis))())
        assert (answers[-1].text, answers[-1].call) == (errand.ends, None)
        talk.go_on(answers[-1])
    known = [(each.prompt_tokens + each.output_tokens - 1) // BLOCK * BLOCK for each in answers]
    share = sum(each.cached_tokens for each in islice(answers, 1, None)) / sum(known[:-1])
    assert answers[0].cached_tokens < known[0] / 2  # the tools, which come first, are the same in all orders
    assert share >= 0.99, [(each.prompt_tokens, each.cached_tokens, each.output_tokens) for each in answers]
