"""Answers in the shape of Anthropic's messages: a whole message or its events; errors, limits and models."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from pydantic_core import from_json

from serve_app.api.anthropic.history import RequestDigests
from serve_app.api.format import (
    AnswerHead,
    AnswerStream,
    ApiFinishReason,
    CallArguments,
    CallBegun,
    CallEvent,
    Choice,
    ErrorAnswer,
    ToldToken,
    Usage,
    named_event,
)
from serve_app.api.json_body import CALL_PREFIX
from serve_app.errors import WarmpathError
from serve_app.fairness.rate_limits import LimitsLeft

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}

_STARTED_WITH = {"cache_creation", "service_tier", "inference_geo"}
"""Parts of usage that a stream tells only at its start."""

_encode = msgspec.json.Encoder().encode


def anthropic_error(error: WarmpathError, request_id: str) -> ErrorAnswer:
    """Return an error in Anthropic's shape; an overloaded deployment gives 529 instead of 503."""
    status = 529 if error.status == 503 else error.status
    return ErrorAnswer(status, {**_error_body(error, status), "request_id": request_id})


def anthropic_limits(left: LimitsLeft) -> dict[str, str]:
    """Return Anthropic's headers for the rest of a tenant's limits."""
    headers: dict[str, str] = {}
    for name, one in (("requests", left.requests), ("tokens", left.tokens)):
        if one is not None:
            headers[f"anthropic-ratelimit-{name}-limit"] = str(one.limit)
            headers[f"anthropic-ratelimit-{name}-remaining"] = str(one.remaining)
            headers[f"anthropic-ratelimit-{name}-reset"] = _moment(datetime.now(UTC) + timedelta(seconds=one.reset_s))
    return headers


def anthropic_model(model: dict[str, Any]) -> dict[str, Any]:
    """Convert a model from OpenAI's shape to Anthropic's."""
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": _moment(datetime.fromtimestamp(model["created"], UTC)),
        "lifecycle": "active",
        "capabilities": None,
        "max_input_tokens": model["max_model_len"],
        "max_tokens": model["max_model_len"],
    }


def anthropic_models(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the list of models, all on one page."""
    ids = [model["id"] for model in models]
    return {
        "data": [anthropic_model(model) for model in models],
        "has_more": False,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }


Compare = Callable[[str, RequestDigests, Usage], dict[str, Any] | None]
"""(tenant's message id, request, usage) -> ``diagnostics``; also stores the request for later comparisons."""


class MessagesFormat:
    """An ``AnswerFormat`` for messages with one choice. ``compare`` compares them with their tenant's earlier ones."""

    sign = named_event("ping", b'{"type":"ping"}')

    def __init__(self, compare: Compare) -> None:
        self._compare = compare

    def whole(self, head: AnswerHead, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """Return the body of a message that is not streamed."""
        choice = choices[0]
        content: list[dict[str, Any]] = []
        if choice.reasoning:
            thought = choice.reasoning if head.shows_reasoning else ""
            content.append({"type": "thinking", "thinking": thought, "signature": head.answer_id})
        if choice.text:
            content.append(_text_block(choice.text))
        for call in choice.calls:
            made = _as_far_as(call.arguments) if call.cut else msgspec.json.decode(call.arguments)
            content.append(_tool_use_block(call.call_id, call.name, made))
        return {
            **message_head(head, usage, self._compare),
            "content": content,
            **_stop(choice.finish_reason, choice.stop_sequence),
        }

    def stream(self, head: AnswerHead) -> AnswerStream:
        """Begin a message in events."""
        return _Stream(head, self._compare)

    error = staticmethod(anthropic_error)


class _Stream:
    """The events of one streamed message; an ``AnswerStream``."""

    def __init__(self, head: AnswerHead, compare: Compare) -> None:
        self._head = head
        self._compare = compare
        self._blocks = 0
        self._open = ""
        self._stop: dict[str, Any] = {}
        self._diagnostics: dict[str, Any] | None = None

    def opening(self, index: int, usage: Usage) -> bytes:
        message = {
            **message_head(self._head, usage, self._compare),
            "content": [], "stop_reason": None, "stop_sequence": None, "stop_details": None,
        }  # fmt: skip
        self._diagnostics = message["diagnostics"]
        return _event("message_start", message=message)

    def text(self, index: int, text: str, logprobs: Sequence[ToldToken] = ()) -> bytes:
        begun = b"" if self._open == "text" else self._begin(_text_block(""))
        return begun + self._delta({"type": "text_delta", "text": text})

    def reasoning(self, index: int, text: str) -> bytes:
        block = {"type": "thinking", "thinking": "", "signature": ""}
        begun = b"" if self._open == "thinking" else self._begin(block)
        if not self._head.shows_reasoning:
            return begun
        return begun + self._delta({"type": "thinking_delta", "thinking": text})

    def call(self, index: int, event: CallEvent) -> bytes:
        if isinstance(event, CallBegun):
            return self._begin(_tool_use_block(event.call_id, event.name, {}))
        if isinstance(event, CallArguments):
            return self._delta({"type": "input_json_delta", "partial_json": event.json})
        return self._end()

    def finish(self, index: int, reason: ApiFinishReason, stop_sequence: str = "") -> bytes:
        self._stop = _stop(reason, stop_sequence)
        return self._end()

    def usage(self, usage: Usage) -> bytes:
        """End the stream with the stop reason and usage, which is always included."""
        final = {name: value for name, value in _usage(usage).items() if name not in _STARTED_WITH}
        diagnostics = {} if usage.cache_miss is None else {"diagnostics": _with_miss(self._diagnostics, usage)}
        delta = {**self._stop, "container": None}
        return _event("message_delta", delta=delta, usage=final, **diagnostics) + _event("message_stop")

    def error(self, error: WarmpathError) -> bytes:
        """End with an event that holds the error."""
        return named_event("error", _encode(_error_body(error, 529 if error.status == 503 else error.status)))

    def _begin(self, block: dict[str, Any]) -> bytes:
        ended = self._end()
        self._open = block["type"]
        self._blocks += 1
        return ended + _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _end(self) -> bytes:
        """End the block that is open, if one is."""
        if not self._open:
            return b""
        # Nothing checks this signature when it returns; clients drop reasoning that has none.
        signed = {"type": "signature_delta", "signature": self._head.answer_id}
        events = self._delta(signed) if self._open == "thinking" else b""
        self._open = ""
        return events + _event("content_block_stop", index=self._blocks - 1)


def message_head(head: AnswerHead, usage: Usage, compare: Compare) -> dict[str, Any]:
    """Return the fields of a message that precede its content; this also compares and stores the request."""
    message_id, digests = f"msg_{head.answer_id}", head.repeated["diagnostics"]
    assert isinstance(digests, RequestDigests)
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "container": None,
        "usage": _usage(usage),
        "diagnostics": _with_miss(compare(message_id, digests, usage), usage),
        **{name: value for name, value in head.repeated.items() if name != "diagnostics"},
    }


def _with_miss(diagnostics: dict[str, Any] | None, usage: Usage) -> dict[str, Any] | None:
    """Add to diagnostics the place where the prompt differs from its tenant's earlier ones, if it is known yet."""
    if usage.cache_miss is None:
        return diagnostics
    reason = {"type": "unavailable"} if diagnostics is None else diagnostics["cache_miss_reason"]
    return {"cache_miss_reason": {**reason, "details": usage.cache_miss}}


def _stop(reason: ApiFinishReason, stop_sequence: str) -> dict[str, Any]:
    stop_reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(reason, "end_turn")
    if reason == "stop" and stop_sequence:
        stop_reason = "stop_sequence"
    stopped_by = stop_sequence if stop_reason == "stop_sequence" else None
    return {"stop_reason": stop_reason, "stop_sequence": stopped_by, "stop_details": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return usage. Each prompt token counts once: as read from the cache, as kept in it now, or as neither."""
    kept_tokens = usage.kept_5m_tokens + usage.kept_1h_tokens
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - kept_tokens,
        "cache_creation_input_tokens": kept_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": usage.kept_5m_tokens,
            "ephemeral_1h_input_tokens": usage.kept_1h_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }


def _error_body(error: WarmpathError, status: int) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message, **error.shown_reason}}


def _as_far_as(arguments: str) -> dict[str, Any]:
    """Return the input of a call that was cut: what its arguments say so far."""
    try:
        read = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _tool_use_block(call_id: str, name: str, made: dict[str, Any]) -> dict[str, Any]:
    called = {"id": _prefixed_id(call_id), "name": name, "input": made, "caller": {"type": "direct"}}
    return {"type": "tool_use", **called}


def _prefixed_id(call_id: str) -> str:
    return CALL_PREFIX + call_id.removeprefix("call_")


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, _encode({"type": kind, **fields}))


def _moment(when: datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")
