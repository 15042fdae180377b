"""A replica's settings for the server behind it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.config.cache import CacheSection
from serve_app.config.engine import MAX_MODEL_LEN, EngineSection

_CACHE, _ENGINE = CacheSection(), EngineSection()


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """``model``, ``model_name``: its path and name here.

    ``tokenizer``: the path of tokenizer.json, "" for none. ``apart``: whether several tenants must be kept apart.
    """

    workers: tuple[str, ...]
    model: str = ""
    model_name: str = ""
    tokenizer: str = ""
    key: str = ""
    vocab_size: int = 1 << 31
    block_size: int = _CACHE.block_size
    max_model_len: int = MAX_MODEL_LEN
    max_num_seqs: int = _ENGINE.max_num_seqs
    max_num_batched_tokens: int = _ENGINE.max_num_batched_tokens
    max_waiting_requests: int = _ENGINE.max_waiting_requests
    enable_prefix_caching: bool = True
    apart: bool = False
    tenant_shares: Mapping[str, float] = field(default_factory=dict)
