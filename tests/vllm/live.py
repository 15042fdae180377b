"""A request in vLLM's cache manager, without an engine."""

from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from router.protocol.block_hash import PrefixScope, extend_chain
from serve_app.engine.vllm.scheduling.tenant import salt_of, scope_args
from tests.serve_app.engine.tiny import root_of

SIZE = 4

init_none_hash(sha256)
hasher = get_request_block_hasher(SIZE, sha256)
_names = count()


@dataclass(eq=False)
class Live:
    """A request in vLLM's manager, and our side of it. ``chunk``: the tokens of a step of its prompt."""

    tenant: str
    scope: PrefixScope
    request: Any
    store_kv: bool
    chunk: int

    @classmethod
    def asked(cls, tenant: str, scope: PrefixScope, ids: Any, *, store_kv: bool = True, chunk: int = 0) -> "Live":
        """Return a new request for eight tokens."""
        root = root_of(scope)
        told = scope_args(root, scope.public_blocks * SIZE, store_kv=store_kv)
        params, name = SamplingParams(max_tokens=8, extra_args=told), f"r{next(_names)}"
        request = Request(name, ids.tolist(), params, None, cache_salt=salt_of(root), block_hasher=hasher)
        return cls(tenant, scope, request, store_kv, chunk)

    @property
    def ids(self) -> Any:
        """The tokens of prompt and answer so far."""
        return np.array(self.request.all_token_ids, np.int32)

    def chain(self) -> bytes:
        """Return the hashes of all their blocks."""
        return extend_chain(root_of(self.scope), self.scope.public_blocks, self.ids, SIZE)

    def content(self, index: int) -> tuple[PrefixScope, bytes, bool]:
        """Return a block's scope, all tokens up to its end, and whether it stays."""
        return self.scope.at(index), self.ids[: (index + 1) * SIZE].tobytes(), self.store_kv
