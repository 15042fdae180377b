"""The shapes that an API gives: a whole answer, the events of a streamed one, and errors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from serve_app.api.tool_calls import CallEvent, ToolCall
from serve_app.errors import WarmpathError
from serve_app.fairness.rate_limits import LimitsLeft

FinishReason = Literal["stop", "length", "tool_calls"]
"""Why a choice ended; "tool_calls" where it stopped after calls of tools."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all parts of one answer share. ``answer_id`` has no API's prefix; ``created_s`` is in Unix seconds.

    ``repeated``: fields of the request that the answer repeats, as the API shows them.
    """

    answer_id: str
    created_s: int
    model: str
    include_usage: bool = False
    repeated: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request over all its choices. ``cached_tokens``: prompt tokens whose KV was reused.

    ``kept_5m_tokens``, ``kept_1h_tokens``: other tokens of the prompt, kept for so long because it was asked for.
    ``cache_miss``: why other tokens were not, where the request asks and it is known, which is at the answer's end.
    ``reasoning_tokens``: completion tokens of reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    kept_5m_tokens: int = 0
    kept_1h_tokens: int = 0
    cache_miss: Mapping[str, Any] | None = None
    reasoning_tokens: int = 0


class ShownToken(NamedTuple):
    """A token's bytes, which need not be whole characters, and the logarithm of its probability."""

    raw: bytes
    logprob: float


class ToldToken(NamedTuple):
    """A token of an answer, ``offset`` characters behind its beginning, and the likeliest at its place."""

    token: ShownToken
    top: tuple[ShownToken, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer. ``calls``: the tool calls that came after or between its text, each one whole.

    ``logprobs``: of its tokens, None where nobody asked. ``stop_sequence``: the stop string that ended it, "" for none.
    ``reasoning``: before its text.
    """

    text: str
    finish_reason: FinishReason
    calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[ToldToken, ...] | None = None
    stop_sequence: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error as an API shows it: the HTTP status, and a body to be encoded as JSON."""

    status: int
    body: dict[str, Any]


RenderError = Callable[[WarmpathError, str], ErrorAnswer]
"""(error, request id) -> the error in the shape of one API."""

RenderLimits = Callable[[LimitsLeft], dict[str, str]]
"""What is left of a tenant's limits -> the headers that say so in one API."""


class AnswerStream(Protocol):
    """One streamed answer. Every call returns server-sent events, framed: none, one or several."""

    def opening(self, index: int, usage: Usage) -> bytes:
        """Begin choice ``index``; ``usage`` is what is known by then: the prompt and what of it was cached."""

    def text(self, index: int, text: str, logprobs: Sequence[ToldToken] = ()) -> bytes:
        """Add text to a choice, with its tokens where they were asked for."""

    def reasoning(self, index: int, text: str) -> bytes:
        """Add to the reasoning of a choice, which comes before its text, where the API has it."""

    def call(self, index: int, event: CallEvent) -> bytes:
        """Add a part of a tool call to a choice, where the API has tools."""

    def finish(self, index: int, reason: FinishReason, stop_sequence: str = "") -> bytes:
        """End a choice. ``stop_sequence``: the stop string that did, "" for none."""

    def usage(self, usage: Usage) -> bytes:
        """End the stream, with usage where the API or the client wants it."""

    def error(self, error: WarmpathError) -> bytes:
        """End the stream with an error; nothing comes after it."""


class AnswerFormat(Protocol):
    """How one API shows answers and errors. Has no state: what an answer needs to remember is its stream's."""

    def whole(self, head: AnswerHead, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""

    def stream(self, head: AnswerHead) -> AnswerStream:
        """Begin a streamed answer."""

    def error(self, error: WarmpathError, request_id: str) -> ErrorAnswer:
        """Return an error that happens before the headers are sent."""
