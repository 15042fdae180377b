"""The engine's contract: requests, streamed outputs, load and statistics.

Token ids are int32 arrays; scopes and hashes are the router's. A replica can run any ``Engine``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
from msgspec import structs

from router.protocol.block_hash import PrefixScope, TokenArray
from router.protocol.events import Event, LoadReport, StatsReport
from router.protocol.request import RoutedRequest
from router.protocol.version import UNTOLD, WIRE_VERSION, check_version
from serve_app.cache.kv_chain import KvChain, TransferError
from serve_app.cache.prefix.hot_prefixes import HashedTokens, HotPrefixes, SavedPrefix
from serve_app.cache.prefix.pins import PinOutcome
from serve_app.config.app import AppConfig
from serve_app.engine.sampling_params import SamplingParams as SamplingParams
from serve_app.engine.sampling_params import TokenLogprob as TokenLogprob
from serve_app.engine.sampling_params import TokenMatcher as TokenMatcher
from serve_app.engine.sampling_params import TokenRules as TokenRules
from serve_app.errors import LimitReason

Clock = Callable[[], float]
"""Returns monotonic seconds."""

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
SaveOutcome = Literal["saved", "present", "over_budget", "too_large", "too_short", "failed", "off"]
"""Result of a save: "present" if it existed already; the last five are warnings ("off": no cache)."""


@dataclass(frozen=True, slots=True)
class Save:
    """Keep the full blocks of a request's first ``tokens`` tokens once the request has computed them.

    ``key`` names the save, within the scope of the request. A cache breakpoint has the key b"": equal prefixes of a
    tenant then share one save, and it is not written to disk. ``ttl_s`` counts from the last read; None: no expiry.
    """

    key: bytes
    tokens: int
    ttl_s: float | None = None


class RemoteKv:
    """KV in transit for requests, which start once it is ``done``; ``tokens``: leading tokens that it covers."""

    __slots__ = ("_ended", "tokens")

    def __init__(self, tokens: int, *, of: RemoteKv | None = None) -> None:
        self.tokens = tokens
        self._ended: threading.Event = of._ended if of is not None else threading.Event()

    @property
    def done(self) -> bool:
        """Whether the copy has ended, successfully or not."""
        return self._ended.is_set()

    def end(self) -> None:
        """Mark the copy as ended, for all waiting requests; the caller then wakes the engine."""
        self._ended.set()


class ReplyTo(msgspec.Struct, frozen=True, array_like=True):
    """The token address of an ingress. ``public_key``: its CURVE key (Z85 text), without which no peer can connect."""

    address: str = ""
    public_key: str = ""


class EngineRequest(RoutedRequest, frozen=True, kw_only=True, array_like=True, eq=False):
    """One sequence to generate, from its ingress through router and replica to the engine, and while it is answered.

    Each stage adds fields; ``to_wire`` is its only other form. Some of the router's fields follow from the others. Of
    strings "" stands for none.
    """

    # For the engine.

    tenant: str = "default"
    token_ids: TokenArray
    """The prompt, as the model reads it: int32, at least one id. ``identity`` is what is hashed."""
    scope: PrefixScope
    """``scope.lora`` names the LoRA adapter (``AdapterSpec.key``), "" the base model."""
    root: bytes
    """The scope's keyed root hash, behind the public scope's where ``scope.public_blocks`` is not 0.

    ``block_hashes`` is the packed chain of the prompt's full blocks under it (empty: the engine computes it).
    """
    sampling: SamplingParams
    saves: tuple[Save, ...] = ()
    """The prefixes to keep, an explicit one, then those of cache breakpoints, the shortest first: so they get space."""
    timeout_s: float = math.inf
    """Limit from submission to the end; an unfinished request then ends with "timeout"."""
    resumed_tokens: int = 0
    """So many of the prompt's last ids are the answer's first tokens, which another replica generated."""
    expected_tokens: int = 0
    """Of the answer, as the client guesses, 0 for no guess."""

    # For the replica.

    reply_to: ReplyTo | None = None
    """The destination of its outputs, None for none."""
    caller: str = ""
    """The name of the calling Serve actor; the generation ends when it dies."""
    lora_path: str = ""
    """Path of the adapter for a replica that lacks it."""
    interval_s: float = 0.0
    """Minimum time between two outputs, except the first and the last."""
    grammar: str = ""
    """In llguidance's form."""
    session: str = ""
    """A ``session_key``."""
    parent: str = ""
    """The ``session_key`` of the session that began this one."""
    final: bool = False
    """The session ends with this answer."""
    traceparent: str = ""
    """W3C's, of the parent's span."""

    # From the replica.

    matcher: TokenMatcher | None = None
    """This answer's own grammar; where the rules leave no token, the grammar wins."""
    remote_kv: RemoteKv | None = None
    """KV in transit that the request waits for; it is queued, and counted as waiting, from submission."""

    # For the ingress.

    deadline_s: float = math.inf
    """By its ``time.perf_counter``."""
    grammar_field: str = ""
    """The client's field with the grammar."""
    warning: str = ""
    """What the grammar leaves out."""
    echo: str = ""
    """The prompt, if the answer repeats it."""
    prompt_ref: str = ""
    """The version of its registered prompt."""
    model: str = ""
    """Its name in usage."""
    charged: bool = False
    """Whether its prompt is charged, once for all choices."""
    system_chars: int = 0
    """Characters of the formatted system prompt."""
    system_tokens: int = 0
    """Tokens that the prompt has in common with the formatted system prompt."""

    tokenizer: str = ""
    """For the replica: whose ids these are (``CheckpointInfo``)."""
    version: int = WIRE_VERSION
    """Of the sender's messages; its outputs have the same, since nobody else is answered."""
    hashed_ids: TokenArray | None = None
    """For the engine: the ``identity``, where it is not the ids themselves."""

    @property
    def identity(self) -> TokenArray:
        """What caches hash and compare, an id for each token: KV is shared only as far as these agree."""
        return self.token_ids if self.hashed_ids is None else self.hashed_ids

    def __post_init__(self) -> None:
        """Set the fields of ``RoutedRequest`` that follow from others."""
        structs.force_setattr(self, "prompt_tokens", len(self.token_ids))
        structs.force_setattr(self, "adapter", self.scope.lora)
        # Tokens with reused KV have no log-probabilities.
        structs.force_setattr(self, "reads_kv", self.sampling.prompt_logprobs is None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as msgpack: Ray pickles a call's arguments, which takes several times as long for each field."""
        return request_of_wire, (to_wire(self),)


@dataclass(frozen=True, slots=True)
class SaveResult:
    """The result of a request's save; of several prefixes to keep, the result of the first that did not fit.

    A refusal for size has ``needed_tokens``: those it would have kept in addition; ``held_tokens``: those that the
    tenant's saves keep; and ``budget_tokens``: the tenant's share of the budget, with "too_large" the whole budget.
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
    """Facts known once a request has tokens. ``cached_tokens``: tokens of its prompt with reused KV.

    ``queue_s``: from arrival to first scheduling. ``save``: the result of the requested save.
    ``expected``: the cached tokens are what events promised, and the truth is known at the end. ``correction``: in the
    last output after such a promise; ``cached_tokens`` is then what to add to those told before.
    """

    cached_tokens: int
    queue_s: float = 0.0
    save: SaveResult | None = None
    correction: bool = False
    expected: bool = False

    def after(self, earlier: FirstToken | None) -> FirstToken:
        """Return these facts as one with those told before."""
        if earlier is None or not self.correction:
            return self
        return replace(earlier, cached_tokens=earlier.cached_tokens + self.cached_tokens)


class Prefilled(NamedTuple):
    """What was done for a prompt: ``tokens``, its first ones with KV, of which ``cached_tokens`` were reused."""

    tokens: int
    cached_tokens: int


ErrorKind = Literal[
    "", "too_long", "queue_full", "invalid", "grammar", "failed", "unavailable", "timeout", "rerouted",
    "other_model",
]  # fmt: skip
"""Why a request has no answer, or no more of it. "grammar": its own grammar ended it. "unavailable": another replica
can continue it. "rerouted": the replica has more load than the router knew. "other_model": the replica has another one
than the ingress, and cannot read the prompt."""


class EngineOutput(msgspec.Struct, array_like=True, gc=False):  # one per token
    """Tokens of one request that became ready together, from the engine to the reader of its answer.

    Only the output with a request's first token has ``first``. The last one has ``finish_reason`` and ``prefilled``;
    ``error`` is its kind of failure, and ``message`` explains it to the client. ``token_ids`` excludes the stop token
    unless it was requested. ``logprobs``: one for each token, if requested; ``prompt_logprobs``: of the prompt's next
    tokens, in earlier outputs.

    Its replica adds ``seq``, the number of earlier outputs of its call. A call also returns a last output, without
    tokens. A refusal has ``retry_after_s`` and ``reason``; or ``load``, if it is more than the router estimated.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    first: FirstToken | None = None
    finish_reason: FinishReason | None = None
    error: ErrorKind = ""
    message: str = ""
    prefilled: Prefilled | None = None
    seq: int = 0
    retry_after_s: float = 0.0
    reason: LimitReason | None = None
    load: LoadReport | None = None

    def end(self, reason: FinishReason, error: ErrorKind = "failed", message: str = "") -> None:
        """Make this the last output. ``error`` counts only for the reason "error"."""
        self.finish_reason, self.message = reason, message
        self.error = error if reason == "error" else "timeout" if reason == "timeout" else ""


def _pack(token_ids: TokenArray) -> bytes:
    return token_ids.astype("<i4", copy=False).tobytes()


def _unpack(_: type, token_ids: bytes) -> TokenArray:
    return np.frombuffer(token_ids, dtype="<i4")


to_wire = msgspec.msgpack.Encoder(enc_hook=_pack).encode
"""Encodes a request, an output or a list of outputs. Token ids travel as raw int32 bytes."""
_requests = msgspec.msgpack.Decoder(EngineRequest, dec_hook=_unpack)
output_of_wire = msgspec.msgpack.Decoder(EngineOutput).decode
outputs_of_wire = msgspec.msgpack.Decoder(list[EngineOutput]).decode


def request_of_wire(data: bytes) -> EngineRequest:
    """Return the request that another process sent. Raises OtherVersion for one of another release's layout."""
    try:
        request = _requests.decode(data)
    except msgspec.ValidationError:
        check_version(_version_in(data))
        raise
    check_version(request.version)
    return request


def _version_in(data: bytes) -> int:
    """Return the version of a request that cannot be read: its place among the fields never changes."""
    fields = msgspec.msgpack.decode(data)
    at = EngineRequest.__struct_fields__.index("version")
    version = fields[at] if isinstance(fields, list) and len(fields) > at else UNTOLD
    return version if isinstance(version, int) else UNTOLD


MAX_TOLD_TOKENS = 4096
"""Most of a prompt's tokens that one output tells of: its message stays far below the limit of a connection."""


def prompt_outputs(request_id: str, logprobs: Sequence[TokenLogprob]) -> list[EngineOutput]:
    """Return the outputs that tell the log-probabilities of a prompt's next tokens."""
    starts = range(0, len(logprobs), MAX_TOLD_TOKENS)
    return [EngineOutput(request_id, prompt_logprobs=tuple(logprobs[at : at + MAX_TOLD_TOKENS])) for at in starts]


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """Space for blocks of other replicas. ``idle_heats``: heats of evictable blocks, packed float32, ascending."""

    free_blocks: int
    idle_heats: bytes

    def blocks_for(self, heat: float) -> int:
        """Return how many blocks of this heat fit without evicting one at least as hot."""
        return self.free_blocks + int(np.searchsorted(np.frombuffer(self.idle_heats, "<f4"), np.float32(heat)))


OutputSink = Callable[[Sequence[EngineOutput]], None]
"""Called from the engine's thread once per step, with all of the step's outputs for one submitter."""

TakeAtOnce = Callable[[EngineOutput], bool]
"""Takes an output inside the callback that received it; False: not now, it goes to the reader who waits for it."""

EventSink = Callable[[Sequence[Event]], None]
"""Called from the engine's thread with cache events, in the order in which they happened."""


class EngineError(Exception):
    """The engine cannot accept the request."""


class RequestTooLong(EngineError):
    """The prompt, or prompt plus max_tokens, can never fit this engine."""


class UnknownAdapter(EngineError):
    """The request's adapter is not loaded here."""


class QueueFull(EngineError):
    """The waiting queue is full, or another limit (``reason``) is reached; ``retry_after_s``: when to try again."""

    def __init__(self, reason: LimitReason, retry_after_s: float) -> None:
        super().__init__(f"{reason.limit} is reached")
        self.reason = reason
        self.retry_after_s = retry_after_s


class KvTransfer(Protocol):
    """Export and import of an engine's cached prefixes. Any thread may call, but waits for the loop."""

    def export_prefix(
        self, prefix: HashedTokens, first: int = 0, most_blocks: int | None = None, *, demote: bool = False
    ) -> KvChain | None:
        """Return the KV of the longest cached part of a prefix: at most ``most_blocks`` blocks from ``first`` on.

        Only blocks named in its chain are looked up. ``demote``: another replica takes the prefix over, so this one
        evicts the blocks that nothing else uses first. Returns None if no block is cached.
        """

    def import_part(self, part: KvChain, prefix: HashedTokens, first: int) -> int:
        """Import a prompt's blocks from ``first`` on after checking them; return how many leading blocks are held.

        ``prefix``: the prompt's own; its tenant is charged. Raises a TransferError, importing nothing.
        """

    def hot_prefixes(self) -> HotPrefixes:
        """Return all prefixes in the pool, saves and the hottest first."""

    def cache_room(self) -> CacheRoom:
        """Return the space for blocks of other replicas."""

    def take_over_pin(self, saved: SavedPrefix, prefix: HashedTokens) -> PinOutcome | None:
        """Pin a prefix that another replica kept; None if part of it is missing here or its time is over."""


class Adapters(Protocol):
    """An engine's LoRA adapters (any thread)."""

    @property
    def loaded(self) -> tuple[str, ...]:
        """Keys of the loaded adapters."""

    def load(self, spec: AdapterSpec) -> None:
        """Make an adapter available; reads files. Raises AdapterError, or QueueFull if none is idle."""

    def unload(self, key: str) -> bool:
        """Refuse new requests for an adapter; current ones continue. Return False if it is not loaded."""


class Engine(Protocol):
    """A continuous-batching engine. What has a body here is optional, and absent in an engine that inherits it.

    ``config.engine.EngineTraits.can`` declares the same, because settings are checked before there is an engine.
    """

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

    def healthy(self) -> bool:
        """Return False once the loop has died or stalled."""

    def reset_prefix_cache(self, *, tiers: bool = True) -> bool:
        """Drop all cached blocks not in use, and those of the tiers if ``tiers``; False if blocks in use were kept."""
        return True

    def tell_cache(self, *, anew: bool = False) -> None:
        """Send pending events and a ``CacheDigest`` to the event sink (any thread, waits); ``anew``: blocks first."""
        return

    def set_tenant_shares(self, shares: Mapping[str, float]) -> None:
        """Divide cache and memory among these tenants by weight from now on; explicit saves of others end.

        An empty mapping means one tenant. Waits for the current step. Raises ValueError for an invalid weight.
        """
        return

    @property
    def adapters(self) -> Adapters:
        """The loaded LoRA adapters; "adapters"."""
        return NO_ADAPTERS

    @property
    def transfer(self) -> KvTransfer:
        """Export and import of prefixes; "copies", "saves"."""
        return NO_TRANSFER

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block's KV."""
        return 0

    def cached_blocks(self, block_hashes: bytes, most: int) -> int:
        """Return how many of a chain's first ``most`` blocks are cached or being computed (any thread; a hint)."""
        return 0

    def retire(self, last_block: bytes, shared_tokens: int) -> None:
        """Evict a context first, as its session has ended: what it shares with no other (any thread).

        ``last_block``: the hash of its last prompt's last full block; ``shared_tokens``: those that stay at least.
        """
        return

    def wake(self) -> None:
        """Check again whether each request's ``remote_kv`` is done (any thread)."""
        return


@runtime_checkable
class ExternalEngine(Engine, Protocol):
    """An engine in front of servers that already run, one for each replica (``EngineTraits.external``)."""

    def share(self, claim: Callable[[Sequence[str], str], str]) -> None:
        """Take servers that no other replica has; called before ``start``.

        ``claim`` returns which of some URLs this replica has now, "" for none, given the one that it had; it waits.
        """

    @property
    def seats(self) -> int:
        """How many replicas its servers need."""

    def set_workers(self, entries: Sequence[str]) -> None:
        """Use the servers that these entries name (the setting ``workers``) from now on."""


class AdapterError(ValueError):
    """The adapter cannot be served; the message tells the user the fix and contains no path."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """An adapter: its name, the digest of its config and weights, and the path of its files."""

    name: str
    digest: str
    path: str

    @property
    def key(self) -> str:
        """``PrefixScope.lora``: other weights of the same name have another key, and so share no KV."""
        return f"{self.name}@{self.digest}"

    @classmethod
    def of_key(cls, key: str, path: str) -> AdapterSpec:
        """Return the spec with this ``key``."""
        name, _, digest = key.rpartition("@")
        return cls(name, digest, path)


class NoAdapters:
    """The ``Adapters`` of an engine without any."""

    loaded: tuple[str, ...] = ()

    def load(self, spec: AdapterSpec) -> None:
        """Refuse."""
        raise AdapterError("this engine has no LoRA adapters; use another one (docs/explanation/api.md)")

    def unload(self, key: str) -> bool:
        """Return False."""
        return False


class NoTransfer:
    """The ``KvTransfer`` of an engine whose KV neither leaves nor enters."""

    def export_prefix(
        self, prefix: HashedTokens, first: int = 0, most_blocks: int | None = None, *, demote: bool = False
    ) -> KvChain | None:
        """Return None."""
        return None

    def import_part(self, part: KvChain, prefix: HashedTokens, first: int) -> int:
        """Raise a TransferError."""
        raise TransferError("this engine takes no KV from other replicas")

    def hot_prefixes(self) -> HotPrefixes:
        """Return none."""
        return HotPrefixes()

    def cache_room(self) -> CacheRoom:
        """Return no space."""
        return CacheRoom(0, b"")

    def take_over_pin(self, saved: SavedPrefix, prefix: HashedTokens) -> PinOutcome | None:
        """Return None."""
        return None


NO_ADAPTERS, NO_TRANSFER = NoAdapters(), NoTransfer()


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint's facts. ``fingerprint``: 32 hex digits, see ``checkpoints.checkpoint.load_checkpoint_info``.

    ``tokenizer``: equal for models with the same token ids, "" if that is not known.
    """

    path: Path
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer: str = ""


@dataclass(frozen=True, slots=True)
class EngineMaker:
    """Builds an engine; the other fields return a sentence for each unsupported setting or model (config.json).

    ``costs_of_model``: for settings that cost a model something unexpected.
    """

    build: Callable[[AppConfig, CheckpointInfo, EventSink], Engine]
    refused_settings: Callable[..., list[str]] = lambda _, *, on_cpu: []
    refused_model: Callable[..., list[str]] = lambda _, __, *, on_cpu: []
    costs_of_model: Callable[[Mapping[str, Any], AppConfig], list[str]] = lambda _, __: []
