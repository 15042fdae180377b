"""Tool calls as plain data, whatever an API calls its fields: what a client offers, and what an answer calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Tool = Mapping[str, Any]
"""A function as chat templates read it: ``{"type": "function", "function": {name, description, parameters}}``."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request offers and how the answer may use it.

    ``must_call``: the answer is calls and nothing else. ``only``: the names that it may call, all of them when empty.
    ``may_call`` False: the prompt holds the tools, so that its KV is the same, and the answer is text.
    """

    tools: tuple[Tool, ...] = ()
    may_call: bool = True
    must_call: bool = False
    only: str = ""
    parallel: bool = True

    def __bool__(self) -> bool:
        """Tell whether there are tools."""
        return bool(self.tools)

    @property
    def names(self) -> frozenset[str]:
        """The names of all tools."""
        return frozenset(tool["function"]["name"] for tool in self.tools)


NO_TOOLS = ToolUse()


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
