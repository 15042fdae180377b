"""Tool calls of an answer, finished and streamed, independent of an API's field names."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One finished call; ``arguments`` is the JSON of an object."""

    call_id: str
    name: str
    arguments: str


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
    """The current call ends, or the text inside it. ``raw``: its full text, for broken arguments."""

    raw: str


CallEvent = CallBegun | CallArguments | CallEnded
