"""Rules that keep the prompts of known agents' clients the same, without a change of what the model is told.

They need only the conversation, in the form of chat templates, so they hold for every API. The names of further rules
are in ``serve_app/api/anthropic/``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from serve_app.api.request import ChatRequest

GIT_SNAPSHOT = "git_snapshot"
_SNAPSHOT = "Git snapshot at conversation start."
_BLOCK = re.compile(r"\n```text\n(?:git:[^\n]*+\n)*+(?P<fence>```)\n*+")
"""Qwen Code's paragraph in the middle of the system prompt. It differs once a file has changed.

The block follows the first line with these words: one look at each line, whatever a prompt repeats.
"""

_SETTINGS = {
    "billing_line": "CLAUDE_CODE_ATTRIBUTION_HEADER=0",
    "deferred_tools": "ENABLE_TOOL_SEARCH=false",
}
"""Claude Code's own variables with the effect of a rule. Source: its issue 24168, and its documentation."""

Messages = Sequence[Mapping[str, Any]]


class _SnapshotSpan(NamedTuple):
    """Where a snapshot is in a text. ``fence``: the end of its last marks, before line ends that go with it."""

    start: int
    fence: int
    end: int


def by_rules(request: ChatRequest, *, follow: bool = True) -> ChatRequest:
    """Return a request in which git's state stands behind the user's first words, not in the system prompt.

    ``follow`` False: nothing is moved, but ``rules_off`` tells what would be. Linear in the system prompt.
    """
    first = request.messages[0] if request.messages else {}
    there = first.get("role") == "system" and _SNAPSHOT in first["content"]
    span = _snapshot_in(first["content"]) if there else None
    if span is None or _user(request.messages) is None:
        return request
    if not follow:
        return replace(request, rules_off=(*request.rules_off, GIT_SNAPSHOT))
    marks = tuple(replace(mark, messages=_part(mark.messages, first["content"], span)) for mark in request.breakpoints)
    rules = (*request.prompt_rules, GIT_SNAPSHOT)
    return replace(request, messages=_moved(request.messages, span), breakpoints=marks, prompt_rules=rules)


def keeping(rules_off: Sequence[str]) -> str:
    """Return what may keep a prefix: the setting for rules that are off, and the client's own ones."""
    own = [_SETTINGS[rule] for rule in rules_off if rule in _SETTINGS]
    instead = f" So may {' and '.join(own)} in Claude Code." if own else ""
    return f"Set agent_prompt_rules: {', '.join(rules_off)} may keep this prefix.{instead}"


def _snapshot_in(text: str) -> _SnapshotSpan | None:
    at = 0
    while (start := text.find(_SNAPSHOT, at)) >= 0 and (line_end := text.find("\n", start)) >= 0:
        if block := _BLOCK.match(text, line_end):
            return _SnapshotSpan(start, block.end("fence"), block.end())
        at = line_end
    return None


def _user(messages: Messages) -> int | None:
    return next((at for at, message in enumerate(messages) if message["role"] == "user"), None)


def _part(messages: Messages, system: str, span: _SnapshotSpan) -> tuple[Mapping[str, Any], ...]:
    """Return the beginning of a conversation with the snapshot moved; its new place may still be to come.

    ``system``: the whole system message. What begins like it has its snapshot at the same ``span``, or none.
    """
    content = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
    if len(content) < span.fence or not system.startswith(content):
        return tuple(messages)
    return _moved(messages, span)


def _moved(messages: Messages, span: _SnapshotSpan) -> tuple[Mapping[str, Any], ...]:
    moved = [dict(message) for message in messages]
    system = moved[0]["content"]
    moved[0]["content"] = system[: span.start] + system[span.end :]
    if (user := _user(messages)) is not None:
        snapshot = system[span.start : span.end].rstrip()
        moved[user]["content"] = f"{moved[user]['content']}\n\n{snapshot}"
    return tuple(moved)
