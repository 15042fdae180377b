"""Parse the body of ``POST /v1/responses`` into a ChatRequest, with the fields that the answer repeats."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from serve_app.api.json_body import RESPONSE_TOOLS, JsonBody, Must, Refused, Text128, Text1024, Whole
from serve_app.api.openai.caching import take_marks
from serve_app.api.openai.request import (
    BOUNDED,
    INSTEAD,
    MAX_TOKENS,
    REFUSED,
    Effort,
    GenerationBody,
    StreamOptions,
    TokenLimit,
    TopLogprobs,
    of_format,
)
from serve_app.api.openai.responses.items import ITEM_PATHS, messages_of
from serve_app.api.openai.tools import (
    FUNCTION,
    MAX_TOOL_VALUES,
    MAX_TOOLS,
    Description,
    Function,
    FunctionBody,
    FunctionName,
    Mode,
    Parameters,
    tool_use,
)
from serve_app.api.request import CacheBreakpoint, ChatRequest, ToolUse, thinking_switches
from serve_app.errors import InvalidRequest
from serve_app.structured.grammar import Grammar

_NO_FORMAT = {"type": "text"}
_SHOWN = {
    "function": {"type", "name", "description", "parameters", "strict"},
    "namespace": {"type", "name", "description", "tools"},
}

LOGPROBS = "message.output_text.logprobs"
"""The name of log-probabilities in ``include``."""


class ResponseFunction(FunctionBody):
    """A function that the model may call."""

    type: FUNCTION


class ResponseTool(JsonBody):
    """A function or a namespace of functions. OpenAI's own ``web_search`` is accepted, but no model sees it."""

    type: Annotated[
        Literal[
            "function", "namespace", "web_search", "web_search_2025_08_26", "web_search_preview",
            "web_search_preview_2025_03_11",
        ],
        Must('"function" or "namespace": other tools are not supported by this version'),
    ]  # fmt: skip
    name: FunctionName | None = None
    description: Description = None
    parameters: Parameters = None
    strict: bool | None = None
    tools: Annotated[
        list[Annotated[ResponseFunction, Must("an object with type and name")]], Must("a list of functions")
    ] = Field([], description="of a namespace")

    def functions(self, path: str) -> list[Function]:
        """Return the functions that the model sees. Raises InvalidRequest if the name is missing."""
        if self.type not in RESPONSE_TOOLS.read:
            return []
        if self.name is None:
            raise InvalidRequest(f"{path}.name is missing; it must be the tool's name.", param=f"{path}.name")
        if self.type == "function":
            return [Function(self.name, self.description, self.parameters, self.strict)]
        return [
            Function(f"{self.name}.{tool.name}", tool.description, tool.parameters, tool.strict) for tool in self.tools
        ]


class ResponseNamedChoice(JsonBody):
    """A function that has to be called."""

    type: FUNCTION
    name: FunctionName


class ResponseAllowedTool(JsonBody):
    """A function, or a tool that the model does not see. A namespace stands for its functions."""

    type: str
    name: FunctionName | None = None
    namespace: FunctionName | None = None


class ResponseAllowedChoice(JsonBody):
    """Some of the tools may be called, or have to."""

    type: Literal["allowed_tools"]
    mode: Mode
    tools: Annotated[list[ResponseAllowedTool], Must("a list of tools")]

    def names(self, functions: Sequence[Function]) -> list[str]:
        """Return the names of the allowed functions, of those that the model sees."""
        allowed: list[str] = []
        for tool in self.tools:
            if tool.type == "namespace":
                allowed += [function.name for function in functions if function.name.startswith(f"{tool.name}.")]
            elif tool.type == "function":
                allowed.append(".".join(filter(None, (tool.namespace, tool.name))))
        return allowed


class ReasoningConfig(JsonBody):
    """Whether the model thinks. ``summary`` changes nothing: reasoning is returned in full."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary"})

    effort: Effort = None
    summary: str | None = None


class TextConfig(JsonBody):
    """The form of the text."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: Annotated[dict[str, Any] | None, Must("an object with type")] = None
    verbosity: str | None = None

    @property
    def repeated(self) -> dict[str, Any]:
        """What an answer repeats of it."""
        form = self.format or _NO_FORMAT
        if form.get("type") == "json_schema":
            form = {"description": None, "strict": False, **form}
        return {"format": form, **({"verbosity": self.verbosity} if self.verbosity else {})}


class ResponseStreamOptions(StreamOptions):
    """Options of a stream. Events get no padding."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_obfuscation: bool | None = None


_FIELDS = (*ITEM_PATHS, *(f"tools[].{name}" for name in ResponseTool.model_fields))


class ResponsesBody(GenerationBody):
    """The body of ``POST /v1/responses``."""

    without_effect: ClassVar[frozenset[str]] = GenerationBody.without_effect - {"store"} | {"client_metadata"}
    bounded: ClassVar[Mapping[str, int]] = {**BOUNDED, "input": 1 << 17, "tools": MAX_TOOL_VALUES, "text": 1 << 14}
    refused: ClassVar[Refused] = {
        **REFUSED,
        "prompt_logprobs": (),
        "response_format": (_NO_FORMAT,),
        "conversation": (),
        "background": (False,),
        "prompt": (),
        "truncation": ("disabled",),
        "moderation": (),
        "context_management": ([],),
    }
    instead: ClassVar[Mapping[str, str]] = {
        **INSTEAD,
        "response_format": "text.format",
        "conversation": "previous_response_id",
        "prompt": "prompt_ref",
    }

    n: Annotated[int, Field(ge=1, le=1), Whole, Must("1: a response is one answer")] = 1
    input: Annotated[
        str | list[Any],
        Field(description="text, or a list of messages, function calls and their results"),
        Must("a string or a list of items"),
    ]
    previous_response_id: Text128 = Field(None, description="a stored response; input continues its conversation")
    store: bool = Field(True, description="store the response, if the deployment stores responses")
    instructions: Annotated[str | None, Must("a string")] = Field(None, description="a system message before the input")
    max_output_tokens: TokenLimit = Field(None, description="default: the deployment's")
    stream_options: ResponseStreamOptions | None = None
    text: Annotated[TextConfig, Must("an object with format")] = Field(
        TextConfig(), description="format: text, json_object or json_schema"
    )
    metadata: Annotated[dict[str, Any], Must("an object")] = Field(
        {},
        description="returned unchanged in responses; session_id, parent_session_id and session_final are hints, in "
        "messages a user_id of JSON with a session_id, too",
    )
    include: Annotated[list[str], Must("a list of strings")] = Field(
        [], description=f"{LOGPROBS}: log-probabilities of the text's tokens; other values have no effect"
    )
    top_logprobs: TopLogprobs = Field(0, description="report this many of the likeliest tokens at each place, too")
    reasoning: Annotated[ReasoningConfig, Must("an object with effort")] = Field(
        ReasoningConfig(), description="effort: like reasoning_effort in chats"
    )
    user: Text1024 = Field(None, description="returned unchanged in responses")
    safety_identifier: Text1024 = Field(None, description="returned unchanged in responses")
    tools: Annotated[
        list[Annotated[ResponseTool, Must("an object with type and name")]],
        Field(max_length=MAX_TOOLS),
        Must(f"a list of at most {MAX_TOOLS} tools"),
    ] = Field([], description="functions that the model may call")
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ResponseNamedChoice | ResponseAllowedChoice,
        Must(
            '"none", "auto", "required", {"type": "function", "name": "..."}, '
            'or {"type": "allowed_tools", "mode": "auto", "tools": [...]}'
        ),
    ] = Field("auto", description="whether the model may or must call, and which tool")
    parallel_tool_calls: bool = Field(True, description="false: the answer ends with its first call")
    max_tool_calls: Annotated[int | None, Field(ge=0, le=MAX_TOKENS), Whole] = Field(
        None, description="no effect: it counts calls that a server makes itself; returned unchanged"
    )

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the answer; None: any text. Raises InvalidRequest."""
        form, other = of_format(self.text.format, "text.format"), super().grammar
        if form is not None and other is not None:
            raise InvalidRequest("structured_outputs does not go with text.format.", param="structured_outputs")
        return form or other

    @property
    def items(self) -> list[Any]:
        """The items of the input."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    def request(self, earlier: Sequence[Any] | None = None, items: list[Any] | None = None) -> ChatRequest:
        """Return the validated request. Raises InvalidRequest for fields that contradict each other.

        ``earlier``: the items of ``previous_response_id``, None if the deployment stores no responses. ``items``: those
        of the input, with the stored ones in place of references.
        """
        if self.previous_response_id is not None and earlier is None:
            message = "previous_response_id has no effect here, for nothing is stored; send the whole conversation."
            raise InvalidRequest(message, param="previous_response_id")
        with_logprobs = LOGPROBS in self.include
        if self.top_logprobs and not with_logprobs:
            raise InvalidRequest(f'top_logprobs needs include: ["{LOGPROBS}"].', param="top_logprobs")
        if self.logprob_token_ids and not with_logprobs:
            raise InvalidRequest(f'logprob_token_ids needs include: ["{LOGPROBS}"].', param="logprob_token_ids")
        if with_logprobs and self.tools and self.tool_choice != "none":
            raise InvalidRequest(f"{LOGPROBS} does not go with tools: a call's tokens have none here.", param="include")
        ignored = {f"tools[].{tool.type}" for tool in self.tools if tool.type not in RESPONSE_TOOLS.read}
        if self.stream_options is not None and self.stream_options.continuous_usage_stats is not None:
            ignored.add("stream_options.continuous_usage_stats")
        before, given = list(earlier or ()), items or self.items

        def as_far(items: list[Any], ignored: set[str]) -> list[dict[str, Any]]:
            first = [{"role": "system", "content": self.instructions}] if self.instructions else []
            return [*first, *messages_of([*before, *items], ignored, -len(before))]

        messages = as_far(given, ignored)
        marks = (
            CacheBreakpoint(tuple(as_far([*given[:at], cut], set())), ttl_s)
            for at, cut, ttl_s in (self.marks(given, "input") if take_marks(ignored) else ())
        )
        if not messages:
            raise InvalidRequest("input must hold at least one item.", param="input")
        functions = [one for at, tool in enumerate(self.tools) for one in tool.functions(f"tools[{at}]")]
        if len(functions) > MAX_TOOLS:
            raise InvalidRequest(f"tools must hold at most {MAX_TOOLS} functions in all.", param="tools")
        return ChatRequest(
            messages=tuple(messages),
            max_tokens=self.max_output_tokens,
            tool_use=self._tool_use(functions),
            logprobs=self.top_logprobs if with_logprobs else None,
            thinking=thinking_switches(self.reasoning.effort),
            repeated={**self._repeated(), "store": self.store and earlier is not None},
            **self.common(ignored, _FIELDS, kept=self.kept(marks)),
        )

    def _tool_use(self, functions: Sequence[Function]) -> ToolUse:
        choice = self.tool_choice
        if isinstance(choice, ResponseNamedChoice):
            return tool_use(functions, "required", [choice.name], parallel=False)
        if isinstance(choice, ResponseAllowedChoice):
            return tool_use(functions, choice.mode, choice.names(functions), parallel=self.parallel_tool_calls)
        return tool_use(functions, choice, parallel=self.parallel_tool_calls)

    def _repeated(self) -> dict[str, Any]:
        """Return the fields that an answer repeats, in OpenAI's shape, except ``store``."""
        choice = self.tool_choice
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata,
            "frequency_penalty": self.frequency_penalty,
            "parallel_tool_calls": self.parallel_tool_calls,
            "presence_penalty": self.presence_penalty,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "prompt_cache_options": self.prompt_cache_options
            and self.prompt_cache_options.model_dump(exclude_none=True),
            "prompt_cache_retention": self.prompt_cache_retention,
            "reasoning": {"effort": self.reasoning.effort, "summary": self.reasoning.summary},
            "safety_identifier": self.safety_identifier,
            "service_tier": self.service_tier,
            "temperature": self.temperature,
            "text": self.text.repeated,
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            "tools": [tool.model_dump(include=_SHOWN.get(tool.type, {"type"})) for tool in self.tools],
            "top_logprobs": self.top_logprobs,
            "top_p": self.top_p,
            "truncation": "disabled",
            "background": False,
            "user": self.user,
        }


def parse_response_request(body: bytes) -> ChatRequest:
    """Parse the body of ``POST /v1/responses``. Raises InvalidRequest, and nothing else, if it is invalid."""
    return ResponsesBody.parse(body).request()
