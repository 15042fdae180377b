"""The output side of an API: a whole answer, the events of a streamed one, and errors.

Tool calls and server-sent events have one form for all APIs here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from serve_app.errors import WarmpathError
from serve_app.fairness.rate_limits import LimitsLeft

CONTENT_TYPE = "text/event-stream; charset=utf-8"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Keep caches and buffering proxies from delaying tokens."""
END = b"\n\n"
"""The end of an event; an encoder's JSON holds no line break."""


def comment(text: str = "") -> bytes:
    """Frame a line that clients ignore; ``text`` has no line break."""
    return b": %b\n\n" % text.encode() if text else b":\n\n"


SIGN = comment()
"""A sign of life for the APIs without an event for it."""


def named_event(name: str, payload: bytes) -> bytes:
    """Frame one line of JSON under an event name, for the APIs that name their events."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), payload)


def data_event(payload: bytes) -> bytes:
    """Frame one line of JSON."""
    return b"data: " + payload + b"\n\n"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; ``arguments`` is the JSON of an object. ``cut``: only as far as it came until the answer was cut."""

    call_id: str
    name: str
    arguments: str
    cut: bool = False


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A choice begins a call; the previous one has ended."""

    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON of the current call's arguments."""

    json: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The current call ends, or the text inside it. ``raw``: its full text, for broken arguments.

    ``cut``: the limit of tokens or a stop string ended the answer inside the call.
    """

    raw: str
    cut: bool = False


CallEvent = CallBegun | CallArguments | CallEnded


def are_whole(arguments: str) -> bool:
    """Return whether the arguments of a call are the JSON of an object."""
    try:
        msgspec.json.decode(arguments, type=dict)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


ApiFinishReason = Literal["stop", "length", "tool_calls"]
"""Why a choice ended; "tool_calls": it stopped after tool calls."""


class TokenIds:
    """The token ids that an answer reports. ``prompts``: of each choice's prompt; the others are those of a stream."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prompts = prompts
        self._answers: list[list[int]] = [[] for _ in prompts]

    def add(self, index: int, ids: Iterable[int]) -> None:
        """Add ids of a choice."""
        self._answers[index] += ids

    def take(self, index: int) -> list[int]:
        """Return the ids that were added to a choice since the last call."""
        taken, self._answers[index] = self._answers[index], []
        return taken


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """Fields that all parts of one answer share. ``answer_id`` has no API's prefix; ``created_s`` is in Unix seconds.

    ``so_far``: the usage to report in every chunk. ``token_ids``: to report, too; None: not requested.
    ``repeated``: fields of the request that the answer repeats, in the API's shape. ``shows_reasoning``: a chat has it.
    ``note``: a warning about the whole answer, "" for none. ``now_s``: tells the time of its end, in Unix seconds.
    """

    answer_id: str
    created_s: int
    model: str
    include_usage: bool = False
    repeated: Mapping[str, Any] = field(default_factory=dict)
    so_far: Callable[[], Usage] | None = None
    token_ids: TokenIds | None = None
    shows_reasoning: bool = True
    note: str = ""
    now_s: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request over all its choices. ``cached_tokens``: prompt tokens with reused KV.

    ``kept_5m_tokens``, ``kept_1h_tokens``: other prompt tokens, kept that long because the request asks for it.
    ``cache_miss``: why other tokens were not cached, if the request asks; known only at the end of the answer.
    ``reasoning_tokens``: completion tokens of reasoning. ``written_tokens``: prompt tokens newly put in the cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    kept_5m_tokens: int = 0
    kept_1h_tokens: int = 0
    cache_miss: Mapping[str, Any] | None = None
    reasoning_tokens: int = 0
    written_tokens: int = 0


class ShownToken(NamedTuple):
    """A token's bytes, which may split a character, and its log-probability, None for a prompt's first token."""

    raw: bytes
    logprob: float | None


class ToldToken(NamedTuple):
    """A token at character ``offset`` of an answer; ``top``: the likeliest tokens at its place."""

    token: ShownToken
    top: tuple[ShownToken, ...]
    offset: int


class RankedToken(NamedTuple):
    """A token that a prompt has or could have had at a place; ``rank``: 1 for the likeliest there."""

    token_id: int
    raw: bytes
    logprob: float
    rank: int


RankedPrompt = tuple[tuple[RankedToken, ...], ...]
"""For each token of a prompt after the first: itself, then the likeliest ones."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer. ``calls``: its complete tool calls, after or between the text.

    ``logprobs``: its tokens' log-probabilities, None if not requested. ``stop_sequence``: the stop string that ended
    it, "" for none. ``reasoning``: the reasoning before its text. ``prompt``: its prompt's tokens, if requested.
    """

    text: str
    finish_reason: ApiFinishReason
    calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[ToldToken, ...] | None = None
    stop_sequence: str = ""
    reasoning: str = ""
    prompt: RankedPrompt | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error in an API's shape: the HTTP status and a body to encode as JSON."""

    status: int
    body: dict[str, Any]


RenderError = Callable[[WarmpathError, str], ErrorAnswer]
"""(error, request id) -> the error in the shape of one API."""

RenderLimits = Callable[[LimitsLeft], dict[str, str]]
"""The rest of a tenant's limits -> one API's headers for it."""


class AnswerStream(Protocol):
    """One streamed answer. Every call returns server-sent events, framed: none, one or several."""

    def opening(self, index: int, usage: Usage) -> bytes:
        """Begin choice ``index``; ``usage`` holds the prompt's tokens and its cached tokens."""

    def text(self, index: int, text: str, logprobs: Sequence[ToldToken] = ()) -> bytes:
        """Add text to a choice, with its tokens if the request asks for them."""

    def reasoning(self, index: int, text: str) -> bytes:
        """Add to the reasoning of a choice, before its text, if the API has reasoning."""

    def call(self, index: int, event: CallEvent) -> bytes:
        """Add a part of a tool call to a choice, if the API has tools."""

    def finish(self, index: int, reason: ApiFinishReason, stop_sequence: str = "") -> bytes:
        """End a choice. ``stop_sequence``: the stop string that ended it, "" for none."""

    def usage(self, usage: Usage) -> bytes:
        """End the stream, with usage if the API or the client wants it."""

    def error(self, error: WarmpathError) -> bytes:
        """End the stream with an error; nothing follows it."""


class AnswerFormat(Protocol):
    """One API's shape of answers and errors. It is stateless: an answer's state is in its stream."""

    @property
    def sign(self) -> bytes:
        """The sign of life of a stream that waits; it may come before the first event and between any two."""

    def whole(self, head: AnswerHead, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""

    def stream(self, head: AnswerHead) -> AnswerStream:
        """Begin a streamed answer."""

    def error(self, error: WarmpathError, request_id: str) -> ErrorAnswer:
        """Return an error that occurs before the headers are sent."""
