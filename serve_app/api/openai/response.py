"""Answers in OpenAI's shapes: chat completions, completions, errors and models.

A stream encodes the common part of its chunks only once, because nearly every token has a chunk.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

import msgspec

from serve_app.api.format import (
    SIGN,
    AnswerHead,
    AnswerStream,
    ApiFinishReason,
    CallArguments,
    CallBegun,
    CallEvent,
    Choice,
    ErrorAnswer,
    RankedPrompt,
    RankedToken,
    ShownToken,
    ToldToken,
    Usage,
    data_event,
)
from serve_app.api.request import reasoning_fields
from serve_app.errors import WarmpathError
from serve_app.fairness.rate_limits import LimitsLeft

DONE = b"data: [DONE]\n\n"
LEAST = -9999.0
"""JSON has no infinity. Source: vLLM."""

_encode = msgspec.json.Encoder().encode


def openai_error(error: WarmpathError, request_id: str) -> ErrorAnswer:
    """Return an error in OpenAI's shape; the request's id is in a header alone."""
    return ErrorAnswer(error.status, _error_body(error))


def openai_limits(left: LimitsLeft) -> dict[str, str]:
    """Return OpenAI's headers for the rest of a tenant's limits."""
    headers: dict[str, str] = {}
    for name, one in (("requests", left.requests), ("tokens", left.tokens)):
        if one is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(one.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(one.remaining)
            headers[f"x-ratelimit-reset-{name}"] = _duration(one.reset_s)
    return headers


def _duration(seconds: float) -> str:
    """Return a duration in OpenAI's notation: ``12ms``, ``1.5s``, ``6m0s``; rounded up, so that it is over by then."""
    milliseconds = ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    return f"{minutes}m{milliseconds / 1000:g}s" if minutes else f"{milliseconds / 1000:g}s"


def chat_logprobs(tokens: Sequence[ToldToken]) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat completion's choice or chunk."""
    return {"content": token_rows(tokens), "refusal": None}


def token_rows(tokens: Sequence[ToldToken]) -> list[dict[str, Any]]:
    """Return tokens in the shape of chats and responses."""
    return [{**_token_row(token.token), "top_logprobs": [_token_row(other) for other in token.top]} for token in tokens]


def completion_logprobs(tokens: Sequence[ToldToken]) -> dict[str, Any]:
    """Return the ``logprobs`` of a completion's choice or chunk. A token is always among its own top tokens."""
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [_least(token.token.logprob) for token in tokens],
        "tokens": [_name(token.token.raw) for token in tokens],
        "top_logprobs": [
            None
            if token.token.logprob is None
            else {_name(top.raw): _least(top.logprob) for top in (token.token, *token.top)}
            for token in tokens
        ],
    }


def prompt_logprobs(prompt: RankedPrompt | None) -> list[dict[str, Any] | None] | None:
    """Return a prompt's tokens in vLLM's shape: null for the first, then each place's tokens by id."""
    if prompt is None:
        return None
    return [None, *({str(token.token_id): _ranked(token) for token in place} for place in prompt)]


def _ranked(token: RankedToken) -> dict[str, Any]:
    return {
        "logprob": _least(token.logprob),
        "rank": token.rank,
        "decoded_token": token.raw.decode(errors="replace"),
    }


def _least(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)


def _token_row(token: ShownToken) -> dict[str, Any]:
    text = token.raw.decode(errors="replace")
    return {"token": text, "bytes": list(token.raw), "logprob": _least(token.logprob)}


def _name(raw: bytes) -> str:
    """Return a token as text; a partial character becomes its bytes. Source: OpenAI's completions."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []}
    if choice.reasoning:
        message |= {"content": choice.text or None, **reasoning_fields(choice.reasoning)}
    if not choice.calls:
        return message
    calls = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in choice.calls
    ]
    return {**message, "content": choice.text or None, "tool_calls": calls}


class _Chunks(NamedTuple):
    """A choice's JSON in its chunks: the first (b"": no such chunk), one with text, and the last.

    ``of_prompt``: all choices have one prompt, so the prompt's token ids are beside them.
    """

    opening: bytes
    text: bytes
    finish: bytes
    logprobs: Callable[[Sequence[ToldToken]], dict[str, Any]]
    of_prompt: bool


@dataclass(frozen=True, slots=True)
class OpenAiFormat:
    """Chat completions or (legacy) completions; an ``AnswerFormat``. ``content``: a whole choice's own fields.

    ``common``: fields of the whole answer from its first choice.
    """

    prefix: str
    kind: str
    streamed_kind: str
    content: Callable[[Choice], dict[str, Any]]
    chunks: _Chunks
    common: Callable[[Choice], dict[str, Any]] = lambda _: {}
    sign: bytes = SIGN

    def whole(self, head: AnswerHead, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        ids, rows = head.token_ids, []
        for index, choice in enumerate(choices):
            if not head.shows_reasoning:
                choice = replace(choice, reasoning="")
            token_fields: dict[str, Any] = {} if ids is None else {"token_ids": choice.token_ids}
            if ids is not None and not self.chunks.of_prompt:
                token_fields["prompt_token_ids"] = ids.prompts[index]
            rows.append(
                {
                    "index": index,
                    **self.content(choice),
                    "logprobs": None if choice.logprobs is None else self.chunks.logprobs(choice.logprobs),
                    "finish_reason": choice.finish_reason,
                    **token_fields,
                }
            )
        common = self.common(choices[0])
        if ids is not None and self.chunks.of_prompt:
            common["prompt_token_ids"] = ids.prompts[0]
        return {**_head(self.prefix, self.kind, head), "choices": rows, "usage": _usage(usage), **common}

    def stream(self, head: AnswerHead) -> AnswerStream:
        """Begin an answer in chunks; the first chunk of each choice of a chat has its role."""
        return _Stream(head, _head(self.prefix, self.streamed_kind, head), self.chunks)

    error = staticmethod(openai_error)


CHAT = OpenAiFormat(
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    lambda choice: {"message": _message(choice)},
    _Chunks(
        b'"delta":{"role":"assistant","content":""}', b'"delta":{"content":%b}', b'"delta":{}', chat_logprobs, True
    ),
    lambda choice: {"prompt_logprobs": prompt_logprobs(choice.prompt)},
)
COMPLETION = OpenAiFormat(
    "cmpl",
    "text_completion",
    "text_completion",
    lambda choice: {"text": choice.text, "prompt_logprobs": prompt_logprobs(choice.prompt)},
    _Chunks(b"", b'"text":%b', b'"text":""', completion_logprobs, False),
)


class _Stream:
    """The chunks of one streamed answer, framed; an ``AnswerStream``."""

    def __init__(self, head: AnswerHead, shared: dict[str, Any], chunks: _Chunks) -> None:
        self._include_usage, self._shows_reasoning = head.include_usage, head.shows_reasoning
        self._start = _encode(shared)[:-1] + b","
        self._end = b',"usage":null}' if head.include_usage else b"}"
        self._chunks = chunks
        self._calls: Counter[int] = Counter()
        self._so_far, self._ids = head.so_far, head.token_ids
        self._prompts: set[int] = set()

    def opening(self, index: int, usage: Usage) -> bytes:
        return self._chunk(index, self._chunks.opening, b"null") if self._chunks.opening else b""

    def text(self, index: int, text: str, logprobs: Sequence[ToldToken] = ()) -> bytes:
        rows = _encode(self._chunks.logprobs(logprobs)) if logprobs else b"null"
        return self._chunk(index, self._chunks.text % _encode(text), b"null", rows)

    def reasoning(self, index: int, text: str) -> bytes:
        if not self._shows_reasoning:
            return b""
        return self._chunk(index, b'"delta":%b' % _encode(reasoning_fields(text)), b"null")

    def call(self, index: int, event: CallEvent) -> bytes:
        """Add a call with its name to the choice, or arguments to its last call."""
        if isinstance(event, CallBegun):
            function = {"name": event.name, "arguments": ""}
            delta = {"index": self._calls[index], "id": event.call_id, "type": "function", "function": function}
            self._calls[index] += 1
        elif isinstance(event, CallArguments):
            delta = {"index": self._calls[index] - 1, "function": {"arguments": event.json}}
        else:
            return b""
        return self._chunk(index, b'"delta":{"tool_calls":[%b]}' % _encode(delta), b"null")

    def finish(self, index: int, reason: ApiFinishReason, stop_sequence: str = "") -> bytes:
        return self._chunk(index, self._chunks.finish, _encode(reason))

    def usage(self, usage: Usage) -> bytes:
        """End with ``[DONE]``, after a chunk with usage and no choice if the request asks for it."""
        if not self._include_usage:
            return DONE
        return data_event(self._start + b'"choices":[],"usage":' + _encode(_usage(usage)) + b"}") + DONE

    def error(self, error: WarmpathError) -> bytes:
        """End with the error in a separate chunk, without ``[DONE]``."""
        return data_event(_encode(_error_body(error)))

    def _chunk(self, index: int, choice: bytes, reason: bytes, logprobs: bytes = b"null") -> bytes:
        end = self._end
        if self._so_far is not None:
            end = b',"usage":%b}' % _encode(_usage(self._so_far()))
        if self._ids is not None:
            choice += b',"token_ids":%b' % _encode(self._ids.take(index))
            first = 0 if self._chunks.of_prompt else index
            if first not in self._prompts:
                self._prompts.add(first)
                prompt_ids = b',"prompt_token_ids":%b' % _encode(self._ids.prompts[index])
                choice, end = (choice, prompt_ids + end) if self._chunks.of_prompt else (choice + prompt_ids, end)
        return b'data: %b"choices":[{"index":%d,%b,"logprobs":%b,"finish_reason":%b}]%b\n\n' % (
            self._start, index, choice, logprobs, reason, end,
        )  # fmt: skip


def _head(prefix: str, kind: str, head: AnswerHead) -> dict[str, Any]:
    named = {"id": f"{prefix}-{head.answer_id}", "object": kind, "created": head.created_s, "model": head.model}
    return {**named, **head.repeated}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": cache_details(usage),
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def cache_details(usage: Usage) -> dict[str, Any]:
    """Return what was read from the cache and put in it, and the reason of a cache miss, if requested and known."""
    details = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.written_tokens}
    return details if usage.cache_miss is None else {**details, "cache_miss": usage.cache_miss}


def _error_body(error: WarmpathError) -> dict[str, Any]:
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return {"error": {**fields, **error.shown_reason}}


def model_body(model: str, created: int, max_model_len: int) -> dict[str, Any]:
    """Return one model; ``root``, ``parent`` and ``max_model_len`` are vLLM's fields."""
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
    """Return a LoRA adapter of ``base`` as a model; ``root`` is its source."""
    return {**base, "id": name, "root": root, "parent": base["id"]}


def models_body(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the list of models."""
    return {"object": "list", "data": list(models)}
