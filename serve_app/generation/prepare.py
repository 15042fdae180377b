"""A validated request and its tenant -> one engine request for each sequence.

Ids, keys, sampling values, length checks.

``ScopeKeys`` has the keys of a prompt's KV and of its placement; the secret stays in it.
"""

import hashlib
import math
import secrets
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import InitVar, dataclass, field, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any, TypeVar

import msgspec
import xxhash

from router.protocol.block_hash import HASH_BYTES, PrefixScope, TokenArray, common_tokens, hash_at, system_prompt_key
from serve_app.api.request import CacheBreakpoint, ChatRequest, CompletionRequest, GenerateRequest, RequestFields
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.checkpoints.checkpoint import CheckpointInfo
from serve_app.engine.protocol import AdapterSpec, EngineRequest, Save
from serve_app.errors import ContextLengthExceeded, InvalidRequest
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares
from serve_app.generation.rules import (
    CheckedGrammars,
    check_told,
    refuse_without_logits,
    rules_of,
    sampling_of,
    stores_kv,
)
from serve_app.prompts.registry import Prompts
from serve_app.tenants import Tenant, Tenants
from serve_app.tokenization.chat_template import OTHER_WORDS, RenderedPrompt
from serve_app.tokenization.tokenizer import EncodedPrompt, PromptTokenizer

PLACEMENT_BLOCKS = 16
"""Prompts without a system prompt are placed by their first blocks, up to this many: equal ones share a replica."""


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
        self._known = lru_cache(4096)(self._make)

    def clear(self) -> None:
        """Clear the cache: salts follow the tenants, and public roots exist only with public prompts."""
        self._known.cache_clear()

    def of(self, tenant: Tenant, cache_salt: str | None, adapter: AdapterSpec | None) -> Keys:
        """Return the keys of a tenant's scope; ``adapter`` None: those of the model alone."""
        return self._known(tenant, cache_salt, adapter.key if adapter is not None else "")

    def _make(self, tenant: Tenant, cache_salt: str | None, lora: str) -> Keys:
        scope = PrefixScope(self._fingerprint, lora, self._tenants.salt(tenant, cache_salt))
        return Keys(
            scope, scope.root(self._secret), scope.public.root(self._secret) if self._public and self._prompts else b""
        )

    def placement(self, keys: Keys, prompt_cache_key: str | None, encoded: EncodedPrompt, system_text: str) -> bytes:
        """Return the 16 bytes that place a prompt while no replica holds it; ``system_text`` "": it has none."""
        # A public prompt that no replica holds yet is computed once, not once per tenant.
        shared = not prompt_cache_key and encoded.public_blocks and self._prompts.is_public(system_text)
        return placement_key(keys.public_root if shared else keys.root, prompt_cache_key, encoded, system_text)


def placement_key(root: bytes, prompt_cache_key: str | None, encoded: EncodedPrompt, system_text: str) -> bytes:
    """Return the 16 bytes that place a prompt under ``root``."""
    if prompt_cache_key:
        return xxhash.xxh3_128_digest(root + b"prompt_cache_key:" + prompt_cache_key.encode())
    if system_text:
        return system_prompt_key(root, system_text)
    blocks = min(PLACEMENT_BLOCKS, len(encoded.block_hashes) // HASH_BYTES)
    if blocks:
        return hash_at(encoded.block_hashes, blocks - 1)
    return xxhash.xxh3_128_digest(root + encoded.token_ids.tobytes())


def session_key(tenant: str, word: str) -> str:
    """Return 16 hexadecimal digits for a tenant's session word, "" for none; the word itself is not passed on."""
    return hashlib.blake2b(f"{tenant}\0{word}".encode(), digest_size=8).hexdigest() if word else ""


R = TypeVar("R", bound=RequestFields)

VALUE_CHARS = 16
"""What a value costs a chat template besides its text, in characters of text."""


def most_values(body: bytes) -> int:
    """Return an upper bound of the number of values in JSON."""
    return 1 + body.count(b",") + body.count(b"[") + body.count(b"{")


def rendered_chars(value: Any) -> int:
    """Return how long it takes a chat template to write a value, in characters of text."""
    written = msgspec.json.encode(value)
    return len(written) + VALUE_CHARS * most_values(written)


WHOLE_INTERVAL_S = 0.25
"""Time between chunks of an answer that is sent whole: no client sees its parts, and each costs the ingress as much."""

TOLD_TOOLS = "this model's chat template has no tools: they are told in a system message, which may serve less well"
"""The warning where it is so."""

SYSTEM_PROMPTS = 1024
"""Number of system prompts with remembered token counts; the oldest is dropped first, and counted again."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of generations, in tokens, and of the time that saves stay. ``save_ttl_s`` None: until a reset."""

    max_model_len: int
    default_max_tokens: int
    save_ttl_s: float | None = None


@dataclass(eq=False)
class Preparer:
    """Turns requests into generations for one model. ``simulated``: there are no logits that rules could change.

    ``shares_prompts``: whether the engine keeps public prompts for all tenants at once.
    """

    info: CheckpointInfo
    tokenizer: PromptTokenizer
    tenants: InitVar[Tenants]
    secret: InitVar[bytes]
    adapters: AdapterRegistry
    limits: Limits
    prompts: Prompts = field(default_factory=Prompts)
    workers: FairWorkers = field(default_factory=lambda: FairWorkers(Shares({})))
    simulated: bool = False
    shares_prompts: bool = True
    _system_tokens: dict[tuple[bytes, bool], int] = field(default_factory=dict)

    def __post_init__(self, tenants: Tenants, secret: bytes) -> None:
        self._keys = ScopeKeys(self.info.fingerprint, tenants, secret, self.prompts, public=self.shares_prompts)
        self._grammars = CheckedGrammars(self.info, self.workers)

    def configure(self, limits: Limits) -> None:
        """Use these limits, and the current tenants and prompts, from the next request on."""
        self.limits = limits
        self.prompts_changed()

    def prompts_changed(self) -> None:
        """Use the current prompts."""
        self._keys.clear()

    async def prepare(
        self, request: GenerateRequest, tenant: Tenant, request_id: str, deadline_s: float = math.inf
    ) -> list[EngineRequest]:
        """Return prompts x n generations, a prompt's choices in a row. Raises NotFound, or InvalidRequest."""
        if self.simulated:
            refuse_without_logits(request)
        store_kv = stores_kv(request, tenant)
        request, adapter, keys = await self._scope(request, tenant)
        seed = secrets.randbits(62) if request.seed is None else request.seed
        grammar, warning = await self._grammars.form(request.grammar, tenant.name)
        if request.tool_use.shown and self.tokenizer.template.tells_tools:
            warning = "; ".join(filter(None, (warning, TOLD_TOOLS)))
        bad_words = await self.tokenizer.word_ids(request.bad_words, tenant.name) if request.bad_words else ()
        session, parent = (session_key(tenant.name, word) for word in (request.session, request.parent))
        rules = rules_of(request, bad_words, self.info.vocab_size)
        limits, end_token_ids = self.limits, self.info.eos_token_ids
        generations: list[EngineRequest] = []
        numbers = 0
        async for encoded, system_text in self._encode(request, keys, tenant.name):
            sampling = sampling_of(
                request, len(encoded.token_ids), rules, limits.max_model_len, limits.default_max_tokens, end_token_ids
            )
            saves, system_tokens = await self._system_prompt(request, keys.root, tenant.name, encoded, system_text)
            if store_kv:
                saves += await self._keep(request, keys, tenant.name, encoded)
            # A key of its own would take a child away from its parent.
            cache_key = request.prompt_cache_key and (request.parent or request.prompt_cache_key)
            placement_key = self._keys.placement(keys, cache_key, encoded, system_text)
            public_blocks = encoded.public_blocks
            echo = self._echo(request, len(generations) // request.n, encoded)
            # Each choice of a completion repeats its prompt's log-probabilities, a chat has them once.
            telling = request.n if isinstance(request, CompletionRequest) else 1
            if request.told_prompt is not None:
                numbers += len(encoded.token_ids) * telling * (1 + request.told_prompt)
                check_told(request, numbers)
            for choice in range(request.n):
                generations.append(
                    EngineRequest(
                        request_id=f"{request_id}.{len(generations)}",
                        token_ids=encoded.token_ids,
                        block_hashes=encoded.block_hashes,
                        scope=replace(keys.scope, public_blocks=public_blocks) if public_blocks else keys.scope,
                        root=keys.public_root + keys.root if public_blocks else keys.root,
                        placement_key=placement_key,
                        tenant=tenant.name,
                        # Choices of one request must differ; the first equals a single one's.
                        sampling=replace(
                            sampling,
                            seed=seed + choice,
                            seeded=request.seed is not None,
                            prompt_logprobs=request.told_prompt if choice < telling else None,
                        ),
                        saves=saves,
                        lora_path=adapter.path if adapter is not None else "",
                        deadline_s=deadline_s,
                        # Stop strings are searched here, and the replica continues until one is found.
                        interval_s=0.0 if request.stream or request.stop else WHOLE_INTERVAL_S,
                        store_kv=store_kv,
                        grammar=grammar,
                        grammar_field=request.grammar.field if request.grammar is not None else "",
                        warning=warning,
                        echo=echo,
                        prompt_ref=request.prompt_ref or "",
                        system_chars=len(system_text),
                        system_tokens=system_tokens,
                        order=request.order,
                        session=session,
                        parent=parent if parent != session else "",
                        final=request.final,
                        expected_tokens=min(request.expected_tokens, sampling.max_tokens),
                        model=request.answering_model,
                        tokenizer=self.info.tokenizer,
                        charged=choice == 0,
                    )
                )
        return generations

    async def _scope(self, request: R, tenant: Tenant) -> tuple[R, AdapterSpec | None, Keys]:
        """Return a request, its prompt reference resolved to NAME@VERSION, its adapter, and its keys."""
        await self.prompts.keep_current(self.tokenizer)
        if request.prompt_ref is not None:
            request = replace(
                request, prompt_ref=self.prompts.find(request.prompt_ref, tenant.name, request.conversation_key).ref
            )
        adapter = self.adapters.choose(request.model, request.lora_name, tenant.name, tenant.models)
        return request, adapter, self._keys.of(tenant, request.cache_salt, adapter)

    def _before(self, request: GenerateRequest, tenant: str) -> str:
        """Return the text of a request's referenced prompt, "" for none."""
        return "" if request.prompt_ref is None else self.prompts.find(request.prompt_ref, tenant).text

    def _echo(self, request: GenerateRequest, index: int, encoded: EncodedPrompt) -> str:
        """Return the text to put before the answers to a prompt, "" for none."""
        if not request.echo:
            return ""
        if isinstance(request, ChatRequest):
            last = request.messages[-1]
            same = last["role"] == "assistant" or not request.add_generation_prompt
            return str(last["content"]) if same else ""
        if request.truncate_prompt_tokens is not None:
            return self.tokenizer.text_of(encoded.token_ids.tolist())
        prompt = request.prompts[index]
        return prompt if isinstance(prompt, str) else self.tokenizer.text_of(prompt)

    async def _encode(
        self, request: GenerateRequest, keys: Keys, tenant: str
    ) -> AsyncGenerator[tuple[EncodedPrompt, str]]:
        """Yield each prompt with the formatted system prompt at its beginning, "" for none."""
        if isinstance(request, ChatRequest):
            yield await self._encode_chat(request, keys, tenant)
            return
        root, public_root = keys.root, keys.public_root
        before = self._before(request, tenant)
        if before and not all(isinstance(prompt, str) for prompt in request.prompts):
            raise InvalidRequest("prompt_ref needs prompts that are text, not token ids.", param="prompt_ref")
        for prompt in request.prompts:
            if isinstance(prompt, str):
                self._check_size(request, len(before) + len(prompt))
                encoded = await self.tokenizer.encode_async(
                    before + prompt,
                    root,
                    tenant,
                    public_root=public_root,
                    add_special_tokens=request.add_special_tokens is not False,
                )
            else:
                self._check_size(request, 0, at_least_tokens=len(prompt))
                encoded = self.tokenizer.encode_ids(prompt, root, public_root)
            yield self._truncated(request, keys, encoded, "")
            await self.workers.loop.turn(tenant)  # many prompts, even all cached, must not block the loop

    async def _encode_chat(self, request: ChatRequest, keys: Keys, tenant: str) -> tuple[EncodedPrompt, str]:
        rendered = await self.formatted(request, tenant)
        encoded = await self.tokenizer.encode_async(
            rendered.text,
            keys.root,
            tenant,
            public_root=keys.public_root,
            add_special_tokens=request.adds_special_tokens,
        )
        return self._truncated(request, keys, encoded, rendered.system_text)

    def _truncated(
        self, request: GenerateRequest, keys: Keys, encoded: EncodedPrompt, system_text: str
    ) -> tuple[EncodedPrompt, str]:
        """Return a prompt with at most the tokens that the request keeps, and its system prompt, "" for none."""
        most, ids = request.truncate_prompt_tokens, encoded.token_ids
        if most is None:
            return encoded, system_text
        if most < 0:
            most = max(0, self.limits.max_model_len - max(1, request.max_tokens or 0))
        if len(ids) <= most:
            return encoded, system_text
        kept = ids[:most] if request.truncation_side == "right" else ids[len(ids) - most :]
        return self.tokenizer.encode_ids(kept.tolist(), keys.root, keys.public_root), ""

    async def formatted(self, request: ChatRequest, tenant: str) -> RenderedPrompt:
        """Return a chat in the model's form, with its formatted system prompt. Raises the errors of ``prepare``."""
        before = self._before(request, tenant)
        messages = request.messages if not before else ({"role": "system", "content": before}, *request.messages)
        contents = [str(message.get("content") or "") for message in messages]
        chars = sum(map(len, contents))
        self._check_size(request, chars, at_least_tokens=len(messages))
        if not request.apply_chat_template:
            leading = sum(1 for _ in takewhile(lambda message: message["role"] == "system", messages))
            return RenderedPrompt("".join(contents), "".join(contents[:leading]))
        tools = request.tool_use.shown if self.tokenizer.template.reads_tools else ()
        chars += rendered_chars(tools) if tools else 0
        calls = [message["tool_calls"] for message in messages if "tool_calls" in message]
        chars += rendered_chars(calls) if calls else 0
        chars += sum(len(message.get("reasoning", "")) for message in messages)
        unread = {*self.tokenizer.template.unread(request.thinking)}
        thinking = {name: value for name, value in request.thinking.items() if name not in unread}
        rendered = await self.tokenizer.render_async(
            messages,
            tenant,
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
        longest, max_model_len = self.tokenizer.longest_token_chars, self.limits.max_model_len
        if longest is not None:
            at_least_tokens = max(at_least_tokens, -(-chars // longest))
        if at_least_tokens >= max_model_len:
            raise ContextLengthExceeded(
                f"The prompt is too long: at least {at_least_tokens} tokens > {max_model_len - 1}, the most that leave "
                "this model a token to answer with; shorten the prompt.",
                param=request.prompt_field,
            )

    async def _system_prompt(
        self, request: GenerateRequest, root: bytes, tenant: str, encoded: EncodedPrompt, system_text: str
    ) -> tuple[tuple[Save, ...], int]:
        """Return the saves of a prompt's system prompt, and how many of the prompt's tokens it has in common.

        Its last token may merge with the following text, so saves recount the common tokens.
        """
        if not isinstance(request, ChatRequest) or not system_text:
            return (), 0
        special, saves = request.adds_special_tokens, request.save_system_prompt_kv_cache
        key = system_prompt_key(root, system_text)
        tokens = self._system_tokens.get((key, special))
        if tokens is None or saves:
            alone = await self.tokenizer.encode_async(system_text, root, tenant, add_special_tokens=special)
            tokens = self._system_tokens[key, special] = common_tokens(alone.token_ids, encoded.token_ids)
            if len(self._system_tokens) > SYSTEM_PROMPTS:
                del self._system_tokens[next(iter(self._system_tokens))]
        return (Save(key, tokens, self.limits.save_ttl_s),) if saves else (), tokens

    async def _keep(
        self, request: GenerateRequest, keys: Keys, tenant: str, encoded: EncodedPrompt
    ) -> tuple[Save, ...]:
        """Return the prefixes to keep for cache breakpoints, in whole blocks, the shortest first.

        Breakpoints that fill no block, or that the chat template refuses alone, are ignored.
        """
        if not isinstance(request, ChatRequest) or not request.breakpoints:
            return ()
        size = self.tokenizer.block_size
        found: dict[int, float] = {}
        for mark in request.breakpoints:
            messages = _as_far_as(mark, request)
            part = replace(request, messages=messages, add_generation_prompt=False, continue_final_message=False)
            try:
                alone, _ = await self._encode_chat(part, keys, tenant)
            except InvalidRequest:
                continue
            tokens = common_tokens(alone.token_ids, encoded.token_ids) // size * size
            if tokens:
                found[tokens] = max(mark.ttl_s, found.get(tokens, 0.0))
        return tuple(Save(b"", tokens, ttl_s) for tokens, ttl_s in sorted(found.items()))

    async def token_ids(self, request: GenerateRequest, tenant: Tenant) -> TokenArray:
        """Return the tokens of a request's first prompt, which may be longer than the model's context.

        Raises the errors of ``prepare`` for the prompt.
        """
        request, _, keys = await self._scope(request, tenant)
        if request.truncate_prompt_tokens is None:  # a prompt of any length is counted
            request = replace(request, truncate_prompt_tokens=sys.maxsize)
        async with aclosing(self._encode(request, keys, tenant.name)) as prompts:
            encoded, _ = await anext(prompts)
        return encoded.token_ids


def _as_far_as(mark: CacheBreakpoint, request: ChatRequest) -> tuple[Mapping[str, Any], ...]:
    """Return the conversation to compare with. Templates write tools and system messages together, before others."""
    messages = mark.messages or tuple(takewhile(lambda message: message["role"] == "system", request.messages))
    return messages if any(message["role"] != "system" for message in messages) else (*messages, OTHER_WORDS)
