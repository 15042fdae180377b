"""What replicas tell routers. Hashes travel packed (see ``block_hash``); messages are in ``feed.messages``."""

from collections.abc import Iterable

import msgspec
import xxhash

from router.protocol.samples import Sample

POOL_TIER = "pool"
"""Where a replica computes."""

ENDS_TIER = "ends"
"""The pool of a model with a window or a state in some layers: a prompt can be served up to each block that is named,
whatever is named of those before it."""


class BlocksStored(msgspec.Struct, frozen=True, tag="stored", array_like=True):
    """Blocks that a replica can now serve. ``hashes`` is packed; parents come before children."""

    hashes: bytes
    tier: str = POOL_TIER


class BlocksRemoved(msgspec.Struct, frozen=True, tag="removed", array_like=True):
    """Blocks that a replica can serve no longer; children come before parents."""

    hashes: bytes
    tier: str = POOL_TIER


class CacheCleared(msgspec.Struct, frozen=True, tag="cleared", array_like=True):
    """Every block of the replica is gone."""


class TierDigest(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of one tier: how many, and the XOR of their words (see ``block_hash.block_word``)."""

    tier: str
    blocks: int
    xor: int


class CacheDigest(msgspec.Struct, frozen=True, tag="digest", array_like=True):
    """What a replica's caches hold after all events before this one. A tier that is not named holds nothing."""

    tiers: tuple[TierDigest, ...]


class LoadReport(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """A replica's load at one moment. Rates are measured, smoothed, and 0.0 while unknown.

    ``admitted``: by router, the highest of its reservation numbers that the replica has admitted.
    ``committed_prefill_tokens``: those of the queued tokens that run before any request of the usual order that comes
    now, however short (the rest of a prefill or step that is not interrupted); ``committed_sequences``: the waiting
    ones that have no other tokens, ignored where none are committed.
    ``pull_tokens_per_s``: how fast the replica copies KV from others, 0.0 where it does not.
    ``prefill_rate_tokens``: how many recent prefill tokens that rate was measured over, 0 where it is not measured but
    known; a router believes a rate over few of them only in part (see ``ReplicaLoad``).
    ``taken_at_s``: when this was so, by a clock of the replica's own; of two reports the later one counts, in whatever
    order they come.
    ``adapters``: the LoRA adapters in memory (see ``pack_adapters``); ``adapter_load_s``: how long one takes to load.
    ``arrived``, ``begun``: the requests that came, and had their first token or ended, since the report before (see
    ``request_key``); from a replica that is told no reservation numbers.
    """

    queued_prefill_tokens: int
    running_sequences: int
    waiting_sequences: int
    max_running_sequences: int
    max_waiting_sequences: int
    prefill_tokens_per_s: float
    admitted: dict[str, int] = {}
    committed_prefill_tokens: int = 0
    pull_tokens_per_s: float = 0.0
    committed_sequences: int = 1
    adapters: bytes = b""
    adapter_load_s: float = 0.0
    prefill_rate_tokens: int = 0
    taken_at_s: float = 0.0
    arrived: bytes = b""
    begun: bytes = b""


class StatsReport(msgspec.Struct, frozen=True, tag="stats", array_like=True):
    """A replica's counters and gauges for /metrics and /v1/cache/state; never read by a policy."""

    samples: tuple[Sample, ...]


Event = BlocksStored | BlocksRemoved | CacheCleared | CacheDigest | LoadReport | StatsReport

KEY_BYTES = 8
MAX_KEYS = 1024
"""Of one replica; what it reports beyond them is not believed."""


def pack_adapters(keys: Iterable[str]) -> bytes:
    """Return what a report says of the adapters in memory: 8 bytes a key, the same in whatever order they come."""
    return b"".join(sorted(map(adapter_hash, keys)))


def adapter_hash(key: str) -> bytes:
    """Return the 8 bytes that stand for an adapter's key in a report."""
    return xxhash.xxh3_64_digest(key.encode())


def request_key(chain: bytes, prompt_tokens: int) -> bytes:
    """Return the 8 bytes by which a router and a replica know a request; equal prompts have equal keys."""
    return xxhash.xxh3_64_digest(chain[-2 * KEY_BYTES :] + prompt_tokens.to_bytes(8, "little"))


def unpack_keys(packed: bytes) -> list[bytes]:
    """Return the keys of adapters or requests that a report holds, ``MAX_KEYS`` at most."""
    end = min(len(packed) // KEY_BYTES, MAX_KEYS) * KEY_BYTES
    return [packed[start : start + KEY_BYTES] for start in range(0, end, KEY_BYTES)]
