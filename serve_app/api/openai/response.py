"""Answers in OpenAI's shapes: whole bodies as plain dicts, stream chunks as JSON bytes.

Owns the shapes. Knows nothing of engines: texts, reasons and token counts come in. A stream encodes what all its
chunks share once, because there is a chunk for nearly every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from serve_app.errors import WarmpathError

FinishReason = Literal["stop", "length"]

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request over all its choices. ``cached_tokens``: prompt tokens whose KV was reused."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> dict[str, Any]:
        """Return OpenAI's ``usage``."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer."""

    text: str
    finish_reason: FinishReason


def chat_completion(
    response_id: str, created: int, model: str, choices: Sequence[Choice], usage: Usage
) -> dict[str, Any]:
    """Return the body of a chat completion that is not streamed; ``created`` in Unix seconds."""
    return {
        "id": response_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage.body(),
    }


def completion(response_id: str, created: int, model: str, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
    """Return the body of a completion that is not streamed."""
    return {
        "id": response_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [
            {"index": index, "text": choice.text, "logprobs": None, "finish_reason": choice.finish_reason}
            for index, choice in enumerate(choices)
        ],
        "usage": usage.body(),
    }


class ChatStream:
    """The chunks of one streamed chat completion, as JSON without the framing of server-sent events."""

    def __init__(self, response_id: str, created: int, model: str, *, include_usage: bool) -> None:
        self._head = _head(response_id, "chat.completion.chunk", created, model)
        self._tail = b',"usage":null}' if include_usage else b"}"

    def opening(self, index: int) -> bytes | None:
        """Return the chunk that begins choice ``index`` with its role."""
        return self._chunk(index, b'{"role":"assistant","content":""}', b"null")

    def text(self, index: int, text: str) -> bytes:
        """Return a chunk that adds text."""
        return self._chunk(index, b'{"content":' + _encode(text) + b"}", b"null")

    def finish(self, index: int, reason: FinishReason) -> bytes:
        """Return the chunk that ends a choice."""
        return self._chunk(index, b"{}", _encode(reason))

    def usage(self, usage: Usage) -> bytes:
        """Return the last chunk of a stream with ``include_usage``: no choice, only usage."""
        return self._head + b'"choices":[],"usage":' + _encode(usage.body()) + b"}"

    def _chunk(self, index: int, delta: bytes, reason: bytes) -> bytes:
        return b'%b"choices":[{"index":%d,"delta":%b,"logprobs":null,"finish_reason":%b}]%b' % (
            self._head, index, delta, reason, self._tail,
        )  # fmt: skip


class CompletionStream:
    """The chunks of one streamed completion; the same calls as ``ChatStream``."""

    def __init__(self, response_id: str, created: int, model: str, *, include_usage: bool) -> None:
        self._head = _head(response_id, "text_completion", created, model)
        self._tail = b',"usage":null}' if include_usage else b"}"

    def opening(self, index: int) -> bytes | None:
        """Return None: a completion begins with its text."""
        return None

    def text(self, index: int, text: str) -> bytes:
        """Return a chunk that adds text."""
        return self._chunk(index, _encode(text), b"null")

    def finish(self, index: int, reason: FinishReason) -> bytes:
        """Return the chunk that ends a choice."""
        return self._chunk(index, b'""', _encode(reason))

    def usage(self, usage: Usage) -> bytes:
        """Return the last chunk of a stream with ``include_usage``: no choice, only usage."""
        return self._head + b'"choices":[],"usage":' + _encode(usage.body()) + b"}"

    def _chunk(self, index: int, text: bytes, reason: bytes) -> bytes:
        return b'%b"choices":[{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b}]%b' % (
            self._head, index, text, reason, self._tail,
        )  # fmt: skip


def _head(response_id: str, kind: str, created: int, model: str) -> bytes:
    """Return the beginning of every chunk of one stream, up to where its choices come."""
    return _encode({"id": response_id, "object": kind, "created": created, "model": model})[:-1] + b","


def error_body(error: WarmpathError) -> dict[str, Any]:
    """Return an error as OpenAI shows it."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def model_body(model: str, created: int, max_model_len: int) -> dict[str, Any]:
    """Return one model; ``root``, ``parent`` and ``max_model_len`` are vLLM's."""
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "warmpath",
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
    }


def adapter_body(name: str, root: str, base: dict[str, Any]) -> dict[str, Any]:
    """Return a LoRA adapter of ``base`` as a model; ``root`` is where it comes from."""
    return {**base, "id": name, "root": root, "parent": base["id"]}


def models_body(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the list of models."""
    return {"object": "list", "data": list(models)}
