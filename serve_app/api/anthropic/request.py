"""Parse the bodies of ``POST /v1/messages`` and ``/v1/messages/count_tokens`` into ChatRequest."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field

from serve_app.api.anthropic.conversation import BLOCK_FIELDS, ConversationReader
from serve_app.api.anthropic.history import RequestDigests, digest, digests
from serve_app.api.hints import METADATA, NVEXT, Hints, user_of
from serve_app.api.json_body import (
    MAX_ID_CHARS,
    JsonBody,
    ModelName,
    Must,
    Refused,
    Stops,
    StoreKV,
    Text256,
    Text1024,
    Whole,
)
from serve_app.api.openai.request import MAX_TOKENS
from serve_app.api.openai.tools import MAX_TOOL_VALUES, MAX_TOOLS, Description, Function, FunctionName, tool_use
from serve_app.api.request import ChatRequest, ToolUse, thinking_switches, unknown_fields
from serve_app.errors import InvalidRequest
from serve_app.structured.grammar import Grammar

Control = Annotated[Any, Field(description='{"type": "ephemeral"}, with a ttl of "5m" or "1h"')]


class MessageTool(JsonBody):
    """A function that the model may call."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"allowed_callers", "eager_input_streaming"})

    type: Annotated[
        Literal["custom"] | None, Must('"custom", or left out: other tools are not supported by this version')
    ] = None
    name: FunctionName
    description: Description = None
    input_schema: Annotated[dict[str, Any], Must("an object, the JSON Schema of the input")]
    cache_control: Control = None
    strict: bool | None = Field(None, description="enforced where the answer must call; elsewhere without effect")
    defer_loading: bool | None = Field(
        None, description="true: in the prompt where a tool_reference or tool_addition names it, not before"
    )
    input_examples: Annotated[list[Any] | None, Must("a list of inputs")] = Field(
        None, description="shown to the model in the schema, as its examples"
    )

    def function(self) -> Function:
        """Return the tool in the common form."""
        schema = self.input_schema
        if self.input_examples:
            schema = {"examples": self.input_examples, **schema}
        return Function(self.name, self.description, schema, self.strict)


class MessageToolChoice(JsonBody):
    """Whether the answer may or must call, and which tool."""

    type: Annotated[Literal["auto", "any", "tool", "none"], Must("auto, any, tool or none")]
    name: Annotated[str | None, Must("the name of a tool")] = None
    disable_parallel_tool_use: bool | None = Field(None, description="true: the answer ends with its first call")


class OutputConfig(JsonBody):
    """The required form of the answer, and the effort of thinking, if the chat template knows efforts."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"task_budget"})

    effort: Annotated[str | None, Must("a string")] = None
    format: Annotated[dict[str, Any] | None, Must("an object with type and schema")] = None


class ThinkingConfig(JsonBody):
    """Whether the model thinks, and whether the answer shows it."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"budget_tokens"})

    type: Annotated[
        Literal["enabled", "adaptive", "between_tools", "disabled"],
        Must("enabled, adaptive, between_tools or disabled"),
    ]
    budget_tokens: int | None = None
    display: str | None = None


class DiagnosticsBody(JsonBody):
    """A question for the reason of a cache miss."""

    previous_message_id: Text256 = Field(None, description="the id of the answer to compare this request with")


_FORMAT = {"type", "schema", "name"}
_HARMLESS_EDITS = ({"type": "clear_thinking_20251015", "keep": "all"},)
_INNER_FIELDS = (
    "context_management.edits",
    *BLOCK_FIELDS,
    *(f"tools[].{name}" for name in MessageTool.model_fields),
)


class CountTokensBody(JsonBody):
    """The body of ``POST /v1/messages/count_tokens``: all fields that form the prompt."""

    without_effect: ClassVar[frozenset[str]] = frozenset(
        {
            "service_tier", "inference_geo", "user_profile_id", "workspace_id", "fallbacks", "fallback_credit_token",
            "compaction", "nvext",
        }
    )  # fmt: skip
    bounded: ClassVar[Mapping[str, int]] = {
        "messages": 1 << 17, "system": 1 << 14, "tools": MAX_TOOL_VALUES, "output_config": 1 << 14,
        "stop_sequences": 1 << 10, "metadata": 1 << 10, "nvext": 1 << 10,
    }  # fmt: skip
    refused: ClassVar[Refused] = {
        "container": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
        "output_format": (),
        "thread": (),
    }
    instead: ClassVar[Mapping[str, str]] = {
        "output_format": "output_config.format",
        "thread": "the whole conversation in messages",
        "compaction": "a message that asks for a summary",
    }

    model: ModelName
    messages: Annotated[
        list[Any], Field(min_length=1), Must("a list of at least one message")
    ] = Field(description="text, tool calls and results; the answer continues a final assistant text")  # fmt: skip
    system: Annotated[str | list[Any], Must("a string or a list of text blocks")] = Field(
        "", description="a string, or text blocks to join"
    )
    tools: Annotated[
        list[Annotated[MessageTool, Must("an object with name and input_schema")]],
        Field(max_length=MAX_TOOLS),
        Must(f"a list of at most {MAX_TOOLS} tools"),
    ] = Field([], description="functions that the model may call")
    tool_choice: Annotated[
        MessageToolChoice | None, Must("an object with the type auto, any, tool or none")
    ] = Field(None, description="whether the model may or must call, and which tool")  # fmt: skip
    cache_control: Control = None
    thinking: Annotated[ThinkingConfig | None, Must("an object with type")] = Field(
        None, description="whether the model thinks, if its chat template offers the choice"
    )
    output_config: Annotated[OutputConfig, Must("an object with format")] = Field(
        OutputConfig(), description="format: json_schema"
    )
    context_management: Annotated[dict[str, Any] | None, Must("an object with edits")] = Field(
        None, description="no edit is applied: the whole conversation is shown"
    )
    cache_salt: Text1024 = Field(None, description="divides the tenant's cache: only equal salts share KV")
    prompt_ref: Text256 = Field(None, description="NAME@VERSION or NAME of a registered prompt to prepend")

    def request(self, *, follow_rules: bool = True) -> ChatRequest:
        """Return the validated request. Raises InvalidRequest for fields that contradict each other.

        ``follow_rules``: change prompts by the rules for agents' clients (`agent_prompt_rules`).
        """
        added = _tools_in(self.messages)
        deferred = {tool.name: tool for tool in self.tools if tool.defer_loading}
        later = {
            tool.name: tool.function().for_template()
            for tool in (*(deferred.values() if follow_rules else ()), *added.values())
        }
        read = ConversationReader(later, follow_rules=follow_rules)
        if deferred:
            read.rules.add("deferred_tools")
        read.add_tools(tool.cache_control for tool in self.tools)
        read.add_system(self.system)
        users = (at for at, one in enumerate(self.messages) if isinstance(one, dict) and one.get("role") == "user")
        last_user = max(users, default=-1)
        for index, message in enumerate(self.messages):
            read.add_message(message, index, last_user)
        if all(message["role"] == "system" for message in read.messages):
            raise InvalidRequest("messages must hold words of user or assistant.", param="messages")
        read.end_with_breakpoint(self.cache_control)
        for tool in self.tools:
            if (callers := (tool.model_extra or {}).get("allowed_callers")) and "direct" not in callers:
                read.ignored.add("tools[].allowed_callers")
        managed, form = self.context_management or {}, self.output_config.format or {}
        if any(edit not in _HARMLESS_EDITS for edit in managed.get("edits") or ()):
            read.ignored.add("context_management.edits")
        for path, given, read_fields in (
            ("context_management", managed, {"edits"}),
            ("output_config.format", form, _FORMAT),
        ):
            read.ignored.update(f"{path}.{name}" for name in given.keys() - read_fields if given[name] is not None)
        read.ignored.update(self.unread_inside())
        if read.messages[-1] == {"role": "assistant", "content": ""} and len(read.messages) > 1:
            del read.messages[-1]  # the same as to ask for an answer
        last = read.messages[-1]
        goes_on = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
        use = self._tool_use([*self.tools, *added.values()], read.removed)
        return ChatRequest(
            model=self.model,
            messages=tuple(read.messages),
            breakpoints=tuple(read.breakpoints),
            tool_use=replace(use, later=frozenset(later)) if use else use,
            prompt_rules=tuple(sorted(read.rules)) if follow_rules else (),
            rules_off=() if follow_rules else tuple(sorted(read.rules)),
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            thinking=self._thinking(),
            include_reasoning=self.thinking is None or self.thinking.display != "omitted",
            grammar=self._grammar(),
            cache_salt=self.cache_salt,
            prompt_ref=self.prompt_ref,
            unknown=self.unknown(sorted(read.ignored), _INNER_FIELDS),
        )

    def _thinking(self) -> dict[str, Any]:
        effort = self.output_config.effort or ""
        if self.thinking is not None:
            return thinking_switches("none" if self.thinking.type == "disabled" else effort)
        return {"reasoning_effort": effort} if effort else {}

    def _tool_use(self, tools: Sequence[MessageTool], removed: Collection[str]) -> ToolUse:
        functions, choice = [tool.function() for tool in tools], self.tool_choice
        allowed = [tool.name for tool in tools if tool.name not in removed] if removed else None
        if choice is None:
            return tool_use(functions, "auto", allowed)
        if (choice.type == "tool") != (choice.name is not None):
            raise InvalidRequest("tool_choice has a name where its type is tool, and there alone.", param="tool_choice")
        if choice.name is not None:
            return tool_use(functions, "required", [choice.name], parallel=False)
        kind = "required" if choice.type == "any" else choice.type
        return tool_use(functions, kind, allowed, parallel=not choice.disable_parallel_tool_use)

    def _grammar(self) -> Grammar | None:
        form, field = self.output_config.format, "output_config.format"
        if form is None:
            return None
        if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
            raise InvalidRequest(f"{field} must have the type json_schema and a schema, an object.", param=field)
        return Grammar.json_schema(form["schema"], f"{field}.schema")


class MessagesBody(CountTokensBody):
    """The body of ``POST /v1/messages``."""

    without_effect: ClassVar[frozenset[str]] = CountTokensBody.without_effect - {"compaction"}
    refused: ClassVar[Refused] = {**CountTokensBody.refused, "compaction": ()}

    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), Whole] = Field(
        description="0: compute and cache the prompt, generate nothing"
    )
    temperature: Annotated[float, Field(ge=0, le=1, description="below 0.00001: greedy")] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKENS), Whole] = Field(0, description="0: all tokens")
    stop_sequences: Stops = ()
    stream: bool = False
    service_tier: Annotated[Literal["auto", "standard_only"] | None, Must("auto or standard_only")] = Field(
        None, description="no effect: usage always reports standard"
    )
    metadata: Any = Field(None, description=METADATA)
    nvext: Any = Field(None, description=NVEXT)
    diagnostics: DiagnosticsBody | None = Field(None, description="report the reason of a cache miss")
    store_kv: StoreKV = None

    def request(self, *, follow_rules: bool = True) -> ChatRequest:
        """Return the validated request. See ``CountTokensBody.request``."""
        if self.stream and not self.max_tokens:
            raise InvalidRequest("max_tokens must be at least 1 where stream is true.", param="max_tokens")
        prompt, hints = super().request(follow_rules=follow_rules), Hints.of(self.nvext, self.metadata)
        return replace(
            prompt,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            stream=self.stream,
            store_kv=self.store_kv,
            session=_session(self.metadata) or hints.session,
            user="" if _session(self.metadata) else user_of(_user_id(self.metadata)),
            parent=hints.parent,
            final=hints.final,
            expected_tokens=hints.output_tokens,
            priority=hints.priority,
            unknown=(*prompt.unknown, *unknown_fields(hints.unread, ())),
            cache_diagnostics=self.diagnostics is not None,
            repeated={"diagnostics": self._digests(prompt), **self._edits()},
        )

    def _edits(self) -> dict[str, Any]:
        return {} if self.context_management is None else {"context_management": {"applied_edits": []}}

    def _digests(self, prompt: ChatRequest) -> RequestDigests:
        """Return the digests that the answer's format compares with an earlier request."""
        messages = prompt.messages
        at = 1 if messages[0]["role"] == "system" else 0
        return RequestDigests(
            digest([self.model, self.cache_salt]),
            digest([prompt.prompt_ref, *messages[:at]]),
            digest(prompt.tool_use.shown),
            digests(messages[at:]),
            self.diagnostics.previous_message_id if self.diagnostics is not None else None,
        )


class _User(msgspec.Struct):
    session_id: str


def _user_id(metadata: Any) -> Any:
    return metadata.get("user_id") if isinstance(metadata, dict) else None


def _session(metadata: Any) -> str:
    """Return the session that Claude Code names in ``metadata.user_id``, "" for any other form."""
    user_id = _user_id(metadata)
    if not isinstance(user_id, str) or len(user_id) > 2 * MAX_ID_CHARS:
        return ""
    try:
        word = msgspec.json.decode(user_id, type=_User).session_id
    except (ValueError, RecursionError):  # Anthropic accepts any string
        return ""
    return word if len(word) <= MAX_ID_CHARS else ""


def _tools_in(messages: Iterable[Any]) -> dict[str, MessageTool]:
    """Return the tools that system messages define, by name. Raises InvalidRequest for an invalid one."""
    tools: dict[str, MessageTool] = {}
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) and message.get("role") == "system" else None
        for number, block in enumerate(content if isinstance(content, list) else ()):
            added = block.get("tool") if isinstance(block, dict) and block.get("type") == "tool_addition" else None
            if isinstance(added, dict) and added.get("type") == "tool_definition":
                path = f"messages[{index}].content[{number}].tool.definition"
                defined = added.get("definition")
                if not isinstance(defined, dict):
                    raise InvalidRequest(f"{path} must be an object with name and input_schema.", param=path)
                if defined.get("type") not in (None, "custom"):
                    continue  # it runs elsewhere, and is shown as text
                try:
                    tool = MessageTool.checked(defined)
                except InvalidRequest as error:
                    raise InvalidRequest(f"{path}.{error.message}", param=path) from error
                tools[tool.name] = tool
    return tools


def parse_messages(body: bytes, *, follow_rules: bool = True) -> ChatRequest:
    """Parse the body of ``POST /v1/messages``. Raises InvalidRequest, and nothing else, if it is invalid."""
    return MessagesBody.parse(body).request(follow_rules=follow_rules)


def parse_count(body: bytes, *, follow_rules: bool = True) -> ChatRequest:
    """Parse the body of ``POST /v1/messages/count_tokens``. Raises InvalidRequest, and nothing else."""
    return CountTokensBody.parse(body).request(follow_rules=follow_rules)
