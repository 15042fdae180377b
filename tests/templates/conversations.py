"""Conversations as a client of any API may send them: each text, name and argument in them is a mark of its own."""

import json
from typing import Any, NamedTuple

from hypothesis import strategies as st

IDS = ("call_{}", "toolu_01A{}bcdefghijklmnop", "{}", "chatcmpl-tool-9f8e7d6c5b4a{}", "functions.f:{}", "a1b2c3d4{}")


class Said(NamedTuple):
    """A turn of one side. ``calls``: an assistant's, as (id, name, arguments); ``results``: ids and texts after it."""

    role: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str, dict[str, Any]], ...] = ()
    results: tuple[tuple[str, str], ...] = ()
    refused: bool = False
    in_parts: bool = False


class Talk(NamedTuple):
    """A conversation and the functions that it may call, as (name, description, parameters)."""

    turns: tuple[Said, ...]
    tools: tuple[tuple[str, str | None, dict[str, Any] | None], ...] = ()

    def marks(self) -> set[str]:
        """Return what the prompt has to show."""
        found = {turn.text for turn in self.turns} | {tool[0] for tool in self.tools}
        for turn in self.turns:
            found.update(text for _, text in turn.results)
            for _, name, arguments in turn.calls:
                # A template may leave out a null.
                found |= {name, *(key for key, value in arguments.items() if value is not None)}
                found |= {value for value in arguments.values() if isinstance(value, str)}
        return found - {""}


@st.composite
def talks(draw: st.DrawFn, *, tools: bool = True, plain: bool = False) -> Talk:
    """Draw a conversation. ``plain``: one that every API can say in the same way."""
    numbers = iter(range(10_000))
    id_form = draw(st.sampled_from(IDS))

    def mark(kind: str, *, empty: bool = False) -> str:
        return "" if empty and draw(st.integers(0, 5)) == 0 else f"qz{kind}{next(numbers)}z"

    def assistant() -> Said:
        calls = tuple(
            (
                id_form.format(next(numbers)),
                mark("name"),
                {mark("key"): draw(st.sampled_from([mark("value"), 7, True, None, [mark("item")], {mark("in"): 1}]))}
                if draw(st.booleans())
                else {},
            )
            for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3])))
        )
        text = mark("answer", empty=True) if not calls or draw(st.booleans()) else ""
        results = tuple((call[0], mark("result", empty=True)) for call in calls)
        refused = not plain and bool(text) and not calls and draw(st.integers(0, 7)) == 0
        reasoning = mark("thought") if draw(st.integers(0, 3)) == 0 else ""
        return Said("assistant", text, reasoning, calls, results, refused)

    system_roles = draw(st.lists(st.sampled_from(["system", "developer"]), max_size=1 if plain else 3))
    turns = [Said(role, mark("system")) for role in system_roles]
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(
            st.sampled_from(["user", "assistant"] if plain else ["user", "user", "assistant", "assistant", "system"])
        )
        if plain and kind == "assistant" and turns and turns[-1].role == kind and not turns[-1].calls:
            continue  # Responses takes a text and the calls after it as one turn
        if kind == "assistant":
            turns.append(assistant())
        else:
            turns.append(Said(kind, mark(kind, empty=kind == "user"), in_parts=draw(st.booleans())))
    if plain or draw(st.integers(0, 3)):
        turns.append(Said("user", mark("user")))
    functions = []
    for _ in range(draw(st.integers(0, 2)) if tools else 0):
        parameters = {"type": "object", "properties": {mark("parameter"): {"type": "string"}}}
        described = draw(st.sampled_from([None, "", "qzdescription"]))
        bare = {"type": "object", "properties": {}}
        wanted = draw(st.sampled_from([parameters, bare] if plain else [None, parameters, bare]))
        functions.append((mark("tool"), described, wanted))
    return Talk(tuple(turns), tuple(functions))


def _functions(talk: Talk) -> list[dict[str, Any]]:
    named = ({"name": name, "description": said, "parameters": wanted} for name, said, wanted in talk.tools)
    return [{name: value for name, value in function.items() if value is not None} for function in named]


def _parts(turn: Said, kind: str) -> Any:
    return [{"type": kind, "text": turn.text}] if turn.in_parts else turn.text


def chat_body(talk: Talk) -> dict[str, Any]:
    """Return a conversation as a body of /v1/chat/completions."""
    messages: list[dict[str, Any]] = []
    for turn in talk.turns:
        message: dict[str, Any] = {"role": turn.role, "content": _parts(turn, "text")}
        if turn.refused:
            message |= {"content": None, "refusal": turn.text}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                for call_id, name, arguments in turn.calls
            ]
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in turn.results]
    tools = [{"type": "function", "function": function} for function in _functions(talk)]
    return {"messages": messages, **({"tools": tools} if tools else {})}


def responses_body(talk: Talk) -> dict[str, Any]:
    """Return a conversation as a body of /v1/responses."""
    items: list[dict[str, Any]] = []
    for turn in talk.turns:
        if turn.reasoning:
            content = [{"type": "reasoning_text", "text": turn.reasoning}]
            items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": content})
        said = "output_text" if turn.role == "assistant" else "input_text"
        if turn.refused:
            items.append({"role": turn.role, "content": [{"type": "refusal", "refusal": turn.text}]})
        elif turn.text or not turn.calls:
            items.append({"role": turn.role, "content": _parts(turn, said)})
        for call_id, name, arguments in turn.calls:
            arguments_text = json.dumps(arguments)
            items.append({"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments_text})
        items += [{"type": "function_call_output", "call_id": call, "output": text} for call, text in turn.results]
    tools = [{"type": "function", **function} for function in _functions(talk)]
    return {"input": items, "store": False, **({"tools": tools} if tools else {})}


def messages_body(talk: Talk) -> dict[str, Any]:
    """Return a plain conversation as a body of /v1/messages."""
    messages: list[dict[str, Any]] = []
    system = "".join(turn.text for turn in talk.turns if turn.role in ("system", "developer"))
    for turn in talk.turns:
        if turn.role in ("system", "developer"):
            continue
        blocks: list[dict[str, Any]] = []
        if turn.reasoning:
            blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": "s"})
        if turn.text or not turn.calls:
            blocks.append({"type": "text", "text": turn.text})
        for call_id, name, arguments in turn.calls:
            blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": arguments})
        messages.append({"role": turn.role, "content": blocks})
        if turn.results:
            content = [{"type": "tool_result", "tool_use_id": call, "content": text} for call, text in turn.results]
            messages.append({"role": "user", "content": content})
    tools = [
        {"name": function.pop("name"), "input_schema": function.pop("parameters", {"type": "object"}), **function}
        for function in _functions(talk)
    ]
    return {
        "max_tokens": 9,
        "messages": messages,
        **({"system": system} if system else {}),
        **({"tools": tools} if tools else {}),
    }
