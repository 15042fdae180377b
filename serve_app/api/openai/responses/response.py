"""Answers in the shape of OpenAI's responses: one object, or numbered events that end with that object."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from serve_app.api.format import (
    END,
    SIGN,
    AnswerHead,
    AnswerStream,
    ApiFinishReason,
    CallArguments,
    CallBegun,
    CallEvent,
    Choice,
    ToldToken,
    Usage,
    are_whole,
    named_event,
)
from serve_app.api.json_body import JsonBody, Must
from serve_app.api.openai.response import cache_details, openai_error, token_rows
from serve_app.api.openai.responses.items import text_part
from serve_app.errors import WarmpathError

_encode = msgspec.json.Encoder().encode


class ResponsesFormat:
    """An ``AnswerFormat`` for one response with one choice. ``response``: its body, once it is complete."""

    response: dict[str, Any]
    sign = SIGN

    def whole(self, head: AnswerHead, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        choice = choices[0]
        items = _Items(head)
        output = [items.reasoning(choice.reasoning)] if choice.reasoning else []
        if choice.text or not (choice.calls or output):
            output.append(items.message(choice.text, choice.logprobs or ()))
        if choice.finish_reason == "length" and not choice.calls:
            output[-1]["status"] = "incomplete"
        for call in choice.calls:
            output.append(items.call(call.call_id, call.name, call.arguments))
            output[-1]["status"] = "incomplete" if call.cut else "completed"
        self.response = _response(head, output, choice.finish_reason, usage)
        return self.response

    def stream(self, head: AnswerHead) -> AnswerStream:
        """Begin a response in events."""
        return _Stream(head, self)

    error = staticmethod(openai_error)


class ReplayQuery(JsonBody):
    """The query of ``GET /v1/responses/ID``."""

    stream: Annotated[Literal["true", "false", "True", "False", "1", "0"], Must("true or false")] = "false"
    starting_after: Annotated[int, Field(ge=0, le=2**31, strict=False)] | None = None


_NEWER: Mapping[str, Any] = {
    "completed_at": None, "presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tool_calls": None
}  # fmt: skip


def complete(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored response with all fields, also those that an older release did not have."""
    return {**_NEWER, **response}


def replayed(response: Mapping[str, Any], starting_after: int | None) -> bytes:
    """Return the events of a stored response, with each item's text in one delta.

    ``starting_after`` skips events by their numbers here. The last event always comes, for it has the whole response:
    who was cut off from the first stream had other numbers.
    """
    stream = _Stream(AnswerHead("", 0, ""), ResponsesFormat())
    begun = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    begun["completed_at"] = None
    events = stream.event("response.created", response=begun) + stream.event("response.in_progress", response=begun)
    events += b"".join(map(stream.whole_item, response["output"]))
    skipped = 0 if starting_after is None else starting_after + 1
    last = stream.event(f"response.{response['status']}", response=response)
    return b"".join(event + END for event in events.split(END)[:-1][skipped:]) + last


class _Items:
    """Makes the items of one response, each with its own id."""

    def __init__(self, head: AnswerHead) -> None:
        self._answer_id = head.answer_id
        self._made = 0
        self._in_space = {
            f"{space['name']}.{tool['name']}": {"namespace": space["name"], "name": tool["name"]}
            for space in head.repeated.get("tools", ())
            for tool in space.get("tools", ())
        }

    def message(self, text: str, logprobs: Sequence[ToldToken] = ()) -> dict[str, Any]:
        said = {"role": "assistant", "content": [text_part("output_text", text, token_rows(logprobs))]}
        return {"id": self._id("msg"), "type": "message", "status": "completed", **said}

    def reasoning(self, text: str) -> dict[str, Any]:
        parts = {"summary": [], "content": [{"type": "reasoning_text", "text": text}]}
        return {"id": self._id("rs"), "type": "reasoning", "status": "completed", **parts}

    def call(self, call_id: str, name: str, arguments: str) -> dict[str, Any]:
        call = {"call_id": call_id, "name": name, "arguments": arguments, **self._in_space.get(name, {})}
        return {"id": self._id("fc"), "type": "function_call", "status": "completed", **call}

    def _id(self, prefix: str) -> str:
        self._made += 1
        return f"{prefix}_{self._answer_id}_{self._made}"


class _Stream:
    """The events of one streamed response; an ``AnswerStream``."""

    def __init__(self, head: AnswerHead, ended: ResponsesFormat) -> None:
        self._head = head
        self._ended = ended
        self._items = _Items(head)
        self._output: list[dict[str, Any]] = []
        self._parts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._open = False
        self._number = 0
        self._reason: ApiFinishReason = "length"

    def opening(self, index: int, usage: Usage) -> bytes:
        begun = _response(self._head, [], None, None)
        return self.event("response.created", response=begun) + self.event("response.in_progress", response=begun)

    def text(self, index: int, text: str, logprobs: Sequence[ToldToken] = ()) -> bytes:
        events = b"" if self._open and self._item["type"] == "message" else self._open_parts(self._items.message(""))
        self._parts.append(text)
        self._logprobs += (rows := token_rows(logprobs))
        return events + self._part_event("response.output_text.delta", delta=text, logprobs=rows)

    def reasoning(self, index: int, text: str) -> bytes:
        same = self._open and self._item["type"] == "reasoning"
        events = b"" if same else self._open_parts(self._items.reasoning(""))
        self._parts.append(text)
        return events + self._part_event("response.reasoning_text.delta", delta=text)

    def call(self, index: int, event: CallEvent) -> bytes:
        if isinstance(event, CallBegun):
            events = self._close()
            return events + self._open_item(self._items.call(event.call_id, event.name, ""))
        if isinstance(event, CallArguments):
            self._parts.append(event.json)
            return self._item_event("response.function_call_arguments.delta", delta=event.json)
        cut = event.cut and not are_whole("".join(self._parts))
        return self._close("incomplete" if cut else "completed")

    def whole_item(self, item: dict[str, Any]) -> bytes:
        """Add a complete item at once."""
        if item["type"] == "function_call":
            text, rows = item["arguments"], []
            events = self._open_item({**item, "arguments": ""})
            events += self._item_event("response.function_call_arguments.delta", delta=text)
        else:
            (part,) = item["content"]
            text, rows = part["text"], part.get("logprobs", [])
            more = {"logprobs": rows} if item["type"] == "message" else {}
            events = self._open_parts({**item, "content": [part | {"text": ""} | ({"logprobs": []} if more else {})]})
            events += self._part_event(f"response.{part['type']}.delta", delta=text, **more)
        self._parts, self._logprobs = [text], rows
        return events + self._close(item["status"])

    def finish(self, index: int, reason: ApiFinishReason, stop_sequence: str = "") -> bytes:
        self._reason = reason
        events = b"" if self._output else self._open_parts(self._items.message(""))
        return events + self._close("incomplete" if reason == "length" else "completed")

    def usage(self, usage: Usage) -> bytes:
        """End with the whole response, which always has usage."""
        self._ended.response = response = _response(self._head, self._output, self._reason, usage)
        last = self.event(f"response.{response['status']}", response=response)
        self._number -= 1  # an error replaces this event if the response cannot be stored
        return last

    def error(self, error: WarmpathError) -> bytes:
        """End with an error: OpenAI documents the flat fields, and its clients raise the content of ``error``."""
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return self.event("error", **fields, error={"type": error.type, **fields, **error.shown_reason})

    @property
    def _item(self) -> dict[str, Any]:
        return self._output[-1]

    def _open_item(self, item: dict[str, Any]) -> bytes:
        self._output.append(item)
        self._parts, self._logprobs, self._open = [], [], True
        return self.event(
            "response.output_item.added", output_index=len(self._output) - 1, item={**item, "status": "in_progress"}
        )

    def _open_parts(self, item: dict[str, Any]) -> bytes:
        part, closed = item["content"].pop(), self._close()
        return closed + self._open_item(item) + self._part_event("response.content_part.added", part=part)

    def _close(self, status: str = "completed") -> bytes:
        """End the item that is open, if one is."""
        if not self._open:
            return b""
        self._open = False
        item, text = self._item, "".join(self._parts)
        item["status"] = status
        if item["type"] == "message":
            item["content"] = [text_part("output_text", text, self._logprobs)]
            events = self._part_event("response.output_text.done", text=text, logprobs=self._logprobs)
            events += self._part_event("response.content_part.done", part=item["content"][0])
        elif item["type"] == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": text}]
            events = self._part_event("response.reasoning_text.done", text=text)
            events += self._part_event("response.content_part.done", part=item["content"][0])
        else:
            item["arguments"] = text
            events = self._item_event("response.function_call_arguments.done", name=item["name"], arguments=text)
        return events + self.event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self.event(kind, item_id=self._item["id"], output_index=len(self._output) - 1, **fields)

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return the next event."""
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(kind, _encode(event))


def _response(
    head: AnswerHead, output: list[dict[str, Any]], reason: ApiFinishReason | None, usage: Usage | None
) -> dict[str, Any]:
    """Return a response; with ``reason`` None it is in progress."""
    cut = reason == "length"
    return {
        "id": f"resp_{head.answer_id}",
        "object": "response",
        "created_at": head.created_s,
        "completed_at": None if reason is None or cut else int(head.now_s()),
        "status": "in_progress" if reason is None else "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": head.model,
        "output": output,
        "usage": None if usage is None else _usage(usage),
        **head.repeated,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": cache_details(usage),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
