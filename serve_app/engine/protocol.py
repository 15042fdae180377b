"""The engine's contract: what goes in, what streams out, what it reports.

Token ids are int32 arrays, scopes and hashes the router's. Any ``Engine`` can run in a replica.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import numpy as np

from router.protocol.block_hash import PrefixScope, TokenArray
from router.protocol.events import Event, LoadReport, StatsReport
from serve_app.cache.kv_chain import KvChain
from serve_app.cache.prefix.hot_prefixes import HashedTokens, HotPrefixes, SavedPrefix
from serve_app.cache.prefix.pins import PinOutcome
from serve_app.engine.sampling_params import SamplingParams as SamplingParams
from serve_app.engine.sampling_params import TokenLogprob as TokenLogprob
from serve_app.engine.sampling_params import TokenMatcher as TokenMatcher
from serve_app.engine.sampling_params import TokenRules as TokenRules

Clock = Callable[[], float]
"""Returns the seconds since some moment; never fewer than before."""

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]

SaveOutcome = Literal["saved", "present", "over_budget", "too_large", "too_short", "failed", "off"]
"""What became of a save: "present" when it was there or on its way; the last five are warnings ("off": no cache)."""


@dataclass(frozen=True, slots=True)
class Save:
    """Keep the full blocks of a request's first ``tokens`` tokens once the request has computed them.

    ``key`` names the save, within the scope of the request. It is b"" for a cache breakpoint: equal prefixes of a
    tenant are one then, and none is written to disk. ``ttl_s`` counts from the last read; None: no end.
    """

    key: bytes
    tokens: int
    ttl_s: float | None = None


class RemoteKv:
    """KV on its way to requests, which start when it is ``done``; ``tokens``: leading ones that will have KV then."""

    __slots__ = ("_ended", "tokens")

    def __init__(self, tokens: int, *, of: RemoteKv | None = None) -> None:
        self.tokens = tokens
        self._ended: threading.Event = of._ended if of is not None else threading.Event()

    @property
    def done(self) -> bool:
        """Whether the copy is over, however it went."""
        return self._ended.is_set()

    def end(self) -> None:
        """Say that it is over, for everyone who waits; wake the engine then."""
        self._ended.set()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One generation. ``token_ids``: the prompt, int32, at least one id.

    The last ``resumed_tokens`` of them are the answer's first ones, which another replica generated.
    ``matcher``: what the answer must match, of its own; it goes before the rules where they leave no token.

    ``scope.lora`` names the LoRA adapter (``AdapterSpec.key``), "" the base model.
    ``root`` is the scope's keyed root hash, behind the public scope's where ``scope.public_blocks`` is not 0;
    ``block_hashes`` the packed chain of the prompt's full blocks under it (empty: the engine computes it).
    ``router_id`` and ``reservation`` come back in the load report.
    ``remote_kv``: what it has to wait for, though it counts as waiting, and queues, from its submission.
    ``timeout_s``: how long it may take from its submission on; what is not finished by then ends with "timeout".
    ``saves``: what is to be kept, in the order in which it gets room.
    ``order``: of its tenant's requests that wait, those of the lowest start first; between tenants it says nothing.
    ``store_kv`` False: it takes hits, and no block that it computes is ever anybody else's or outlives it.
    """

    request_id: str
    token_ids: TokenArray
    scope: PrefixScope
    root: bytes
    sampling: SamplingParams
    block_hashes: bytes = b""
    tenant: str = "default"
    router_id: str = ""
    reservation: int = 0
    saves: tuple[Save, ...] = ()
    remote_kv: RemoteKv | None = None
    timeout_s: float = math.inf
    store_kv: bool = True
    resumed_tokens: int = 0
    order: int = 0
    matcher: TokenMatcher | None = None


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What became of the save that a request asked for, or of the prefixes to keep: of the first that did not fit.

    Of one that does not fit also ``needed_tokens``, which it would have kept in addition; ``held_tokens``, which the
    tenant's saves keep; and ``budget_tokens``, which they may: its share of the budget, with "too_large" the whole one.
    """

    outcome: SaveOutcome
    needed_tokens: int = 0
    held_tokens: int = 0
    budget_tokens: int = 0

    @property
    def refused(self) -> bool:
        """Whether the prefix is not kept."""
        return self.outcome not in ("saved", "present")


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What is known of a request once it has tokens. ``cached_tokens``: of its prompt, whose KV was reused.

    ``queue_s``: from arrival to first scheduling. ``save``: what became of the one that was asked for.
    """

    cached_tokens: int
    queue_s: float = 0.0
    save: SaveResult | None = None


class EngineOutput(msgspec.Struct, frozen=True):  # one a token: a frozen dataclass takes several times as long
    """Tokens of one request that became ready in one step.

    ``first`` is in a request's first output only. The last output carries ``finish_reason``; with "error" or
    "timeout", ``error`` says why. A stop token is not among ``token_ids``, unless it was asked for. ``logprobs``: one
    for each of them, where asked for.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    first: FirstToken | None = None
    finish_reason: FinishReason | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """Room for blocks from elsewhere. ``idle_heats``: of blocks that could be evicted, packed float32, ascending."""

    free_blocks: int
    idle_heats: bytes

    def blocks_for(self, heat: float) -> int:
        """Return how many blocks of that heat fit without pushing out one as hot."""
        return self.free_blocks + int(np.searchsorted(np.frombuffer(self.idle_heats, "<f4"), np.float32(heat)))


OutputSink = Callable[[Sequence[EngineOutput]], None]
"""Called from the engine's thread once a step with everything of that step that belongs to one submitter."""

EventSink = Callable[[Sequence[Event]], None]
"""Called from the engine's thread with cache events in the order in which they happened."""


class EngineError(Exception):
    """A request the engine cannot take."""


class RequestTooLong(EngineError):
    """The prompt, or prompt plus max_tokens, can never fit this engine."""


class UnknownAdapter(EngineError):
    """The request's adapter is not loaded here."""


class QueueFull(EngineError):
    """The waiting queue is at its bound; ``retry_after_s`` says when to come back."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class KvTransfer(Protocol):
    """An engine's way in and out for cached prefixes. Any thread, but it waits for the loop."""

    def export_prefix(
        self, prefix: HashedTokens, first: int = 0, most_blocks: int | None = None, *, demote: bool = False
    ) -> KvChain | None:
        """Return the KV of the longest cached part of a prefix, in blocks from ``first`` on, ``most_blocks`` at most.

        What its chain does not name is not looked for. ``demote``: another replica takes the prefix over, so that what
        nobody else uses of it is evicted first here. None when there is none.
        """

    def import_part(self, part: KvChain, prefix: HashedTokens, first: int) -> int:
        """Take a prompt's blocks from ``first`` on, if they are exactly those; return how many leading ones are held.

        ``prefix``: the prompt's own, whose tenant pays. Raises a TransferError, taking nothing.
        """

    def hot_prefixes(self) -> HotPrefixes:
        """Return all that the pool holds, saves and the hottest first."""

    def cache_room(self) -> CacheRoom:
        """Return what would fit from elsewhere."""

    def take_over_pin(self, saved: SavedPrefix, prefix: HashedTokens) -> PinOutcome | None:
        """Pin a prefix that another replica kept; None: it is not all here, or over."""


class Adapters(Protocol):
    """An engine's LoRA adapters (any thread)."""

    @property
    def loaded(self) -> tuple[str, ...]:
        """Keys of the loaded adapters."""

    def load(self, spec: AdapterSpec) -> None:
        """Make an adapter available; reads files. Raises AdapterError, QueueFull if none is idle."""

    def unload(self, key: str) -> bool:
        """Refuse new requests for an adapter; those it has go on. False when it is not loaded."""


class Engine(Protocol):
    """A continuous-batching engine with a prefix cache."""

    def start(self) -> None:
        """Start the loop thread."""

    def stop(self) -> None:
        """Stop the loop thread; unfinished requests get an "error" output."""

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Queue a request (any thread). Raises RequestTooLong, QueueFull, UnknownAdapter or ValueError."""

    def cancel(self, request_id: str) -> None:
        """Drop a request (any thread); its blocks are free within one step. Unknown ids are ignored."""

    def load(self) -> LoadReport:
        """Current load (any thread)."""

    def stats(self) -> StatsReport:
        """Counters and gauges (any thread)."""

    def reset_prefix_cache(self, *, tiers: bool = True) -> bool:
        """Forget every cached block not in use, also below the pool if ``tiers``; False when some in use were kept."""

    def tell_cache(self, *, anew: bool = False) -> None:
        """Hand a ``CacheDigest`` to the event sink after its events (any thread, waits); ``anew``: with all held."""

    def set_tenant_shares(self, shares: Mapping[str, float]) -> None:
        """Divide cache and memory among these tenants from now on, by weight; explicit saves of all others end.

        Without any, there is one tenant. Waits for the current step. Raises ValueError for a weight that is none.
        """

    @property
    def adapters(self) -> Adapters:
        """What it has loaded of LoRA adapters."""

    @property
    def transfer(self) -> KvTransfer:
        """How prefixes come and go."""

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block's KV."""

    def known_blocks(self, block_hashes: bytes, most: int) -> int:
        """Return how many of a chain's first ``most`` blocks are cached or being computed (any thread; a hint)."""

    def wake(self) -> None:
        """Look again at requests whose ``remote_kv`` is done by now (any thread)."""

    def healthy(self) -> bool:
        """False once the loop has died or stalled."""


class AdapterError(ValueError):
    """The adapter cannot be served; the message says what to change and names no path."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Which adapter: its name, the digest of what it computes, and where the files are."""

    name: str
    digest: str
    path: str

    @property
    def key(self) -> str:
        """``PrefixScope.lora``: the same name with other weights is another key, and so shares no KV."""
        return f"{self.name}@{self.digest}"

    @classmethod
    def of_key(cls, key: str, path: str) -> AdapterSpec:
        """Return the spec whose ``key`` is given."""
        name, _, digest = key.rpartition("@")
        return cls(name, digest, path)
