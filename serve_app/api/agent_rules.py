"""Rules that keep the prompts of known agents' clients the same, without a change of what the model is told.

They need only the conversation, in the form of chat templates, so they hold for every API. The names of further rules
are in ``serve_app/api/anthropic/``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from serve_app.api.request import ChatRequest

GIT_SNAPSHOT = "git_snapshot"
_SNAPSHOT = re.compile(r"Git snapshot at conversation start\.[^\n]*\n```text\n(?:git:[^\n]*\n)*```\n*")
"""Qwen Code's paragraph in the middle of the system prompt. It differs once a file has changed."""

_SETTINGS = {
    "billing_line": "CLAUDE_CODE_ATTRIBUTION_HEADER=0",
    "deferred_tools": "ENABLE_TOOL_SEARCH=false",
}
"""Claude Code's own variables with the effect of a rule. Source: its issue 24168, and its documentation."""

Messages = Sequence[Mapping[str, Any]]


def by_rules(request: ChatRequest) -> ChatRequest:
    """Return a request in which git's state stands behind the user's first words, not in the system prompt."""
    messages = _moved(request.messages)
    if messages is request.messages:
        return request
    marks = tuple(replace(mark, messages=tuple(_moved(mark.messages, part=True))) for mark in request.breakpoints)
    rules = (*request.prompt_rules, GIT_SNAPSHOT)
    return replace(request, messages=tuple(messages), breakpoints=marks, prompt_rules=rules)


def keeping(rules_off: Sequence[str]) -> str:
    """Return what may keep a prefix: the setting for rules that are off, and the client's own ones."""
    own = [_SETTINGS[rule] for rule in rules_off if rule in _SETTINGS]
    instead = f" So may {' and '.join(own)} in Claude Code." if own else ""
    return f"Set agent_prompt_rules: {', '.join(rules_off)} may keep this prefix.{instead}"


def _moved(messages: Messages, *, part: bool = False) -> Messages:
    """Return messages with the snapshot moved. In a ``part`` of a conversation its new place may still be to come."""
    first = messages[0] if messages else {}
    found = _SNAPSHOT.search(first["content"]) if first.get("role") == "system" else None
    user = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    if found is None or (user is None and not part):
        return messages
    moved = [dict(message) for message in messages]
    moved[0]["content"] = first["content"][: found.start()] + first["content"][found.end() :]
    if user is not None:
        moved[user]["content"] = f"{moved[user]['content']}\n\n{found.group().rstrip()}"
    return moved
