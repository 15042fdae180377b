"""Convert Anthropic's system prompt, messages and blocks to chat-template messages, with ``cache_control``'s rules."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from serve_app.api.as_text import as_text
from serve_app.api.json_body import MESSAGE_BLOCKS, call_id
from serve_app.api.openai.tools import MAX_ARGUMENT_DEPTH, too_deep
from serve_app.api.request import CacheBreakpoint, Tool, reasoning_fields
from serve_app.errors import InvalidRequest

MAX_BREAKPOINTS = 4
TTLS_S = {"5m": 300.0, "1h": 3600.0}
ROLES = ("user", "assistant", "system")
BILLING = "x-anthropic-billing-header:"
"""The start of a system block of Claude Code that only Anthropic needs; it differs in every conversation."""
FAILED = "The call failed."
"""What a model reads first of a tool's result with ``is_error``, on a line of its own."""
UNTIL_USER = "next_user_message"
"""The ``clear_at`` of a system message that the model sees only until the user's next message."""

_FIELDS = {
    "text": frozenset({"type", "text", "cache_control"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "redacted_thinking": frozenset({"type", "data"}),
    "tool_use": frozenset({"type", "id", "name", "input", "cache_control", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
}
_BY = {"tool_use": "assistant", "tool_result": "user"}
"""Who sends the blocks that only one role may send."""
BLOCK_FIELDS = tuple(f"messages[].content[].{name}" for name in sorted(frozenset().union(*_FIELDS.values())))


class ConversationReader:
    """Reads a conversation by blocks: tools, then the system prompt, then messages. Methods raise InvalidRequest.

    ``breakpoints``: the ends of prefixes to keep in the KV cache. ``ignored``: paths of unread fields. ``rules``: the
    prompt rules for what is there; ``follow_rules`` False: none is followed. ``later``: tools that the model first sees
    where the conversation names them. ``removed``: tools that it may no longer call.
    """

    def __init__(self, later: Mapping[str, Tool] = MappingProxyType({}), *, follow_rules: bool = True) -> None:
        self.later = later
        self.removed: set[str] = set()
        self.rules: set[str] = set()
        self._follow_rules = follow_rules
        self.messages: list[dict[str, Any]] = []
        self.breakpoints: list[CacheBreakpoint] = []
        self.ignored: set[str] = set()
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._shorter = False
        self._last_ttl_s = 0.0

    def add_tools(self, controls: Iterable[Any]) -> None:
        """Add the ``cache_control`` of each tool."""
        for index, control in enumerate(controls):
            self._add_breakpoint(control, f"tools[{index}]")

    def add_system(self, system: str | list[Any]) -> None:
        """Add the system prompt; its blocks are joined without a separator."""
        blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
        if not blocks or system == "":
            return
        self.messages.append({"role": "system", "content": ""})
        for index, block in enumerate(blocks):
            path = f"system[{index}]"
            if _kind(block, path) != "text":
                raise InvalidRequest(f"{path} must be a text block.", param=path)
            self._note_unread(block)
            # A first block that differs would keep conversations from sharing the KV of the following ones.
            billing = not index and str(block.get("text")).startswith(BILLING)
            if billing:
                self.rules.add("billing_line")
            if not (billing and self._follow_rules):
                self._add_text(block, path)
        self._join()

    def add_message(self, message: Any, index: int, last_user: int = -1) -> None:
        """Add a message. A tool's result becomes a separate message, because templates have a role for it.

        ``last_user``: the index of the user's last message, after which some system messages are no longer shown.
        """
        path = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in ROLES:
            raise InvalidRequest(f"{path} must be an object with a role, one of {', '.join(ROLES)}.", param=path)
        if role == "system" and message.get("clear_at") == UNTIL_USER and index < last_user:
            return
        read = {"role", "content", "clear_at"} if role == "system" else {"role", "content"}
        self.ignored.update(f"messages[].{name}" for name in message.keys() - read)
        if isinstance(content, str):
            self.messages.append({"role": role, "content": content})
            self._last_ttl_s = 0.0
            return
        where = f"{path}.content"
        if content is None and role == "system":
            return  # such a message only configures a hosted model
        if content is None and role == "assistant":
            content = []  # it said nothing
        if not isinstance(content, list):
            raise InvalidRequest(f"{where} must be a string or a list of blocks.", param=where)
        began = len(self.messages)
        for number, block in enumerate(content):
            self._add_block(role, block, f"{where}[{number}]", began)
        if self._reasoning or len(self.messages) == began:  # an answer that was cut off, or is empty
            self._turn(role, began)
        self._join()
        self._reason()

    def end_with_breakpoint(self, control: Any) -> None:
        """Add the body's own ``cache_control``, which applies after the last block."""
        ttl_s = _ttl_s(control, "cache_control")
        if ttl_s and ttl_s == self._last_ttl_s:
            return  # the last block already has this breakpoint
        if ttl_s and self._last_ttl_s:
            raise InvalidRequest("cache_control must have the ttl of the last block's own.", param="cache_control")
        last = self.messages[-1]
        if last["content"] or "tool_calls" in last or last["role"] == "tool":
            self._add_breakpoint(control, "")

    def _add_block(self, role: str, block: Any, path: str, began: int) -> None:
        kind = _kind(block, path)
        self._note_unread(block)
        if kind == "redacted_thinking":
            self.ignored.add(f"messages[].content[].{kind}")  # no model here wrote it, nor can read it
            return
        if kind == "thinking":
            if role != "assistant" or not isinstance(block.get("thinking"), str):
                raise InvalidRequest(f"{path} must be from assistant, its thinking a string.", param=path)
            if not block["thinking"] and block.get("signature"):  # the thought is sealed in it
                self.ignored.add("messages[].content[].signature")
            self._reasoning.append(block["thinking"])
            return
        if (by := _BY.get(str(kind), role)) != role:
            raise InvalidRequest(f"{path} has the type {kind!r}, which is for {by}, not {role}.", param=path)
        if kind == "tool_result":
            self._join()
            result = self._result_text(block.get("content"), f"{path}.content")
            if block.get("is_error") is True:
                result = "\n".join(filter(None, (FAILED, result)))
            elif block.get("is_error"):
                self.ignored.add("messages[].content[].is_error")
            answered = call_id(block.get("tool_use_id"), f"{path}.tool_use_id")
            self.messages.append({"role": "tool", "content": result, "tool_call_id": answered})
            self._add_breakpoint(block.get("cache_control") or _inner_control(block.get("content")), path)
            return
        self._turn(role, began)
        if kind != "tool_use":
            self._add_text(block, path)
            return
        name, arguments = block.get("name"), block.get("input")
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"{path} must have a name.", param=path)
        if not isinstance(arguments, dict):  # the call was cut off, and its client cannot repair it
            self.ignored.add("messages[].content[].input")
            arguments = {}
        if too_deep(arguments):
            raise InvalidRequest(f"{path}.input must be nested at most {MAX_ARGUMENT_DEPTH} deep.", param=path)
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id(block.get("id"), f"{path}.id"), "type": "function", "function": function}
        self.messages[-1].setdefault("tool_calls", []).append(call)
        self._add_breakpoint(block.get("cache_control"), path)

    def _turn(self, role: str, began: int) -> None:
        """Begin a message of the role, unless the last one is its."""
        if len(self.messages) == began or self.messages[-1]["role"] != role:
            self._join()
            self.messages.append({"role": role, "content": ""})

    def _note_unread(self, block: dict[str, Any]) -> None:
        unread = block.keys() - _FIELDS.get(str(block.get("type")), block.keys())
        self.ignored.update(f"messages[].content[].{name}" for name in unread if block[name] not in (None, [], False))

    def _text(self, block: dict[str, Any], path: str) -> str:
        kind = block.get("type")
        if kind == "fallback":
            self.ignored.add(f"messages[].content[].{kind}")  # it marks where another model went on
            return ""
        if kind == "compaction" and (changes := block.get("tool_changes")):
            summary = {name: value for name, value in block.items() if name != "tool_changes"}
            parts = [summary, *(change for change in changes if isinstance(change, dict))]
            return "".join(self._text(part, path) for part in parts)
        if kind == "compaction" and not block.get("content") and not block.get("encrypted_content"):
            return ""  # it failed
        if kind != "text":
            defined = self._with_definition(block)
            return as_text(defined, path, "messages[].content[]", MESSAGE_BLOCKS, self.ignored)
        text = block.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{path}.text must be a string.", param=f"{path}.text")
        if not text and block.get("cache_control") is not None:
            field = f"{path}.cache_control"
            raise InvalidRequest(f"{field} cannot be set for empty text blocks.", param=field)
        return text

    def _with_definition(self, block: dict[str, Any]) -> dict[str, Any]:
        """Return a block that makes a tool available, with the tool itself, if the model has not seen it before."""
        kind, named = block.get("type"), block.get("tool")
        name = block.get("tool_name") if kind == "tool_reference" else tool_named(named)
        if not isinstance(name, str):
            return block
        if kind == "tool_removal":
            self.removed.add(name)
        elif kind == "tool_addition":
            self.removed.discard(name)
        tool = self.later.get(name)
        if tool is None or kind not in ("tool_reference", "tool_addition"):
            return block
        return {"type": kind, "tool": tool}

    def _result_text(self, content: Any, path: str) -> str:
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise InvalidRequest(f"{path} must be a string or a list of blocks.", param=path)
        for index, block in enumerate(content):
            _kind(block, f"{path}[{index}]")
            self._note_unread(block)
        return "".join(self._text(block, f"{path}[{index}]") for index, block in enumerate(content))

    def _reason(self) -> None:
        """Add the reasoning of all blocks so far to the last message at once, for the same reason as ``_join``."""
        if self._reasoning:
            reasoning = "".join((self.messages[-1].get("reasoning", ""), *self._reasoning))
            self.messages[-1].update(reasoning_fields(reasoning))
            self._reasoning.clear()

    def _add_text(self, block: dict[str, Any], path: str) -> None:
        self._texts.append(self._text(block, path))
        self._add_breakpoint(block.get("cache_control"), path)

    def _join(self) -> None:
        """Append all block texts to the last message at once: one by one would copy the earlier ones each time."""
        if self._texts:
            self.messages[-1]["content"] += "".join(self._texts)
            self._texts.clear()

    def _add_breakpoint(self, control: Any, path: str) -> None:
        field = f"{path}.cache_control" if path else "cache_control"
        ttl_s = self._last_ttl_s = _ttl_s(control, field)
        if not ttl_s:
            return
        unread = (name for name in control.keys() - {"type", "ttl"} if control[name] is not None)
        self.ignored.update(f"cache_control.{name}" for name in unread)
        if len(self.breakpoints) == MAX_BREAKPOINTS:
            raise InvalidRequest(f"{field} is over the limit of {MAX_BREAKPOINTS} breakpoints.", param=field)
        if ttl_s > TTLS_S["5m"] and self._shorter:
            raise InvalidRequest(f"{field} has the ttl 1h, and must come before all that have 5m.", param=field)
        self._shorter = self._shorter or ttl_s == TTLS_S["5m"]
        self._join()
        self._reason()
        as_far = [dict(message) for message in self.messages]
        if as_far and "tool_calls" in as_far[-1]:
            as_far[-1]["tool_calls"] = list(as_far[-1]["tool_calls"])  # the same message may get more calls
        self.breakpoints.append(CacheBreakpoint(tuple(as_far), ttl_s))


def tool_named(tool: Any) -> str | None:
    """Return the name of the tool of a ``tool_addition`` or ``tool_removal``, None for any other form."""
    named = tool.get("definition") if isinstance(tool, dict) and tool.get("type") == "tool_definition" else tool
    name = named.get("name") if isinstance(named, dict) else None
    return name if isinstance(name, str) else None


def _kind(block: Any, path: str) -> Any:
    if not isinstance(block, dict):
        raise InvalidRequest(f'{path} must be an object, as {{"type": "text", "text": "..."}}.', param=path)
    return block.get("type")


def _ttl_s(control: Any, field: str) -> float:
    """Return the lifetime of a breakpoint, 0 if there is none."""
    if control is None:
        return 0.0
    ttl = control.get("ttl") or "5m" if isinstance(control, Mapping) and control.get("type") == "ephemeral" else None
    if not isinstance(ttl, str) or ttl not in TTLS_S:
        raise InvalidRequest(f'{field} must be {{"type": "ephemeral"}}, with a ttl of "5m" or "1h".', param=field)
    return TTLS_S[ttl]


def _inner_control(content: Any) -> Any:
    """Return the last mark inside a tool's result: it holds at the result's end, as the prefix is the whole result."""
    blocks: list[Any] = content if isinstance(content, list) else []
    return next((block["cache_control"] for block in reversed(blocks) if block.get("cache_control")), None)
