"""The events from replicas to routers. Hashes are packed (see ``block_hash``). Messages are in ``feed.messages``."""

from collections.abc import Iterable

import msgspec
import xxhash

from router.protocol.samples import Sample

POOL_TIER = "pool"
"""The pool in which a replica computes."""

HOST_TIER = "host"
"""Host memory below the pool."""

ENDS_TIER = "ends"
"""The pool of a model with a window or a state in some layers. A prompt can be served up to each listed block, even if
the blocks before it are not listed."""


class BlocksStored(msgspec.Struct, frozen=True, tag="stored", array_like=True):
    """Blocks that a replica can now serve. ``hashes`` is packed, with parents before children."""

    hashes: bytes
    tier: str = POOL_TIER


class BlocksRemoved(msgspec.Struct, frozen=True, tag="removed", array_like=True):
    """Blocks that a replica can no longer serve, with children before parents."""

    hashes: bytes
    tier: str = POOL_TIER


class CacheCleared(msgspec.Struct, frozen=True, tag="cleared", array_like=True):
    """Every block of the replica is gone."""


class TierDigest(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of one tier: their number, and the XOR of their words (see ``block_hash.block_word``)."""

    tier: str
    blocks: int
    xor: int


class CacheDigest(msgspec.Struct, frozen=True, tag="digest", array_like=True):
    """The contents of a replica's caches after all earlier events. A missing tier is empty."""

    tiers: tuple[TierDigest, ...]


class LoadReport(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """A replica's load at one moment. Rates are measured, smoothed, and 0.0 while unknown."""

    queued_prefill_tokens: int
    running_sequences: int
    waiting_sequences: int
    max_running_sequences: int
    max_waiting_sequences: int
    prefill_tokens_per_s: float
    admitted: dict[str, int] = {}
    """By router, the highest of its reservation numbers that the replica has admitted."""
    committed_prefill_tokens: int = 0
    """The queued tokens that run before any new request of normal order, however short.

    It is the rest of a prefill or step that is not interrupted.
    """
    pull_tokens_per_s: float = 0.0
    """The rate of KV copies from other replicas, 0.0 without such copies."""
    committed_sequences: int = 1
    """The waiting sequences without other tokens, ignored if no tokens are committed."""
    adapters: bytes = b""
    """The LoRA adapters in memory (see ``pack_adapters``)."""
    adapter_load_s: float = 0.0
    """The load time of one adapter."""
    prefill_rate_tokens: int = 0
    """The number of recent prefill tokens behind the measured prefill rate, 0 if the rate is known and not measured.

    A router trusts a rate over few tokens only in part (see ``ReplicaLoad``).
    """
    taken_at_s: float = 0.0
    """The time of the report by the replica's own clock.

    Of two reports the later one counts, regardless of their arrival order.
    """
    arrived: bytes = b""
    """Since the previous report, the requests that arrived (see ``request_key``).

    Only replicas without reservation numbers send them and ``begun``.
    """
    begun: bytes = b""
    """Since the previous report, the requests that had their first token or ended."""
    attributes: dict[str, str | float] = {}
    """Of the replica, such as its zone or price, for policies; at most ``settings.MAX_ATTRIBUTES``."""
    out: str = ""
    """Why it cannot take any request now, "" if it can."""
    tier_tokens_per_s: float = 0.0
    """The rate of loads from tiers below the pool, 0.0 if their time does not count."""


class StatsReport(msgspec.Struct, frozen=True, tag="stats", array_like=True):
    """A replica's counters and gauges for /metrics and /v1/cache/state. No policy reads them."""

    samples: tuple[Sample, ...]


Event = BlocksStored | BlocksRemoved | CacheCleared | CacheDigest | LoadReport | StatsReport

KEY_BYTES = 8
MAX_KEYS = 1024
"""The maximum for one report of a replica. Further keys are ignored."""


def pack_adapters(keys: Iterable[str]) -> bytes:
    """Return a report's form of the adapters in memory: 8 bytes for each key, independent of their order."""
    return b"".join(sorted(map(adapter_hash, keys)))


def adapter_hash(key: str) -> bytes:
    """Return the 8 bytes that represent an adapter's key in a report."""
    return xxhash.xxh3_64_digest(key.encode())


def request_key(chain: bytes, prompt_tokens: int) -> bytes:
    """Return the 8 bytes that identify a request to a router and a replica. Equal prompts have equal keys."""
    return xxhash.xxh3_64_digest(chain[-2 * KEY_BYTES :] + prompt_tokens.to_bytes(8, "little"))


def unpack_keys(packed: bytes) -> list[bytes]:
    """Return the keys of adapters or requests in a report, ``MAX_KEYS`` at most."""
    end = min(len(packed) // KEY_BYTES, MAX_KEYS) * KEY_BYTES
    return [packed[start : start + KEY_BYTES] for start in range(0, end, KEY_BYTES)]
