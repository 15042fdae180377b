"""From a validated request and its tenant to generations: text to ids, keys, sampling values, length checks."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TypeVar

from router.protocol.block_hash import TokenArray, system_prompt_key
from serve_app.api.request import ChatRequest, CompletionRequest, GenerateRequest, RequestFields
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.checkpoints.checkpoint import CheckpointInfo
from serve_app.engine.protocol import SamplingParams, Save, TokenRules
from serve_app.errors import ContextLengthExceeded, InvalidRequest
from serve_app.fairness.shares import Shares
from serve_app.fairness.workers import FairWorkers
from serve_app.generation.breakpoints import kept_prefixes
from serve_app.generation.generation import Generation
from serve_app.generation.grammars import CheckedGrammars
from serve_app.generation.keys import Keys, ScopeKeys
from serve_app.generation.rules import refuse_without_logits, rules_of
from serve_app.generation.system_tokens import SystemTokens
from serve_app.prompts.registry import Prompts
from serve_app.structured.compiler import GrammarCompiler
from serve_app.tenants.tenants import Tenant, Tenants
from serve_app.tokenization.chat_template import RenderedPrompt
from serve_app.tokenization.public_tokens import common_tokens
from serve_app.tokenization.tokenizer import EncodedPrompt, PromptTokenizer

R = TypeVar("R", bound=RequestFields)

WHOLE_INTERVAL_S = 0.25
"""Between chunks of an answer that is sent whole: nobody sees its parts, and each costs an ingress as much."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long generations may be, in tokens, and saves stay. ``save_ttl_s`` None: until a reset."""

    max_model_len: int
    default_max_tokens: int
    save_ttl_s: float | None = None


class Preparer:
    """Turns requests into generations for one model. ``adapters`` also knows the model's name.

    ``workers``: threads for grammars. ``simulated``: there is no model whose logits a rule could change.
    """

    def __init__(
        self,
        info: CheckpointInfo,
        tokenizer: PromptTokenizer,
        tenants: Tenants,
        secret: bytes,
        adapters: AdapterRegistry,
        limits: Limits,
        prompts: Prompts | None = None,
        *,
        workers: FairWorkers | None = None,
        simulated: bool = False,
    ) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._adapters = adapters
        self._limits = limits
        self._prompts = Prompts() if prompts is None else prompts
        self._keys = ScopeKeys(info.fingerprint, tenants, secret, self._prompts)
        compiler = GrammarCompiler(info.path, info.vocab_size, info.eos_token_ids)
        self._grammars = CheckedGrammars(compiler, workers or FairWorkers(Shares({})))
        self._simulated = simulated
        self._system_tokens = SystemTokens(tokenizer)

    def configure(self, limits: Limits) -> None:
        """Go by other limits from the next request on, and by what the tenants and prompts have become."""
        self._limits = limits
        self.prompts_changed()

    def prompts_changed(self) -> None:
        """Go by what the prompts have become."""
        self._keys.clear()

    async def prepare(
        self, request: GenerateRequest, tenant: Tenant, request_id: str, deadline_s: float = math.inf
    ) -> list[Generation]:
        """Return prompts x n generations, a prompt's choices in a row.

        Raises ModelNotFound, PromptNotFound, ContextLengthExceeded, or InvalidRequest from the chat template or for an
        adapter.
        """
        if self._simulated:
            refuse_without_logits(request)
        store_kv = _stores_kv(request, tenant)
        await self._prompts.keep_current(self._tokenizer)
        request = self._with_version(request, tenant.name)
        adapter = self._adapters.choose(request.model, request.lora_name, tenant.name, tenant.models)
        keys = self._keys.of(tenant, request.cache_salt, adapter)
        seed = secrets.randbits(62) if request.seed is None else request.seed
        grammar = await self._grammar(request, tenant.name)
        bad_words = await self._tokenizer.word_ids(request.bad_words, tenant.name) if request.bad_words else ()
        rules = rules_of(request, bad_words, self._info.vocab_size)
        generations: list[Generation] = []
        async for encoded, system_text in self._encode(request, keys, tenant.name):
            sampling = self._sampling(request, len(encoded.token_ids), seed, rules)
            saves = await self._save(request, keys.root, tenant.name, encoded, system_text)
            if store_kv:
                saves += await self._keep(request, keys, tenant.name, encoded)
            placement_key = self._keys.placement(keys, request.prompt_cache_key, encoded, system_text)
            special = not (isinstance(request, ChatRequest) and request.apply_chat_template)
            system_tokens = await self._system_tokens.count(
                encoded, system_text, keys.root, tenant.name, special=special
            )
            public_blocks = encoded.public_blocks
            echo = self._echo(request, len(generations) // request.n)
            for choice in range(request.n):
                generations.append(
                    Generation(
                        request_id=f"{request_id}.{len(generations)}",
                        token_ids=encoded.token_ids,
                        block_hashes=encoded.block_hashes,
                        scope=replace(keys.scope, public_blocks=public_blocks) if public_blocks else keys.scope,
                        root=keys.public_root + keys.root if public_blocks else keys.root,
                        placement_key=placement_key,
                        tenant=tenant.name,
                        # Choices of one request must differ; the first is what a single one would have been.
                        sampling=replace(sampling, seed=seed + choice),
                        saves=saves,
                        lora_path=adapter.path if adapter is not None else "",
                        deadline_s=deadline_s,
                        # A stop string is looked for here: until it is found the replica goes on.
                        interval_s=0.0 if request.stream or request.stop else WHOLE_INTERVAL_S,
                        store_kv=store_kv,
                        grammar=grammar,
                        echo=echo,
                        prompt_ref=request.prompt_ref or "",
                        system_chars=len(system_text),
                        system_tokens=system_tokens,
                    )
                )
        return generations

    def _with_version(self, request: R, tenant: str) -> R:
        """Return a request with NAME@VERSION for the prompt that it refers to. Raises what ``Prompts.find`` does."""
        if request.prompt_ref is None:
            return request
        return replace(request, prompt_ref=self._prompts.find(request.prompt_ref, tenant).ref)

    def _before(self, request: GenerateRequest, tenant: str) -> str:
        """Return the text of the prompt that a request refers to, "" for none."""
        return "" if request.prompt_ref is None else self._prompts.find(request.prompt_ref, tenant).text

    async def _grammar(self, request: GenerateRequest, tenant: str) -> str:
        """Return what the answer must match, in llguidance's form, "" for anything. Raises InvalidRequest."""
        if request.grammar is None:
            return ""
        if not self._info.eos_token_ids:
            raise InvalidRequest(
                f"{request.grammar.field} needs a model with an end token, and this one names none.",
                param=request.grammar.field,
            )
        return await self._grammars.form(request.grammar, tenant)

    def _echo(self, request: GenerateRequest, index: int) -> str:
        """Return what stands before the answers to a prompt, "" for nothing."""
        if not isinstance(request, CompletionRequest) or not request.echo:
            return ""
        prompt = request.prompts[index]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    async def _encode(
        self, request: GenerateRequest, keys: Keys, tenant: str
    ) -> AsyncIterator[tuple[EncodedPrompt, str]]:
        """Yield each prompt, with the formatted system prompt that it begins with, "" for none.

        The prompt that a request refers to goes before its messages, or before its text.
        """
        root, public_root = keys.root, keys.public_root
        encode = partial(self._tokenizer.encode_async, root=root, tenant=tenant, public_root=public_root)
        if isinstance(request, CompletionRequest):
            before = self._before(request, tenant)
            if before and not all(isinstance(prompt, str) for prompt in request.prompts):
                raise InvalidRequest("prompt_ref needs prompts that are text, not token ids.", param="prompt_ref")
            for prompt in request.prompts:
                if isinstance(prompt, str):
                    self._check_size(request, len(before) + len(prompt))
                    yield await encode(before + prompt, add_special_tokens=True), ""
                else:
                    self._check_size(request, 0, at_least_tokens=len(prompt))
                    yield self._tokenizer.encode_ids(prompt, root, public_root), ""
                await asyncio.sleep(0)  # many long prompts, all of them known, must not hold up the loop
            return
        rendered = await self.formatted(request, tenant)
        yield await encode(rendered.text, add_special_tokens=not request.apply_chat_template), rendered.system_text

    async def formatted(self, request: ChatRequest, tenant: str) -> RenderedPrompt:
        """Return a chat as the model reads it, with its formatted system prompt. Raises what ``prepare`` does."""
        before = self._before(request, tenant)
        messages = request.messages if not before else ({"role": "system", "content": before}, *request.messages)
        contents = [str(message.get("content") or "") for message in messages]
        chars = sum(map(len, contents))
        self._check_size(request, chars, at_least_tokens=len(messages))
        if not request.apply_chat_template:
            leading = sum(1 for _ in takewhile(lambda message: message["role"] == "system", messages))
            return RenderedPrompt("".join(contents), "".join(contents[:leading]))
        tools = request.tool_use.tools if self._tokenizer.template.reads_tools else ()
        chars += len(str(tools)) if tools else 0
        chars += sum(len(str(message["tool_calls"])) for message in messages if "tool_calls" in message)
        rendered = await self._tokenizer.render_async(
            messages,
            tenant,
            chars,
            tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **request.chat_template_kwargs,
        )
        self._check_size(request, len(rendered.text))  # tools and calls are in it, too
        return rendered

    def _check_size(self, request: GenerateRequest, chars: int, at_least_tokens: int = 0) -> None:
        """Refuse what cannot fit, before it is rendered, tokenized or hashed. Raises ContextLengthExceeded.

        ``at_least_tokens``: known without its text. A chat is taken to have one a message.
        """
        longest, max_model_len = self._tokenizer.longest_token_chars, self._limits.max_model_len
        if longest is not None:
            at_least_tokens = max(at_least_tokens, -(-chars // longest))
        if at_least_tokens >= max_model_len:
            raise ContextLengthExceeded(
                f"The prompt has at least {at_least_tokens} tokens, and this model takes {max_model_len} for prompt "
                "and answer together; shorten the prompt.",
                param=request.prompt_field,
            )

    async def _save(
        self, request: GenerateRequest, root: bytes, tenant: str, encoded: EncodedPrompt, system_text: str
    ) -> tuple[Save, ...]:
        """Return what to keep of a prompt: the tokens that the formatted system prompt alone has in common with it.

        They are fewer than the system prompt's own where its last token merges with what follows. Nothing when
        nothing is to be saved, or there is no system prompt.
        """
        if isinstance(request, CompletionRequest) or not request.save_system_prompt_kv_cache or not system_text:
            return ()
        alone = await self._tokenizer.encode_async(
            system_text, root, tenant, add_special_tokens=not request.apply_chat_template
        )
        tokens = common_tokens(alone.token_ids, encoded.token_ids)
        return (Save(system_prompt_key(root, system_text), tokens, self._limits.save_ttl_s),)

    async def _keep(
        self, request: GenerateRequest, keys: Keys, tenant: str, encoded: EncodedPrompt
    ) -> tuple[Save, ...]:
        """Return what a request's cache breakpoints ask to keep of its prompt."""
        if isinstance(request, CompletionRequest) or not request.breakpoints:
            return ()

        async def encode(part: ChatRequest) -> TokenArray:
            async for prompt, _ in self._encode(replace(part, add_generation_prompt=False), keys, tenant):
                return prompt.token_ids
            raise AssertionError("a chat is one prompt")

        size = self._tokenizer.block_size
        return tuple(await kept_prefixes(request, encoded.token_ids, encode, size))

    async def count(self, request: ChatRequest, tenant: Tenant) -> int:
        """Return how many tokens a request's prompt has. Raises what ``prepare`` would for the prompt."""
        await self._prompts.keep_current(self._tokenizer)
        request = self._with_version(request, tenant.name)
        adapter = self._adapters.choose(request.model, request.lora_name, tenant.name, tenant.models)
        keys = self._keys.of(tenant, request.cache_salt, adapter)
        return sum([len(encoded.token_ids) async for encoded, _ in self._encode(request, keys, tenant.name)])

    def _sampling(
        self, request: GenerateRequest, prompt_tokens: int, seed: int, rules: TokenRules | None
    ) -> SamplingParams:
        """Return the sampling values of a request's first choice. Raises ContextLengthExceeded, InvalidRequest."""
        field = request.prompt_field
        max_model_len = self._limits.max_model_len
        room = max_model_len - prompt_tokens
        if room < 1:
            raise ContextLengthExceeded(
                f"The prompt has {prompt_tokens} tokens, and this model takes {max_model_len} for prompt and "
                "answer together; shorten the prompt.",
                param=field,
            )
        if prompt_tokens < 1:
            raise ContextLengthExceeded("The prompt is empty: it needs at least one token.", param=field, code=None)
        max_tokens = min(self._limits.default_max_tokens, room) if request.max_tokens is None else request.max_tokens
        if max_tokens > room:
            raise ContextLengthExceeded(
                f"This model takes {max_model_len} tokens for prompt and answer together; the prompt has "
                f"{prompt_tokens} and max_tokens is {max_tokens}: use at most {room}, or a shorter prompt.",
                param="max_tokens",
            )
        if request.min_tokens > max_tokens:
            raise InvalidRequest(f"min_tokens must be at most max_tokens, which is {max_tokens}.", param="min_tokens")
        # A grammar says itself where an answer ends.
        ends = () if request.ignore_eos and request.grammar is None else self._info.eos_token_ids
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=seed,
            stop_token_ids=tuple(dict.fromkeys((*ends, *request.stop_token_ids))),
            disable_spec_decode=request.disable_spec_decode,
            min_p=request.min_p,
            rules=rules,
            logprobs=request.logprobs,
            shown_stop_token_ids=request.stop_token_ids if request.include_stop_str_in_output else (),
        )


def _stores_kv(request: GenerateRequest, tenant: Tenant) -> bool:
    """Return whether a request's KV may stay. Raises InvalidRequest where it asks for what that rules out."""
    if request.store_kv and not tenant.store_kv:
        message = "store_kv cannot be true: no request with this API key leaves anything in the cache; leave it out."
        raise InvalidRequest(message, param="store_kv")
    stores = tenant.store_kv and request.store_kv is not False
    if request.save_system_prompt_kv_cache and not stores:
        why = "store_kv is false" if tenant.store_kv else "no request with this API key leaves anything in the cache"
        message = f"save_system_prompt_kv_cache cannot be true, because {why}; leave it out."
        raise InvalidRequest(message, param="save_system_prompt_kv_cache")
    return stores
