"""What an answer calls, whole and while it comes, whatever an API calls its fields."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One finished call; ``arguments`` is the JSON of an object."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A choice begins a call; the one before has ended."""

    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON of the arguments of the call that has begun."""

    json: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call has ended, or the text in it. ``raw``: all its text, for whoever cannot use broken arguments."""

    raw: str


CallEvent = CallBegun | CallArguments | CallEnded
