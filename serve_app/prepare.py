"""From a validated request and its tenant to generations: text to ids, keys, sampling values, length checks.

Owns scope roots (cached per tenant and salt) and placement keys. Knows nothing of HTTP or of where a generation
will run.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from itertools import takewhile

import numpy as np
import xxhash

from router.block_hash import HASH_BYTES, PrefixScope, system_prompt_key
from serve_app.adapters import AdapterRegistry
from serve_app.api.generate import GenerateRequest
from serve_app.checkpoint import CheckpointInfo
from serve_app.dispatch import Generation
from serve_app.engine.adapter import AdapterSpec
from serve_app.engine.protocol import SamplingParams, Save
from serve_app.errors import ContextLengthExceeded
from serve_app.tenancy import Tenant, Tenants
from serve_app.tokenizer import EncodedPrompt, PromptTokenizer

PLACEMENT_BLOCKS = 16
"""A prompt without a system prompt is placed by this many first blocks: requests that share them stay together."""

COMPLETION_MAX_TOKENS = 16
"""``max_tokens`` of a completion that names none. Source: OpenAI's completions API."""

_SCOPES = 4096


class Preparer:
    """Turns requests into generations for one model."""

    def __init__(
        self,
        info: CheckpointInfo,
        tokenizer: PromptTokenizer,
        tenants: Tenants,
        secret: bytes,
        *,
        model_name: str,
        max_model_len: int,
        default_max_tokens: int,
        save_ttl_s: float | None = None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._tenants = tenants
        self._secret = secret
        self._max_model_len = max_model_len
        self._default_max_tokens = default_max_tokens
        self._save_ttl_s = save_ttl_s
        self._adapters = AdapterRegistry(model_name) if adapters is None else adapters
        self._scopes: OrderedDict[tuple[str, str | None, str], tuple[PrefixScope, bytes]] = OrderedDict()

    async def prepare(self, request: GenerateRequest, tenant: Tenant, request_id: str) -> list[Generation]:
        """Return prompts x n generations, a prompt's choices in a row.

        Raises ModelNotFound, ContextLengthExceeded, or InvalidRequest from the chat template or for an adapter.
        """
        adapter = self._adapters.choose(request.model, request.lora_name, tenant.name)
        scope, root = self._scope(tenant, request.cache_salt, adapter)
        seed = secrets.randbits(62) if request.seed is None else request.seed
        generations: list[Generation] = []
        for encoded, system_text in await self._encode(request, root):
            save = await self._save(request, root, encoded, system_text)
            sampling = self._sampling(request, len(encoded.token_ids))
            placement_key = self._placement_key(request, root, encoded, system_text)
            for choice in range(request.n):
                index = len(generations)
                generations.append(
                    Generation(
                        request_id=f"{request_id}.{index}",
                        token_ids=encoded.token_ids,
                        block_hashes=encoded.block_hashes,
                        scope=scope,
                        root=root,
                        placement_key=placement_key,
                        tenant=tenant.name,
                        # Choices of one request must differ; the first is what a single one would have been.
                        sampling=sampling(seed + choice),
                        save=save,
                        lora_path=adapter.path if adapter is not None else "",
                    )
                )
        return generations

    def _scope(self, tenant: Tenant, cache_salt: str | None, adapter: AdapterSpec | None) -> tuple[PrefixScope, bytes]:
        lora = adapter.key if adapter is not None else ""
        key = (tenant.name, cache_salt, lora)
        found = self._scopes.get(key)
        if found is None:
            scope = PrefixScope(self._info.fingerprint, lora, self._tenants.salt(tenant, cache_salt))
            found = self._scopes[key] = (scope, scope.root(self._secret))
            if len(self._scopes) > _SCOPES:
                self._scopes.popitem(last=False)
        else:
            self._scopes.move_to_end(key)
        return found

    async def _encode(self, request: GenerateRequest, root: bytes) -> list[tuple[EncodedPrompt, str]]:
        tokenizer = self._tokenizer
        if request.kind == "chat":
            if not request.apply_chat_template:
                text = "".join(str(message.get("content") or "") for message in request.messages)
                leading = takewhile(lambda message: message["role"] == "system", request.messages)
                system_text = "".join(str(message.get("content") or "") for message in leading)
                return [(await tokenizer.encode_async(text, root, add_special_tokens=True), system_text)]
            rendered = tokenizer.render_chat(
                request.messages,
                add_generation_prompt=request.add_generation_prompt,
                **dict(request.chat_template_kwargs),
            )
            return [(await tokenizer.encode_async(rendered.text, root), rendered.system_text)]
        return [
            (
                await tokenizer.encode_async(prompt, root, add_special_tokens=True)
                if isinstance(prompt, str)
                else tokenizer.encode_ids(prompt, root),
                "",
            )
            for prompt in request.prompts
        ]

    async def _save(
        self, request: GenerateRequest, root: bytes, encoded: EncodedPrompt, system_text: str
    ) -> Save | None:
        """Return what to keep of a prompt: the tokens that the formatted system prompt alone has in common with it.

        They are fewer than the system prompt's own where its last token merges with what follows. None when
        nothing is to be saved, or there is no system prompt.
        """
        if not request.save_system_prompt_kv_cache or not system_text:
            return None
        alone = await self._tokenizer.encode_async(
            system_text, root, add_special_tokens=not request.apply_chat_template
        )
        length = min(len(alone.token_ids), len(encoded.token_ids))
        differs = np.flatnonzero(alone.token_ids[:length] != encoded.token_ids[:length])
        tokens = int(differs[0]) if len(differs) else length
        return Save(system_prompt_key(root, system_text), tokens, self._save_ttl_s)

    def _sampling(self, request: GenerateRequest, prompt_tokens: int) -> _SamplingMaker:
        field = "messages" if request.kind == "chat" else "prompt"
        room = self._max_model_len - prompt_tokens
        if room < 1:
            raise ContextLengthExceeded(
                f"The prompt has {prompt_tokens} tokens, and this model takes {self._max_model_len} for prompt and "
                "answer together; shorten the prompt.",
                param=field,
            )
        if prompt_tokens < 1:
            raise ContextLengthExceeded("The prompt is empty: it needs at least one token.", param=field, code=None)
        max_tokens = request.max_tokens
        if max_tokens is None:
            default = self._default_max_tokens if request.kind == "chat" else COMPLETION_MAX_TOKENS
            max_tokens = min(default, room)
        elif max_tokens > room:
            raise ContextLengthExceeded(
                f"This model takes {self._max_model_len} tokens for prompt and answer together; the prompt has "
                f"{prompt_tokens} and max_tokens is {max_tokens}: use at most {room}, or a shorter prompt.",
                param="max_tokens",
            )
        stop_ids = () if request.ignore_eos else self._info.eos_token_ids
        return _SamplingMaker(request, max_tokens, stop_ids)

    def _placement_key(self, request: GenerateRequest, root: bytes, encoded: EncodedPrompt, system_text: str) -> bytes:
        if request.prompt_cache_key:
            return xxhash.xxh3_128_digest(root + b"prompt_cache_key:" + request.prompt_cache_key.encode())
        if system_text:
            return system_prompt_key(root, system_text)
        blocks = min(PLACEMENT_BLOCKS, len(encoded.block_hashes) // HASH_BYTES)
        if blocks:
            return encoded.block_hashes[HASH_BYTES * (blocks - 1) : HASH_BYTES * blocks]
        return xxhash.xxh3_128_digest(root + encoded.token_ids.tobytes())


class _SamplingMaker:
    """A request's sampling values, waiting for a choice's seed."""

    def __init__(self, request: GenerateRequest, max_tokens: int, stop_token_ids: tuple[int, ...]) -> None:
        self._request = request
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids

    def __call__(self, seed: int) -> SamplingParams:
        request = self._request
        return SamplingParams(
            max_tokens=self._max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=max(0, request.top_k),
            seed=seed,
            stop_token_ids=self._stop_token_ids,
            disable_spec_decode=request.disable_spec_decode,
        )
