"""Prompts of text -> tokens and block hashes, by a model's own tokenizer and chat template, as in the server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import numpy as np

from router.protocol.block_hash import PrefixScope, extend_chain
from router.settings import DEFAULTS
from serve_app.api.request import GenerateRequest
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.errors import InvalidRequest
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares
from serve_app.generation.prompt import Keys, PromptMaker, RequestScope, ScopeKeys
from serve_app.prompts.registry import Prompts
from serve_app.tenants import Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer

ANY_LENGTH = 1 << 30
"""Tokens of a prompt: the model that it was for may take longer ones than the tokenizer's."""


class ServerPrompts:
    """See ``PromptReader``. ``model``: a directory with a tokenizer. The hashes' key is random, and in memory alone."""

    def __init__(self, model: Path, block_tokens: int = DEFAULTS.block_size) -> None:
        self.block_tokens = block_tokens
        self._secret = secrets.token_bytes(32)
        self._tokenizer = PromptTokenizer(model, block_size=block_tokens)
        registered = Prompts()
        keys = ScopeKeys("", Tenants((), self._secret), self._secret, registered, public=False)
        workers = FairWorkers(Shares({}))
        self._maker = PromptMaker(self._tokenizer, keys, AdapterRegistry(""), registered, workers, ANY_LENGTH)
        self._runner = asyncio.Runner()

    def prompts(self, request: GenerateRequest, tenant: str) -> list[tuple[int, bytes]]:
        """See ``PromptReader``."""
        if request.prompt_ref is not None:
            raise InvalidRequest("prompt_ref names a prompt that is not in the file.", param="prompt_ref")
        scope = self._scope(tenant, request.model, f"{request.lora_name or ''}\0{request.cache_salt or ''}")
        return self._runner.run(self._encoded(request, RequestScope(tenant, None, Keys(scope, self._root(scope), b""))))

    def prompt(self, text: str, tenant: str, model: str, adapter: str, *, special: bool) -> tuple[int, bytes]:
        """See ``PromptReader``."""
        root = self._root(self._scope(tenant, model, adapter))
        encoded = self._tokenizer.encode(text, root, add_special_tokens=special)
        return len(encoded.token_ids), encoded.block_hashes

    def of_ids(self, ids: Sequence[int], tenant: str, model: str, adapter: str) -> tuple[int, bytes]:
        """See ``PromptReader``."""
        root = self._root(self._scope(tenant, model, adapter))
        return len(ids), extend_chain(root, 0, np.array(ids, np.int32), self.block_tokens)

    async def _encoded(self, request: GenerateRequest, scope: RequestScope) -> list[tuple[int, bytes]]:
        async with aclosing(self._maker.prompts(request, scope)) as prompts:
            return [(len(one.encoded.token_ids), one.encoded.block_hashes) async for one in prompts]

    def _scope(self, tenant: str, model: str, adapter: str) -> PrefixScope:
        return PrefixScope(model, adapter, tenant.encode())

    def _root(self, scope: PrefixScope) -> bytes:
        return scope.root(self._secret)
