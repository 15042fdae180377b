"""One prompt of a request, whole: text, messages or token ids -> ids, identity, block hashes, scope and keys.

``ScopeKeys`` has the keys of a prompt's KV and of its placement; the secret stays in it.
"""

import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

import msgspec
import xxhash

from router.protocol.block_hash import HASH_BYTES, PrefixScope, TokenArray, common_tokens, hash_at, system_prompt_key
from serve_app.api.request import CacheBreakpoint, ChatRequest, GenerateRequest
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.engine.protocol import AdapterSpec, Save
from serve_app.errors import ContextLengthExceeded, InvalidRequest
from serve_app.fairness.queue import FairWorkers
from serve_app.prompts.registry import Prompts
from serve_app.tenants import Tenant, Tenants
from serve_app.tokenization.chat_template import OTHER_WORDS, RenderedPrompt
from serve_app.tokenization.tokenizer import EncodedPrompt, PromptTokenizer

PLACEMENT_BLOCKS = 16
"""Prompts without a system prompt are placed by their first blocks, up to this many: equal ones share a replica."""

SYSTEM_PROMPTS = 1024
"""Number of system prompts with remembered token counts; the oldest is dropped first, and counted again."""

VALUE_CHARS = 16
"""What a value costs a chat template besides its text, in characters of text."""


@dataclass(frozen=True, slots=True)
class Keys:
    """A private scope and its root; ``public_root``: the public scope's, b"" if there are no public prompts."""

    scope: PrefixScope
    root: bytes
    public_root: bytes


class ScopeKeys:
    """The keys of one model's scopes. ``fingerprint``: the model's."""

    def __init__(
        self, fingerprint: str, tenants: Tenants, secret: bytes, prompts: Prompts, *, public: bool = True
    ) -> None:
        self._public = public
        self._fingerprint = fingerprint
        self._tenants = tenants
        self._secret = secret
        self._prompts = prompts
        self._cached = lru_cache(4096)(self._make)

    def clear(self) -> None:
        """Clear the cache: salts follow the tenants, and public roots exist only with public prompts."""
        self._cached.cache_clear()

    def of(self, tenant: Tenant, cache_salt: str | None, adapter: AdapterSpec | None) -> Keys:
        """Return the keys of a tenant's scope; ``adapter`` None: those of the model alone."""
        return self._cached(tenant, cache_salt, adapter.key if adapter is not None else "")

    def _make(self, tenant: Tenant, cache_salt: str | None, lora: str) -> Keys:
        scope = PrefixScope(self._fingerprint, lora, self._tenants.salt(tenant, cache_salt))
        return Keys(
            scope, scope.root(self._secret), scope.public.root(self._secret) if self._public and self._prompts else b""
        )


def placement_key(root: bytes, prompt_cache_key: str | None, encoded: EncodedPrompt, system_text: str) -> bytes:
    """Return the 16 bytes that place a prompt while no replica holds it; ``system_text`` "": it has none."""
    if prompt_cache_key:
        return xxhash.xxh3_128_digest(root + b"prompt_cache_key:" + prompt_cache_key.encode())
    if system_text:
        return system_prompt_key(root, system_text)
    blocks = min(PLACEMENT_BLOCKS, len(encoded.block_hashes) // HASH_BYTES)
    if blocks:
        return hash_at(encoded.block_hashes, blocks - 1)
    return xxhash.xxh3_128_digest(root + encoded.identity.tobytes())


def most_values(body: bytes) -> int:
    """Return an upper bound of the number of values in JSON."""
    return 1 + body.count(b",") + body.count(b"[") + body.count(b"{")


def rendered_chars(value: Any) -> int:
    """Return how long it takes a chat template to write a value, in characters of text."""
    written = msgspec.json.encode(value)
    return len(written) + VALUE_CHARS * most_values(written)


@dataclass(frozen=True, slots=True)
class RequestScope:
    """What all prompts of a request share.

    ``prompt_ref``: the registered prompt before each, as NAME@VERSION, "" for none; ``before``: its text.
    """

    tenant: str
    adapter: AdapterSpec | None
    keys: Keys
    prompt_ref: str = ""
    before: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedPrompt:
    """One prompt. ``encoded``: its ids, what stands for them in hashes, and the hashes; the rest follows from these.

    ``scope`` has its public blocks, and ``root`` is the public scope's before the private one's if there are any.
    ``placement_key``: 16 bytes that place it while no replica holds it. ``system_text``: the formatted system prompt
    at its beginning, "" for none.
    """

    encoded: EncodedPrompt
    scope: PrefixScope
    root: bytes
    placement_key: bytes
    system_text: str


@dataclass(eq=False)
class PromptMaker:
    """Makes the prompts of one model's requests. ``max_model_len``: tokens of a prompt and its answer."""

    tokenizer: PromptTokenizer
    keys: ScopeKeys
    adapters: AdapterRegistry
    registered: Prompts
    workers: FairWorkers
    max_model_len: int
    _system_tokens: dict[tuple[bytes, bool], int] = field(default_factory=dict)
    _any_registered: bool = False

    def __post_init__(self) -> None:
        self.prompts_changed()

    def prompts_changed(self) -> None:
        """Use the current registered prompts and tenants."""
        self.keys.clear()
        self._any_registered = bool(self.registered.all())

    async def scope(self, request: GenerateRequest, tenant: Tenant) -> RequestScope:
        """Return what all prompts of a request share. Raises NotFound, InvalidRequest, Overloaded."""
        if self._any_registered:
            await self.registered.keep_current(self.tokenizer)
        ref = before = ""
        if request.prompt_ref is not None:
            prompt = self.registered.find(request.prompt_ref, tenant.name, request.conversation_key)
            ref, before = prompt.ref, prompt.text
        adapter = self.adapters.choose(request.model, request.lora_name, tenant.name, tenant.models)
        return RequestScope(tenant.name, adapter, self.keys.of(tenant, request.cache_salt, adapter), ref, before)

    async def prompts(self, request: GenerateRequest, scope: RequestScope) -> AsyncGenerator[PreparedPrompt]:
        """Yield the prompts of a request. Raises InvalidRequest, also for one that cannot fit."""
        if isinstance(request, ChatRequest):
            encoded, system_text = await self._encoded_chat(request, scope)
            yield self._prepared(request, scope, encoded, system_text)
            return
        tokenizer, root, public_root = self.tokenizer, scope.keys.root, scope.keys.public_root
        if scope.before and not all(isinstance(prompt, str) for prompt in request.prompts):
            raise InvalidRequest("prompt_ref needs prompts that are text, not token ids.", param="prompt_ref")
        special = request.add_special_tokens is not False
        for prompt in request.prompts:
            if isinstance(prompt, str):
                self._check_size(request, len(scope.before) + len(prompt))
                encoded = await tokenizer.encode_async(
                    scope.before + prompt, root, scope.tenant, public_root=public_root, add_special_tokens=special
                )
            else:
                self._check_size(request, 0, at_least_tokens=len(prompt))
                encoded = tokenizer.encode_ids(prompt, root, public_root)
            if request.truncate_prompt_tokens is not None:
                encoded, _ = self._truncated(request, scope, encoded, "")
            yield self._prepared(request, scope, encoded, "")
            await self.workers.loop.turn(scope.tenant)  # many prompts, even all cached, must not block the loop

    def _prepared(
        self, request: GenerateRequest, scope: RequestScope, encoded: EncodedPrompt, system_text: str
    ) -> PreparedPrompt:
        keys, public_blocks = scope.keys, encoded.public_blocks
        # A key of its own would take a child away from its parent.
        cache_key = request.prompt_cache_key and (request.parent or request.prompt_cache_key)
        # A public prompt that no replica holds yet is computed once, not once per tenant.
        shared = not cache_key and public_blocks and self.registered.is_public(system_text)
        return PreparedPrompt(
            encoded,
            scope=replace(keys.scope, public_blocks=public_blocks) if public_blocks else keys.scope,
            root=keys.public_root + keys.root if public_blocks else keys.root,
            placement_key=placement_key(keys.public_root if shared else keys.root, cache_key, encoded, system_text),
            system_text=system_text,
        )

    async def _encoded_chat(self, request: ChatRequest, scope: RequestScope) -> tuple[EncodedPrompt, str]:
        """Return a chat's prompt, and the formatted system prompt at its beginning, "" for none."""
        rendered = await self.formatted(request, scope)
        encoded = await self.tokenizer.encode_async(
            rendered.text,
            scope.keys.root,
            scope.tenant,
            public_root=scope.keys.public_root,
            add_special_tokens=request.adds_special_tokens,
        )
        if request.truncate_prompt_tokens is not None:
            return self._truncated(request, scope, encoded, rendered.system_text)
        return encoded, rendered.system_text

    def _truncated(
        self, request: GenerateRequest, scope: RequestScope, encoded: EncodedPrompt, system_text: str
    ) -> tuple[EncodedPrompt, str]:
        """Return a prompt with at most the tokens that the request keeps, and its system prompt, "" for none."""
        most, ids = request.truncate_prompt_tokens or 0, encoded.token_ids
        if most < 0:
            most = max(0, self.max_model_len - max(1, request.max_tokens or 0))
        if len(ids) <= most:
            return encoded, system_text
        kept = ids[:most] if request.truncation_side == "right" else ids[len(ids) - most :]
        return self.tokenizer.encode_ids(kept.tolist(), scope.keys.root, scope.keys.public_root), ""

    async def formatted(self, request: ChatRequest, scope: RequestScope) -> RenderedPrompt:
        """Return a chat in the model's form, with its formatted system prompt. Raises InvalidRequest."""
        before, messages = scope.before, request.messages
        if before:
            messages = ({"role": "system", "content": before}, *messages)
        contents = [str(message.get("content") or "") for message in messages]
        chars = sum(map(len, contents))
        self._check_size(request, chars, at_least_tokens=len(messages))
        if not request.apply_chat_template:
            leading = sum(1 for _ in takewhile(lambda message: message["role"] == "system", messages))
            return RenderedPrompt("".join(contents), "".join(contents[:leading]))
        template, tool_use = self.tokenizer.template, request.tool_use
        tools = tool_use.shown if tool_use.tools and template.reads_tools else ()
        chars += rendered_chars(tools) if tools else 0
        calls = [message["tool_calls"] for message in messages if "tool_calls" in message]
        chars += rendered_chars(calls) if calls else 0
        chars += sum([len(message.get("reasoning", "")) for message in messages])
        thinking = request.thinking
        if thinking:
            unread = {*template.unread(thinking)}
            thinking = {name: value for name, value in thinking.items() if name not in unread}
        rendered = await self.tokenizer.render_async(
            messages,
            scope.tenant,
            chars,
            tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **{**thinking, **request.chat_template_kwargs},
        )
        self._check_size(request, len(rendered.text))  # includes tools and calls
        return rendered

    def _check_size(self, request: GenerateRequest, chars: int, at_least_tokens: int = 0) -> None:
        """Raise ContextLengthExceeded for a prompt that cannot fit, before it is rendered, tokenized or hashed."""
        if request.truncate_prompt_tokens is not None:
            return
        longest, max_model_len = self.tokenizer.longest_token_chars, self.max_model_len
        if longest is not None:
            at_least_tokens = max(at_least_tokens, -(-chars // longest))
        if at_least_tokens >= max_model_len:
            raise ContextLengthExceeded(
                f"The prompt is too long: at least {at_least_tokens} tokens > {max_model_len - 1}, the most that leave "
                "this model a token to answer with; shorten the prompt.",
                param=request.prompt_field,
            )

    async def system_save(
        self, request: GenerateRequest, scope: RequestScope, prompt: PreparedPrompt, ttl_s: float | None
    ) -> tuple[tuple[Save, ...], int]:
        """Return the save of a prompt's system prompt, if requested, and how many tokens it has in common with it.

        Its last token may merge with the following text, so saves recount the common tokens.
        """
        if not isinstance(request, ChatRequest) or not prompt.system_text:
            return (), 0
        root, special, saves = scope.keys.root, request.adds_special_tokens, request.save_system_prompt_kv_cache
        key = system_prompt_key(root, prompt.system_text)
        tokens = self._system_tokens.get((key, special))
        if tokens is None or saves:
            alone = await self.tokenizer.encode_async(
                prompt.system_text, root, scope.tenant, add_special_tokens=special
            )
            tokens = self._system_tokens[key, special] = common_tokens(alone.identity, prompt.encoded.identity)
            if len(self._system_tokens) > SYSTEM_PROMPTS:
                del self._system_tokens[next(iter(self._system_tokens))]
        return (Save(key, tokens, ttl_s),) if saves else (), tokens

    async def breakpoint_saves(
        self, request: ChatRequest, scope: RequestScope, prompt: PreparedPrompt
    ) -> tuple[Save, ...]:
        """Return the prefixes to keep for cache breakpoints, in whole blocks, the shortest first.

        Breakpoints that fill no block, or that the chat template refuses alone, are ignored.
        """
        size = self.tokenizer.block_size
        ttls_s: dict[int, float] = {}
        for mark in request.breakpoints:
            messages = _as_far_as(mark, request)
            part = replace(request, messages=messages, add_generation_prompt=False, continue_final_message=False)
            try:
                alone, _ = await self._encoded_chat(part, scope)
            except InvalidRequest:
                continue
            tokens = common_tokens(alone.identity, prompt.encoded.identity) // size * size
            if tokens:
                ttls_s[tokens] = max(mark.ttl_s, ttls_s.get(tokens, 0.0))
        return tuple(Save(b"", tokens, ttl_s) for tokens, ttl_s in sorted(ttls_s.items()))

    def echo(self, request: GenerateRequest, index: int, prompt: PreparedPrompt) -> str:
        """Return the text to put before the answers to a request's prompt ``index``, if it asks for an echo."""
        if isinstance(request, ChatRequest):
            last = request.messages[-1]
            same = last["role"] == "assistant" or not request.add_generation_prompt
            return str(last["content"]) if same else ""
        if request.truncate_prompt_tokens is not None:
            return self.tokenizer.text_of(prompt.encoded.token_ids.tolist())
        given = request.prompts[index]
        return given if isinstance(given, str) else self.tokenizer.text_of(given)

    async def token_ids(self, request: GenerateRequest, tenant: Tenant) -> TokenArray:
        """Return the tokens of a request's first prompt, which may be longer than the model's context.

        Raises the errors of ``scope`` and ``prompts``.
        """
        if request.truncate_prompt_tokens is None:  # a prompt of any length is counted
            request = replace(request, truncate_prompt_tokens=sys.maxsize)
        async with aclosing(self.prompts(request, await self.scope(request, tenant))) as prompts:
            return (await anext(prompts)).encoded.token_ids


def _as_far_as(mark: CacheBreakpoint, request: ChatRequest) -> tuple[Mapping[str, Any], ...]:
    """Return the conversation to compare with. Templates write tools and system messages together, before others."""
    messages = mark.messages or tuple(takewhile(lambda message: message["role"] == "system", request.messages))
    return messages if any(message["role"] != "system" for message in messages) else (*messages, OTHER_WORDS)
