"""The internal form of a generation request; every wire format is converted to it.

Unknown fields: a few are reported to the client in safe characters, or the request fails with 400.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice
from typing import Any, ClassVar

from serve_app.errors import InvalidRequest
from serve_app.structured.grammar import Grammar

MAX_TOLD = 8
_UNPRINTABLE = re.compile(r"[^ -~]")
_UNSAFE = re.compile(r"[^\w.\[\]-]", re.ASCII)


@dataclass(frozen=True, slots=True)
class UnknownField:
    """An unknown field. ``name`` is safe in a header; ``meant`` is the known field that it resembles, "" for none."""

    name: str
    meant: str = ""

    @property
    def with_meaning(self) -> str:
        """The name, with the suggested field where there is one."""
        return f"{self.name} (did you mean {self.meant}?)" if self.meant else self.name


def unknown_fields(names: Iterable[str], supported: Iterable[str]) -> tuple[UnknownField, ...]:
    """Return the first ``MAX_TOLD`` of a client's unknown fields; ``supported`` lists the supported names."""
    supported = tuple(supported)
    printable = (_UNSAFE.sub("?", name[:64]) for name in islice(names, MAX_TOLD))
    return tuple(UnknownField(name, _meant(name, supported)) for name in printable)


@lru_cache(1024)
def _meant(name: str, supported: tuple[str, ...]) -> str:
    # Clients repeat an unknown field in every request, and the search takes as long as parsing the rest of the body.
    # A field may be read in one place and not in another.
    return "" if name in supported else next(iter(get_close_matches(name, supported, n=1, cutoff=0.75)), "")


def ignored_fields(fields: Sequence[UnknownField]) -> str:
    """Return a sentence that lists the ignored fields, "" for none."""
    return f"unknown fields ignored: {', '.join(field.with_meaning for field in fields)}" if fields else ""


def not_enforced(constraints: Sequence[str]) -> str:
    """Return a sentence that lists the first constraints of schemas that an answer may break, "" for none."""
    printable = [_UNPRINTABLE.sub("?", constraint[:160]) for constraint in constraints[:MAX_TOLD]]
    more = f" and {len(constraints) - MAX_TOLD} more" if len(constraints) > MAX_TOLD else ""
    return f"not enforced: {', '.join(printable)}{more}" if printable else ""


def require_none(fields: Sequence[UnknownField]) -> None:
    """Raise InvalidRequest, in OpenAI's wording, if there is an unknown field."""
    if fields:
        first = fields[0]
        remedy = f"did you mean {first.meant!r}?" if first.meant else "leave it out."
        raise InvalidRequest(f"Unknown parameter: {first.name!r}; {remedy}", param=first.name, code="unknown_parameter")


PromptInput = str | tuple[int, ...]
"""Text to tokenize, or token ids (not yet checked against a vocabulary)."""

Tool = Mapping[str, Any]
"""A function in the form of chat templates: ``{"type": "function", "function": {name, description, parameters}}``."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a request offers, and how the answer may use them.

    ``must_call``: the answer consists of calls alone. ``allowed``: the names that it may call, empty for all of them.
    ``may_call`` False: the answer is text, but the prompt still holds the tools, so that its KV stays the same.
    ``strict``: the names of the tools whose schemas must be followed exactly. ``later``: the names of tools that the
    prompt shows in its messages, where they become available, and not at its beginning.
    """

    tools: tuple[Tool, ...] = ()
    may_call: bool = True
    must_call: bool = False
    allowed: frozenset[str] = frozenset()
    parallel: bool = True
    strict: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        """Tell whether there are tools."""
        return bool(self.tools)

    @property
    def schemas(self) -> dict[str, Any]:
        """The schemas of the arguments of all tools, by name; None for a tool without."""
        return {tool["function"]["name"]: tool["function"].get("parameters") for tool in self.tools}

    @property
    def shown(self) -> tuple[Tool, ...]:
        """The tools at the prompt's beginning."""
        return tuple(tool for tool in self.tools if tool["function"]["name"] not in self.later)


NO_TOOLS = ToolUse()


def reasoning_fields(text: str) -> dict[str, str]:
    """Return a message's reasoning under two names: DeepSeek's, which most templates read, and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def thinking_switches(effort: str | None) -> dict[str, Any]:
    """Return the chat template's variables for thinking. "none": do not think; None: the template's default."""
    if effort is None:
        return {}
    on = effort != "none"
    return {"enable_thinking": on, "thinking": on, **({"reasoning_effort": effort} if on and effort else {})}


@dataclass(frozen=True, slots=True)
class CacheBreakpoint:
    """A place in a conversation: the prefix up to it stays cached for ``ttl_s`` after its last read.

    ``messages``: the conversation up to the breakpoint, the last message cut there; empty: tools and system messages.
    """

    messages: tuple[Mapping[str, Any], ...]
    ttl_s: float


TIERS = {"priority": -1, "default": 0, "flex": 1}
"""The service tiers, in the order in which a tenant's requests start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFields:
    """The validated fields that both kinds of requests share: the sampling and the form of the answer."""

    prompt_field: ClassVar[str]
    """The field that errors about the prompt mention."""

    model: str
    """Names the base model or a LoRA adapter."""
    lora_name: str | None = None
    """If given, names the adapter."""
    n: int = 1
    """Choices of each prompt."""
    max_tokens: int | None = None
    """None: the deployment's default."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 switches it off."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """These strings, and ``stop_token_ids``, are excluded from the text, unless ``include_stop_str_in_output``."""
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_p: float = 0.0
    """0 switches it off."""
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    """The number of likeliest tokens to report with each token, None: no log-probabilities."""
    logprob_token_ids: tuple[int, ...] = ()
    """The tokens to report instead."""
    prompt_logprobs: int | None = None
    """Like ``logprobs``, for the prompt's tokens."""
    grammar: Grammar | None = None
    """Of the answer."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """Usage in every chunk, too."""
    include_reasoning: bool = True
    """False: a chat shows none."""
    return_token_ids: bool = False
    """Report them."""
    return_tokens_as_token_ids: bool = False
    """Log-probabilities name tokens by them."""
    truncate_prompt_tokens: int | None = None
    """Keep only so many of a prompt, -1: as many as fit."""
    truncation_side: str = "left"
    """Where others are left out."""
    cache_salt: str | None = None
    """Divides the tenant's cache."""
    prompt_cache_key: str | None = None
    """A routing hint."""
    prompt_ref: str | None = None
    """Names the registered prompt to prepend."""
    service_tier: str = "default"
    """It and, within a tier, ``priority`` order the tenant's own requests."""
    priority: int = 0
    disable_spec_decode: bool = False
    save_system_prompt_kv_cache: bool = False
    store_kv: bool | None = None
    """False: store nothing in the cache; None: the tenant's setting."""
    add_special_tokens: bool | None = None
    """Put the tokenizer's own around a text; None: where no chat template does."""
    cache_diagnostics: bool = False
    """Report the reason of a cache miss."""
    session: str = ""
    """The client's name for the request's session, "" for none."""
    parent: str = ""
    """The name of the session that began this one."""
    final: bool = False
    """The session ends with this answer."""
    user: str = ""
    """The client's word for the end user."""
    expected_tokens: int = 0
    """Of the answer, as the client guesses, 0 for no guess."""
    prompt_rules: tuple[str, ...] = ()
    """The rules for agents' clients by which the prompt differs from what was sent."""
    rules_off: tuple[str, ...] = ()
    """Those that the settings switch off."""
    unknown: tuple[UnknownField, ...] = ()
    """Fields without effect."""

    @property
    def answering_model(self) -> str:
        """The model name in the answer: the adapter, if there is one."""
        return self.lora_name or self.model

    @property
    def conversation_key(self) -> str:
        """What stays the same in a conversation, so that all of it gets one version of a prompt; "" for nothing.

        A ``prompt_cache_key`` may be that of many conversations.
        """
        words = (self.user, self.session if self.session != self.prompt_cache_key else "")
        return next(filter(None, words), "") or f"{self.prompt_cache_key or ''}{self._opening}"

    @property
    def _opening(self) -> str:
        """The beginning that later turns of the conversation have too, "" if unknown."""
        return ""

    @property
    def choices(self) -> int:
        """Sequences to generate, over all prompts."""
        return self.n

    @property
    def told_prompt(self) -> int | None:
        """The number of likeliest tokens to compute for each token of the prompt; None: not even its own."""
        return self.prompt_logprobs

    @property
    def order(self) -> int:
        """The rank among its tenant's waiting requests: the lowest starts first. It is usually 0, and fits 64 bits."""
        return TIERS[self.service_tier] * 2**32 + self.priority


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(RequestFields):
    """A conversation. Each of ``messages`` has a string ``role`` and ``content``; an assistant's message may also have
    ``tool_calls`` and ``reasoning_fields``. ``thinking``: variables for chat templates that support thinking.

    ``echo``: the answer begins with the last message, if both are of one role. ``repeated``: fields that the answer
    repeats, in its API's shape. ``breakpoints``: the ends of prefixes to keep, asked for by ``breakpoint_field``.
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
    echo: bool = False
    breakpoints: tuple[CacheBreakpoint, ...] = ()
    breakpoint_field: str = "cache_control"

    @property
    def _opening(self) -> str:
        return next((str(one.get("content") or "") for one in self.messages if one["role"] != "system"), "")

    @property
    def adds_special_tokens(self) -> bool:
        """Whether the prompt gets the tokenizer's special tokens."""
        return not self.apply_chat_template if self.add_special_tokens is None else self.add_special_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(RequestFields):
    """Prompts that are answered separately."""

    prompt_field = "prompt"

    prompts: tuple[PromptInput, ...]
    echo: bool = False
    tool_use: ClassVar[ToolUse] = NO_TOOLS
    repeated: ClassVar[Mapping[str, Any]] = {}

    @property
    def told_echo(self) -> int | None:
        """The number of likeliest tokens to report with each token of an echo; None: no log-probabilities."""
        return self.logprobs if self.echo else None

    @property
    def told_prompt(self) -> int | None:
        """See ``RequestFields``; an echo with log-probabilities needs the prompt's too."""
        counts = [count for count in (self.prompt_logprobs, self.told_echo) if count is not None]
        return max(counts, default=None)

    @property
    def choices(self) -> int:
        """Sequences to generate, over all prompts."""
        return self.n * len(self.prompts)


GenerateRequest = ChatRequest | CompletionRequest
"""Any request that generates text."""
