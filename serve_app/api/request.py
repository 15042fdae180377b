"""The one internal form of a generation request: every wire format is turned into it, and nothing else goes on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from serve_app.api.unknown import UnknownField
from serve_app.structured.grammar import Grammar

Prompt = str | tuple[int, ...]
"""Text to tokenize, or token ids (not yet compared with a vocabulary)."""

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


def reasoning_fields(text: str) -> dict[str, str]:
    """Return the fields of a message's reasoning: by DeepSeek's name, which most templates have, and by vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def thinking_switches(effort: str | None) -> dict[str, Any]:
    """Return the variables by which chat templates have their model think: "none": not, None: as they do by default."""
    if effort is None:
        return {}
    on = effort != "none"
    return {"enable_thinking": on, "thinking": on, **({"reasoning_effort": effort} if on and effort else {})}


@dataclass(frozen=True, slots=True)
class CacheBreakpoint:
    """A place in a conversation: what leads to it stays cached for ``ttl_s`` after its last read.

    ``messages``: the conversation as far as the breakpoint, the last message cut there; none: the tools alone.
    """

    messages: tuple[Mapping[str, Any], ...]
    ttl_s: float


TIERS = {"priority": -1, "default": 0, "flex": 1}
"""The service tiers in the order in which a tenant's requests start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFields:
    """What both kinds of requests say of what to generate and how to answer, validated.

    ``model`` names the base model or a LoRA adapter; ``lora_name``, if given, the adapter.
    ``max_tokens`` None: the deployment's default. ``top_k`` 0 and ``min_p`` 0 switch these off. ``stop`` strings and
    ``stop_token_ids`` are excluded from the text, unless ``include_stop_str_in_output``. ``logprobs``: how many of the
    likeliest tokens to tell with each, None for nothing. ``grammar``: what the answer must match.
    ``prompt_cache_key`` is a routing hint, ``cache_salt`` divides the tenant's own cache; ``prompt_ref`` names the
    registered prompt that goes before everything else. ``store_kv`` False: leave nothing in the cache; None: as the
    tenant's setting says. ``cache_diagnostics``: tell why the cache was missed. ``unknown``: fields without effect.
    ``service_tier`` and, within one, ``priority`` say which of the tenant's own requests starts first. ``session``: the
    client's own word for the session that the request belongs to, "" for none.
    """

    prompt_field: ClassVar[str]
    """The field that errors about the prompt name."""

    model: str
    lora_name: str | None = None
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    grammar: Grammar | None = None
    stream: bool = False
    include_usage: bool = False
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    prompt_ref: str | None = None
    service_tier: str = "default"
    priority: int = 0
    disable_spec_decode: bool = False
    save_system_prompt_kv_cache: bool = False
    store_kv: bool | None = None
    cache_diagnostics: bool = False
    session: str = ""
    unknown: tuple[UnknownField, ...] = ()

    @property
    def answering_model(self) -> str:
        """What an answer names as its model: the adapter, where there is one."""
        return self.lora_name or self.model

    @property
    def choices(self) -> int:
        """Sequences to generate, over all prompts."""
        return self.n

    @property
    def order(self) -> int:
        """Its place among its tenant's requests that wait: the lowest starts first. 0 is usual, 64 bits hold it."""
        return TIERS[self.service_tier] * 2**32 + self.priority


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(RequestFields):
    """A conversation; each of ``messages`` has string ``role`` and ``content``, an assistant's maybe ``tool_calls``
    and ``reasoning_fields``. ``thinking``: variables of the chat template, for those that have them.

    ``repeated``: fields that the answer repeats, as its API shows them. ``breakpoints``: places up to which to keep KV.
    """

    prompt_field = "messages"

    messages: tuple[Mapping[str, Any], ...]
    apply_chat_template: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thinking: Mapping[str, Any] = field(default_factory=dict)
    tool_use: ToolUse = NO_TOOLS
    repeated: Mapping[str, Any] = field(default_factory=dict)
    breakpoints: tuple[CacheBreakpoint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(RequestFields):
    """Prompts that are answered one by one."""

    prompt_field = "prompt"

    prompts: tuple[Prompt, ...]
    echo: bool = False
    tool_use: ClassVar[ToolUse] = NO_TOOLS
    repeated: ClassVar[Mapping[str, Any]] = {}

    @property
    def choices(self) -> int:
        """Sequences to generate, over all prompts."""
        return self.n * len(self.prompts)


GenerateRequest = ChatRequest | CompletionRequest
"""Whatever generates text."""
