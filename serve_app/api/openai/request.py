"""Parse OpenAI's chat completions and completions into ChatRequest and CompletionRequest.

A field is refused if ignoring it would change the answer. Other unread fields are reported as unknown.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from serve_app.api.hints import METADATA, NO_HINTS, NVEXT, USER, Hints, user_of
from serve_app.api.json_body import (
    JsonBody,
    ModelName,
    Must,
    Once,
    Refused,
    Stop,
    StoreKV,
    Text256,
    Text1024,
    Whole,
    refused,
)
from serve_app.api.openai.caching import DAY_S, MARK, CacheOptions, Mark, marks_in, take_marks
from serve_app.api.openai.messages import MESSAGE_FIELDS, Message, for_template, ignored_in
from serve_app.api.openai.tools import (
    MAX_TOOL_VALUES,
    TOOL_FIELDS,
    AllowedChoice,
    Function,
    NamedChoice,
    ToolChoice,
    Tools,
    check_arguments,
    tool_use,
)
from serve_app.api.request import (
    NO_TOOLS,
    CacheBreakpoint,
    ChatRequest,
    CompletionRequest,
    PromptInput,
    ToolUse,
    thinking_switches,
)
from serve_app.errors import InvalidRequest
from serve_app.structured.grammar import Grammar

MAX_TOKENS = 2**31 - 1
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKENS = 128
"""Source: vLLM's ``MAX_LOGPROB_TOKEN_IDS``."""
MAX_BIASES = 1024
MAX_ALLOWED_TOKENS = 1024
"""Source: vLLM's ``MAX_NUM_LOGIT_BIAS_TOKENS``."""
MAX_STOP_TOKENS = 128
"""Source: vLLM's ``MAX_NUM_STOP_TOKEN_IDS``."""
MAX_BAD_WORDS = 128
"""Source: vLLM's ``MAX_NUM_BAD_WORDS``."""
MAX_BAD_WORD_CHARS = 256

REFUSED: Refused = {
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
INSTEAD = {f"guided_{kind}": f"structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")}

_FORMATS = "text, json_object or json_schema"
_KINDS = ("json", "regex", "choice", "grammar", "json_object")

_Penalty = Annotated[float, Field(ge=-2, le=2)]


_ID = r"^[0-9]{1,10}$"
_BIASES = f"an object with at most {MAX_BIASES} token ids as names and numbers from -100 to 100"


def _biases(value: Any) -> Any:
    """Name the first entry that is wrong."""
    for name, bias in value.items() if isinstance(value, dict) else ():
        entry = {"name": repr(name[:32]), "bias": repr(bias)[:32]}
        if re.fullmatch(_ID, name, re.ASCII) is None:
            raise PydanticCustomError("must_be", f"{_BIASES}; {{name}} is not a token id", entry)
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise PydanticCustomError("must_be", f"{_BIASES}, and that of {{name}} is {{bias}}", entry)
    return value


class SamplingBody(JsonBody):
    """The sampling fields of chat completions and completions, except temperature, top-p and top-k."""

    presence_penalty: _Penalty = Field(0.0, description="subtracted from logits of tokens that the answer holds")
    frequency_penalty: _Penalty = Field(0.0, description="subtracted from a token's logit for each time it was used")
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = Field(
        1.0, description="divides logits of tokens that the prompt or the answer holds; 1: off"
    )
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern=_ID)], Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=MAX_BIASES),
        BeforeValidator(_biases),
        Must(_BIASES),
    ] = Field({}, description="added to logits, by token id")
    min_p: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="least probability of a token, as a fraction of the likeliest token's; 0: off"
    )
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), Whole] = Field(
        0, description="the answer does not end before this many tokens, except at max_tokens"
    )
    stop_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MAX_TOKENS)], ...],
        Field(max_length=MAX_STOP_TOKENS, strict=False),
        Once,
        Must(f"a list of at most {MAX_STOP_TOKENS} token ids"),
    ] = Field((), description="tokens that end the answer and are not part of it")
    logprob_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MAX_TOKENS)], ...],
        Field(max_length=MAX_LOGPROB_TOKENS, strict=False),
        Once,
        Must(f"a list of at most {MAX_LOGPROB_TOKENS} token ids"),
    ] = Field((), description="with logprobs: report these tokens at each place of the answer, not the likeliest")
    bad_words: Annotated[
        tuple[Annotated[str, Field(pattern=r"[^\s\x1c-\x1f]", max_length=MAX_BAD_WORD_CHARS)], ...],
        Field(max_length=MAX_BAD_WORDS, strict=False),
        Once,
        Must(f"a list of at most {MAX_BAD_WORDS} strings, each of 1 to {MAX_BAD_WORD_CHARS} characters"),
    ] = Field((), description="words that the answer never contains")
    allowed_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MAX_TOKENS)], ...],
        Field(max_length=MAX_ALLOWED_TOKENS, strict=False),
        Once,
        Must(f"a list of at most {MAX_ALLOWED_TOKENS} token ids"),
    ] = Field((), description="the only tokens of the answer; empty: all")
    include_stop_str_in_output: bool = Field(False, description="true: the stop string is the answer's last part")
    response_format: Annotated[
        dict[str, Any] | None, Must(f"an object with the type {_FORMATS}")
    ] = Field(None, description="text, any JSON object, or JSON by a schema")  # fmt: skip
    structured_outputs: Annotated[
        dict[str, Any] | None, Must(f"an object with one of {', '.join(_KINDS)}")
    ] = Field(None, description="vLLM's field for the grammar of the answer")  # fmt: skip

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the answer; None: any text. Raises InvalidRequest."""
        if self.response_format is None and self.structured_outputs is None:
            return None
        form = of_format(self.response_format, "response_format", "json_schema")
        other = _of_structured_outputs(self.structured_outputs)
        if form is not None and other is not None:
            raise InvalidRequest("structured_outputs does not go with response_format.", param="structured_outputs")
        return form or other


def of_format(form: Mapping[str, Any] | None, field: str, inner: str = "") -> Grammar | None:
    """Return the grammar of a format (text, any JSON, or JSON by a schema), None for text.

    ``inner``: its field that holds the schema, "" if the format itself does. Raises InvalidRequest.
    """
    match (form or {"type": "text"}).get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar.json_object(field)
        case "json_schema":
            assert form is not None
            named = form.get(inner) if inner else form
            schema = named.get("schema") if isinstance(named, dict) else None
            path = f"{field}.{inner}" if inner else f"{field}.schema"
            if not isinstance(schema, dict):
                detail = " with a schema, an object" if inner else ""
                raise InvalidRequest(f"{path} must be an object{detail}.", param=path)
            strict = isinstance(named, dict) and named.get("strict") is True
            return Grammar.json_schema(schema, f"{path}.schema" if inner else path, strict=strict)
    raise InvalidRequest(f"{field}.type must be {_FORMATS}.", param=f"{field}.type")


def _of_structured_outputs(outputs: dict[str, Any] | None) -> Grammar | None:
    given = {name: value for name, value in (outputs or {}).items() if value not in (None, False)}
    if not given:
        return None
    for name in given:
        if name not in _KINDS:
            raise refused(f"structured_outputs.{name}")
    if len(given) > 1:
        raise InvalidRequest(f"structured_outputs must have one of {', '.join(_KINDS)}.", param="structured_outputs")
    ((kind, value),) = given.items()
    field = f"structured_outputs.{kind}"
    match kind, value:
        case "json", dict():
            return Grammar.json_schema(value, field)
        case "json", str():
            return Grammar.json_text(value, field)
        case "json_object", True:
            return Grammar.json_object(field)
        case "regex", str():
            return Grammar.regex(value, field)
        case "choice", list():
            return Grammar.choice(value, field)
        case "grammar", str():
            return Grammar.context_free(value, field)
    demands = {"json": "a schema, as an object or as text", "choice": "a list of strings", "json_object": "true"}
    raise InvalidRequest(f"{field} must be {demands.get(kind, 'a string')}.", param=field)


INT64 = 2**63
ServiceTier = Literal["auto", "default", "flex", "priority"]
MAX_CHOICES = 16
MAX_PROMPTS = 128
"""Bounds the prompts of a completion request, and the product of prompts and ``n``."""

BOUNDED = {
    **dict.fromkeys(("logit_bias", "response_format", "structured_outputs", "metadata", "nvext"), 1 << 14),
    **dict.fromkeys(("stop_token_ids", "logprob_token_ids"), 1 << 10),
}


def _prompts(value: Any) -> tuple[PromptInput, ...]:
    if isinstance(value, str) or (isinstance(value, list) and value and not isinstance(value[0], str | list)):
        value = [value]
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PROMPTS:
        raise ValueError
    return tuple(map(_prompt, value))


def _prompt(value: Any) -> PromptInput:
    if isinstance(value, str):
        if not value:
            raise PydanticCustomError("must_be", "text that is not empty")
        return value
    if (
        not isinstance(value, list)
        or not value
        or not all(type(token_id) is int and 0 <= token_id <= MAX_TOKENS for token_id in value)
    ):
        raise PydanticCustomError("must_be", "strings that are not empty, or lists of at least one token id")
    return tuple(value)


TokenLimit = Annotated[int | None, Field(ge=1, le=MAX_TOKENS), Whole]

TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), Whole]


Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
    Must("none, minimal, low, medium, high, xhigh or max"),
]


class StreamOptions(JsonBody):
    """Options of a stream."""

    include_usage: bool | None = Field(None, description="end with a chunk that holds usage and no choice")
    continuous_usage_stats: bool | None = Field(None, description="with include_usage: usage so far in every chunk")


_INNER_FIELDS = (
    *(f"stream_options.{name}" for name in StreamOptions.model_fields),
    *MESSAGE_FIELDS,
    *TOOL_FIELDS,
)


def reference_refused(fields: str, param: str) -> InvalidRequest:
    """Return the error for what would tell the text of a registered prompt: its tokens, or their log-probabilities."""
    return InvalidRequest(f"{fields} does not go with prompt_ref: it would tell the registered prompt.", param=param)


class GenerationBody(SamplingBody):
    """The fields that chat completions and completions share."""

    # OpenAI's field for an answer to store. Nothing is stored.
    without_effect: ClassVar[frozenset[str]] = frozenset({"store"})

    model: ModelName
    lora_name: Text256 = Field(None, description="a LoRA adapter of the model")
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), Whole] = Field(1, description="answers per prompt")
    temperature: Annotated[float, Field(ge=0, le=2, description="below 0.00001: greedy")] = 1.0
    top_p: Annotated[
        float, Field(gt=0, le=1, description="sample only the likeliest tokens, up to this sum of probabilities")
    ] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS), Whole] = Field(0, description="-1 or 0: all tokens")
    seed: Annotated[int | None, Field(ge=-INT64, le=INT64 - 1), Whole] = Field(
        None, description="equal seeds give equal answers"
    )
    stop: Stop = ()
    ignore_eos: bool = Field(False, description="continue after the model's end token")
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS), Whole] = Field(
        None, description="report log-probabilities of each token of the prompt and of this many of the likeliest"
    )
    stream: bool = Field(False, description="send the answer as server-sent events")
    stream_options: StreamOptions | None = Field(
        None, description="include_usage: end with a chunk that holds usage; continuous_usage_stats: so has every chunk"
    )
    cache_salt: Text1024 = Field(None, description="divides the tenant's cache: only equal salts share KV")
    prompt_cache_key: Text1024 = Field(None, description="a routing hint that keeps related requests together")
    prompt_cache_options: Annotated[CacheOptions | None, Must("an object with mode and ttl")] = Field(
        None, description=f"ttl: of {MARK} in parts; mode explicit: a prompt without any is not stored"
    )
    prompt_cache_retention: Annotated[Literal["in_memory", "in-memory", "24h"] | None, Must("in_memory or 24h")] = (
        Field(None, description=f"24h: keep tools and system messages, or what {MARK} marks, that long")
    )
    prompt_ref: Text256 = Field(None, description="NAME@VERSION or NAME of a registered prompt to prepend")
    service_tier: Annotated[
        Literal["default", "flex", "priority"],
        BeforeValidator(lambda tier: "default" if tier == "auto" else tier, json_schema_input_type=ServiceTier),
        Must("auto, default, flex or priority"),
    ] = Field("default", description="order of the tenant's own waiting requests: priority starts first, flex last")
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1), Whole] = Field(
        0, description="order of the tenant's own requests in one tier: the lowest starts first"
    )
    disable_spec_decode: bool = Field(False, description="decode this request without drafts")
    save_system_prompt_kv_cache: bool = Field(False, description="keep the KV of the formatted system prompt")
    store_kv: StoreKV = None
    add_special_tokens: bool | None = Field(
        None, description="begin with the tokenizer's special tokens; default: unless the chat template is used"
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description='log-probabilities name tokens by their ids, as "token_id:5"'
    )
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, le=MAX_TOKENS), Whole] = Field(
        None, description="keep only this many tokens of the prompt; -1: as many as leave room for max_tokens"
    )
    truncation_side: Annotated[Literal["left", "right"] | None, Must("left or right")] = Field(
        None, description="with truncate_prompt_tokens: the side where tokens are left out; default: left"
    )
    cache_diagnostics: bool = Field(False, description="report in usage why the cache was missed")
    metadata: Any = Field(None, description=METADATA)
    nvext: Any = Field(None, description=NVEXT)
    user: Any = Field(None, description=USER)
    safety_identifier: Any = Field(None, description=USER)

    def kept(self, marks: Iterable[CacheBreakpoint]) -> dict[str, Any]:
        """Return what a conversation asks to keep, given its marks."""
        breakpoints = tuple(marks)
        if not breakpoints and self.prompt_cache_retention == "24h":
            breakpoints = (CacheBreakpoint((), DAY_S),)
        return {"breakpoints": breakpoints, "breakpoint_field": MARK} if breakpoints else {}

    def marks(self, items: Sequence[Any], path: str) -> list[Mark]:
        """Return the marks in messages or items, at ``path`` in errors. Raises InvalidRequest."""
        options = self.prompt_cache_options
        ttl = self.prompt_cache_retention if self.prompt_cache_retention == "24h" else None
        return marks_in(items, (options.ttl if options else None) or ttl, path)

    def common(
        self,
        ignored: Iterable[str] = (),
        known: Iterable[str] = _INNER_FIELDS,
        kept: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the common fields of all requests.

        ``ignored``: unread inner fields, ``known``: supported ones; ``kept``: the fields of what it asks to keep.
        """
        fields: dict[str, Any] = {name: getattr(self, name) for name in GenerationBody.model_fields} | (kept or {})
        caching: CacheOptions | None = fields.pop("prompt_cache_options")
        if caching is not None and caching.mode == "explicit" and not kept and self.store_kv is None:
            fields["store_kv"] = False
        if fields.pop("prompt_cache_retention") == "24h" and kept is None:
            ignored = (*ignored, "prompt_cache_retention")
        options: StreamOptions | None = fields.pop("stream_options")
        if options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            if self.prompt_logprobs:
                raise InvalidRequest("prompt_logprobs does not go with stream.", param="prompt_logprobs")
            fields["prompt_logprobs"], ignored = None, (*ignored, "prompt_logprobs")  # as in vLLM
        if self.prompt_ref is not None and self.prompt_logprobs is not None:
            raise reference_refused("prompt_logprobs", "prompt_logprobs")
        for name in ("response_format", "structured_outputs"):
            del fields[name]
        fields["grammar"] = self.grammar
        fields["top_k"] = max(0, self.top_k)
        nvext, metadata, user = fields.pop("nvext"), fields.pop("metadata"), fields.pop("safety_identifier")
        hints = Hints.of(nvext, metadata) if nvext or metadata else NO_HINTS
        fields["user"] = user_of(user, fields["user"]) if user or fields["user"] else ""
        fields["session"] = hints.session or self.prompt_cache_key or ""
        fields["parent"], fields["final"], fields["expected_tokens"] = hints.parent, hints.final, hints.output_tokens
        if hints.priority and "priority" not in self.model_fields_set:
            fields["priority"] = hints.priority
        fields["logit_bias"] = tuple(sorted({int(token): bias for token, bias in self.logit_bias.items()}.items()))
        fields["include_usage"] = options is not None and options.include_usage is True
        every = options is not None and options.continuous_usage_stats is True
        fields["continuous_usage"] = every and fields["include_usage"]
        fields["truncation_side"] = self.truncation_side or "left"
        fields["return_tokens_as_token_ids"] = self.return_tokens_as_token_ids is True
        inner = [*self.unread_inside(), *ignored, *hints.unread]
        if inner or self.model_extra:
            fields["unknown"] = self.unknown(inner, known)
        return fields


class ChatBody(GenerationBody):
    """The body of ``POST /v1/chat/completions``."""

    bounded: ClassVar[Mapping[str, int]] = {
        "messages": 1 << 17, "tools": MAX_TOOL_VALUES, "chat_template_kwargs": 1 << 12, **BOUNDED
    }  # fmt: skip
    instead: ClassVar[Mapping[str, str]] = {"functions": "tools", "function_call": "tool_choice", **INSTEAD}
    refused: ClassVar[Refused] = {
        **REFUSED,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "modalities": (["text"],),
        "web_search_options": (),
    }

    messages: Annotated[
        list[Annotated[Message, Must("an object with role and content")]],
        Field(min_length=1, fail_fast=True),
        Must("a list of at least one message"),
    ]
    max_tokens: TokenLimit = Field(None, description="default: the deployment's")
    max_completion_tokens: TokenLimit = Field(None, description="the newer name of max_tokens; it takes precedence")
    logprobs: bool = Field(False, description="report the log-probability of each token")
    top_logprobs: TopLogprobs = Field(0, description="report this many of the likeliest tokens at each place, too")
    return_token_ids: bool | None = Field(
        None, description="report the ids of the prompt's and the answer's tokens, the end token included"
    )
    echo: bool = Field(False, description="put the prompt before the answer; in a chat, the message that it continues")
    apply_chat_template: bool = Field(True, description="false: concatenate the texts of the messages")
    add_generation_prompt: bool | None = Field(None, description="default: true, unless continue_final_message is")
    continue_final_message: bool = Field(False, description="the answer continues the last message")
    chat_template_kwargs: Annotated[dict[str, Any], Must("an object")] = Field(
        {}, description="variables of the chat template, except special tokens"
    )

    tools: Tools = Field([], description="functions that the model may call")
    tool_choice: ToolChoice = Field("auto", description="whether the model may or must call, and which tool")
    parallel_tool_calls: bool = Field(True, description="false: the answer ends with its first call")
    reasoning_effort: Effort = Field(None, description="none: the model does not think; otherwise it does")
    include_reasoning: bool = Field(True, description="false: leave the reasoning out of the answer")

    def request(self, ignored: Iterable[str] = ()) -> ChatRequest:
        """Return the request; ``ignored``: unread fields of messages. Raises InvalidRequest."""
        if self.tools and not self.apply_chat_template:
            raise InvalidRequest("tools need apply_chat_template to be true.", param="tools")
        for name in ("messages", "add_generation_prompt", "continue_final_message"):
            if name in self.chat_template_kwargs:
                raise InvalidRequest(f"chat_template_kwargs must not set {name}.", param="chat_template_kwargs")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
        if self.logprob_token_ids and not self.logprobs:
            raise InvalidRequest("logprob_token_ids needs logprobs to be true.", param="logprob_token_ids")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message does not go with add_generation_prompt.", param="continue_final_message"
            )
        if self.continue_final_message and not self.apply_chat_template:
            raise InvalidRequest(
                "continue_final_message needs apply_chat_template to be true.", param="continue_final_message"
            )
        if self.return_token_ids and self.prompt_ref is not None:
            raise reference_refused("return_token_ids", "return_token_ids")
        newer = self.max_completion_tokens
        opens = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        in_parts: set[str] = set()
        if any("tool_calls" in message or "function_call" in message for message in self.messages):
            calls = (call for message in self.messages for call in message.get("tool_calls") or ())
            check_arguments(
                [
                    *(call.get("function") for call in calls if isinstance(call, dict)),
                    *(message.get("function_call") for message in self.messages),
                ]
            )
        messages = tuple([for_template(message, index, in_parts) for index, message in enumerate(self.messages)])
        marks = (
            CacheBreakpoint((*messages[:at], for_template(cut, at, set())), ttl_s)  # type: ignore[arg-type]
            for at, cut, ttl_s in (self.marks(self.messages, "messages") if in_parts and take_marks(in_parts) else ())
        )
        return ChatRequest(
            messages=messages,
            max_tokens=self.max_tokens if newer is None else newer,
            apply_chat_template=self.apply_chat_template,
            add_generation_prompt=opens,
            continue_final_message=self.continue_final_message,
            echo=self.echo,
            include_reasoning=self.include_reasoning,
            return_token_ids=self.return_token_ids is True,
            logprobs=self.top_logprobs if self.logprobs else None,
            chat_template_kwargs=self.chat_template_kwargs,
            thinking=thinking_switches(self.reasoning_effort) if self.reasoning_effort is not None else {},
            tool_use=self._tool_use() if self.tools or self.tool_choice not in ("auto", "none") else NO_TOOLS,
            repeated={"service_tier": self.service_tier} if "service_tier" in self.model_fields_set else {},
            **self.common([*ignored, *in_parts], kept=self.kept(marks)),
        )

    def _tool_use(self) -> ToolUse:
        choice = self.tool_choice
        functions = [
            Function(tool.function.name, tool.function.description, tool.function.parameters, tool.function.strict)
            for tool in self.tools
        ]
        if isinstance(choice, NamedChoice):
            return tool_use(functions, "required", [choice.function.name], parallel=False)
        if isinstance(choice, AllowedChoice):
            allowed = [tool.function.name for tool in choice.allowed_tools.tools]
            return tool_use(functions, choice.allowed_tools.mode, allowed, parallel=self.parallel_tool_calls)
        return tool_use(functions, choice, parallel=self.parallel_tool_calls)


class CompletionBody(GenerationBody):
    """The body of ``POST /v1/completions``."""

    bounded: ClassVar[Mapping[str, int]] = {"prompt": 1 << 20, **BOUNDED}
    instead: ClassVar[Mapping[str, str]] = INSTEAD
    refused: ClassVar[Refused] = {
        **REFUSED,
        "suffix": ("",),
    }

    prompt: Annotated[
        tuple[PromptInput, ...],
        Field(description="text or token ids, one prompt or many"),
        PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
        Must(f"a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either"),
    ]
    max_tokens: Annotated[int | None, Field(ge=0, le=MAX_TOKENS), Whole] = 16  # OpenAI's default; a chat has none
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS), Whole] = Field(
        None, description="report log-probabilities of each token and of this many of the likeliest"
    )
    return_token_ids: bool | None = Field(
        None, description="report the ids of the prompt's and the answer's tokens, the end token included"
    )
    echo: bool = Field(False, description="put the prompt before the answer, and its tokens into logprobs")
    best_of: Any = Field(None, description="must equal n")

    def request(self) -> CompletionRequest:
        """Return the validated request. Raises InvalidRequest for fields that contradict each other."""
        if self.best_of is not None and self.best_of != self.n:
            raise refused("best_of")
        if len(self.prompt) * self.n > MAX_PROMPTS:
            most = MAX_PROMPTS // len(self.prompt)
            raise InvalidRequest(f"n must be at most {most} for {len(self.prompt)} prompts.", param="n")
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequest("logprob_token_ids needs logprobs.", param="logprob_token_ids")
        if self.echo and self.logprobs is not None and self.prompt_ref is not None:
            raise reference_refused("echo with logprobs", "echo")
        if self.echo and self.truncate_prompt_tokens is not None and self.prompt_ref is not None:
            raise reference_refused("echo with truncate_prompt_tokens", "echo")
        if self.return_token_ids and self.prompt_ref is not None:
            raise reference_refused("return_token_ids", "return_token_ids")
        return CompletionRequest(
            prompts=self.prompt,
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            echo=self.echo,
            return_token_ids=self.return_token_ids is True,
            **self.common(),
        )


def parse_chat(body: bytes, model: str = "") -> ChatRequest:
    """Parse the body of ``POST /v1/chat/completions``. Raises InvalidRequest, and nothing else, if it is invalid.

    ``model``: that of a body without one, as in vLLM; "": a body needs one.
    """
    fields = ChatBody.read(body, model)
    return ChatBody.checked(fields).request(ignored_in(fields["messages"]))


def parse_completion(body: bytes, model: str = "") -> CompletionRequest:
    """Parse the body of ``POST /v1/completions``. ``model``, errors: see ``parse_chat``."""
    return CompletionBody.parse(body, model).request()
